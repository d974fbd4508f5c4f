"""A module may import only from layers below its own. Order is the architecture; this file is its only copy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [  # top to bottom; modules on one line are siblings and may not import each other
    ["llmx.cli"],
    ["llmx.commands"],
    ["llmx.server", "llmx.quantize", "llmx.train"],
    ["llmx.bench", "llmx.evals", "llmx.inspect", "llmx.convert"],
    ["llmx.llm"],
    ["llmx.engine"],
    ["llmx.speculative"],
    ["llmx.scheduler"],
    ["llmx.sampler"],
    ["llmx.loading", "llmx.planning"],
    ["llmx.models"],
    ["llmx.layers"],
    ["llmx.cache"],
    ["llmx.batch"],
    ["llmx.schemes"],
    ["llmx.kernels"],
    ["llmx.detokenizer"],
    ["llmx.tokenizer"],
    ["llmx.templates"],
    ["llmx.parallel", "llmx.formats"],
    ["llmx.config", "llmx.core", "llmx.device", "llmx.grammar", "llmx.report", "llmx.gates"],
    ["llmx.errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FACADE = {"LLM": "llmx.llm", "SamplingParams": "llmx.core"}  # what `llmx` itself offers lazily


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in ((ROOT / "llmx", "llmx"), (ROOT / "kernels", "llmx.kernels")):
        for path in sorted(folder.rglob("*.py")):
            dotted = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            yield dotted.removesuffix(".__init__"), path


def layer(dotted: str) -> str | None:
    return next((name for name in RANK if dotted == name or dotted.startswith(name + ".")), None)


def resolve(module: str | None, level: int, importer: str, is_package: bool) -> str:
    """The absolute name of what `from ..module import` means in `importer`."""
    parts = importer.split(".") if is_package else importer.split(".")[:-1]
    base = parts[: len(parts) - level + 1] if level else []
    return ".".join([*base, *([module] if module else [])])


def imports(tree: ast.AST, importer: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every import in the file as (dotted name, line), also inside functions; not those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), importer, is_package)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node.module, node.level, importer, is_package)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif (name := literal_import(node)) is not None:
            package_level = len(name) - len(name.lstrip("."))
            yield resolve(name.lstrip(".") or None, package_level, importer, is_package), node.lineno
        yield from imports(node, importer, is_package)


def literal_import(node: ast.AST) -> str | None:
    """The name in `import_module("name")` or `__import__("name")`, its fixed beginning if it is an f-string."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if called not in ("import_module", "__import__"):
        return None
    name = node.args[0]
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def complaints(source: str, importer: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module, one line each."""
    if importer == "llmx":
        return []  # the facade: it names what it offers lazily, and nothing below imports it for that
    mine = layer(importer)
    if mine is None:
        return [f"{importer} has no rank: add it to LAYERS"]
    found = []
    for target, line in imports(ast.parse(source), importer, is_package):
        named = target.removeprefix("llmx.")
        theirs = layer(FACADE.get(named, target))
        if theirs is None and target.startswith("llmx.") and not named.startswith("__"):
            found.append(f"line {line}: {target} has no rank")
        elif theirs and theirs != mine and RANK[theirs] <= RANK[mine]:
            found.append(f"line {line}: {mine} may not import {theirs}")
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_point_down(module: str, path: Path) -> None:
    assert not complaints(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


def test_every_kernel_folder_is_seen() -> None:
    assert {"llmx.kernels", "llmx.kernels.reference", "llmx.kernels.cpu"} <= {name for name, _ in modules()}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("llmx.core", "import llmx.engine"),
        ("llmx.core", "from llmx.engine import Engine"),
        ("llmx.core", "from llmx import engine"),
        ("llmx.core", "from llmx import LLM"),
        ("llmx.core", "from . import engine"),
        ("llmx.core", "def lazy():\n    from llmx.engine import Engine"),
        ("llmx.core", "import importlib\nimportlib.import_module('llmx.engine')"),
        ("llmx.core", "from importlib import import_module\nx = [import_module(f'llmx.engine.{n}') for n in names]"),
        ("llmx.core", "import importlib\nimportlib.import_module('.engine', 'llmx')"),
        ("llmx.core", "import llmx.config"),
        ("llmx.schemes.dense", "from ..layers import linear"),
        ("llmx.kernels.cpu.norm", "from llmx.layers import linear"),
        ("llmx.core", "from llmx import anything"),
        ("llmx.core", "if TYPE_CHECKING:\n    pass\nelse:\n    import llmx.engine"),
        ("llmx.brand_new", ""),
    ],
)
def test_a_wrong_import_is_found(importer: str, source: str) -> None:
    assert complaints(source, importer)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("llmx.engine.runner", "from llmx.core import Row\nfrom . import graph"),
        ("llmx.commands.env", "from llmx import LLM, SamplingParams, __version__"),
        ("llmx.core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llmx.engine import Engine"),
        ("llmx.schemes.base", "import importlib\nimportlib.import_module('llmx.schemes.dense')"),
        ("llmx.core", "import torch"),
    ],
)
def test_a_right_import_passes(importer: str, source: str) -> None:
    assert not complaints(source, importer)
