"""How llmx installs: a checkout or a wheel, with and without a compiler, beside a distribution called `kernels`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = sysconfig.get_path("purelib")
NO_BUILD = next(
    (
        f"{what} is not installed"
        for what, there in [
            ("scikit-build-core", importlib.util.find_spec("scikit_build_core")),
            ("nanobind", importlib.util.find_spec("nanobind")),
            ("pip", importlib.util.find_spec("pip")),
            ("cmake", shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")),
        ]
        if not there
    ),
    None,
)
needs_build = pytest.mark.skipif(NO_BUILD is not None, reason=str(NO_BUILD))


def is_editable() -> bool:
    try:
        origin = importlib.metadata.distribution("llmx").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return origin is not None and json.loads(origin).get("dir_info", {}).get("editable", False)


editable = pytest.mark.skipif(not is_editable(), reason="runs from the tree, not from an editable install")


def run(*command: str, cwd: Path = ROOT, **env: str | None) -> subprocess.CompletedProcess[str]:
    """`env` adds variables, or takes away those that are None."""
    merged = {key: value for key, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.run(command, cwd=cwd, env=merged, capture_output=True, text=True)


def python(code: str, cwd: Path = ROOT, **env: str | None) -> str:
    done = run(sys.executable, "-c", code, cwd=cwd, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- the checkout ----------------------------------------------------------------------------------------


def test_this_checkout_is_what_is_tested():
    import llmx
    import llmx.kernels.reference

    for module in (llmx, llmx.kernels.reference):
        assert Path(module.__file__).is_relative_to(ROOT), "installed from another checkout: run make"


@editable
@pytest.mark.parametrize("where", ["the root", "elsewhere"])
def test_an_editable_install_imports_the_checkout_from(where, tmp_path):
    code = "import llmx.kernels.cpu as c, llmx.kernels.reference as r; print(c.__file__, r.__file__)"
    found = python(code, cwd=ROOT if where == "the root" else tmp_path)
    assert found == f"{ROOT}/kernels/cpu/__init__.py {ROOT}/kernels/reference/__init__.py"


def test_the_tree_alone_is_enough_with_pythonpath(tmp_path):
    """As on a machine where nothing is installed: `-S` leaves out what makes an editable install work."""
    code = f"import sys; sys.path.append({SITE!r}); import llmx.kernels.cpu as c; print(c.__file__)"
    done = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == f"{ROOT}/kernels/cpu/__init__.py", done.stderr


@editable
@pytest.mark.parametrize("where", ["the root", "elsewhere"])
@pytest.mark.parametrize("how", [["pytest"], ["python", "-m", "pytest"]])
def test_pytest_runs_from(where, how, tmp_path):
    script = Path(sys.executable).with_name(how[0])
    arguments = ["-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_layers.py"), "-k", "kernel_folder"]
    done = run(str(script), *how[1:], *arguments, cwd=ROOT if where == "the root" else tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_another_index_is_for_torch_alone():
    url = "https://example.org/whl"
    told = run("make", "--dry-run", "--always-make", f"TORCH_INDEX={url}").stdout.splitlines()
    (line,) = [line for line in told if url in line]
    assert line.endswith(f"--index-url {url} torch")
    assert len([line for line in told if "pip" in line.split()]) >= 3
    assert "--index-url" not in run("make", "--dry-run", "--always-make").stdout


# ---- the name `kernels` ----------------------------------------------------------------------------------


def test_the_folder_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_each_folder_of_kernels_is_mapped_into_the_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    folders = {f"kernels/{path.parent.name}" for path in (ROOT / "kernels").glob("*/__init__.py")}
    assert set(packages.values()) == {"llmx"} | folders
    assert all(target == f"llmx/{source}" for target, source in packages.items() if source != "llmx")


@pytest.mark.parametrize("where", ["the root", "elsewhere"])
def test_a_distribution_called_kernels_keeps_its_name(where, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("")
    (site / "kernels-99.0.dist-info").mkdir()
    (site / "kernels-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 99.0\n")
    code = (  # at the end of the path, as site-packages are
        f"import sys; sys.path.append({str(site)!r}); import kernels, llmx.kernels.reference as r, llmx.kernels.cpu\n"
        "import importlib.metadata; print(kernels.__file__, importlib.metadata.version('kernels'), r.__file__)"
    )
    path = str(ROOT)
    found = python(code, cwd=ROOT if where == "the root" else elsewhere, PYTHONPATH=path)
    assert found == f"{site}/kernels/__init__.py 99.0 {ROOT}/kernels/reference/__init__.py"


def test_without_such_a_distribution_transformers_sees_none():
    pytest.importorskip("transformers")
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip("a distribution called kernels is installed")
    code = "from transformers.utils import is_kernels_available; import llmx.kernels.reference\n"
    assert python(code + "print(is_kernels_available())") == "False"  # run at the root, where the folder can be seen


# ---- wheels ----------------------------------------------------------------------------------------------


def build(tmp_path: Path, **env: str | None) -> subprocess.CompletedProcess[str]:
    """Build a wheel of a copy of the checkout, without a network, into `tmp_path`/wheels."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("llmx", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-w", "../wheels", "."]
    return run(sys.executable, "-m", "pip", "wheel", *options, cwd=source, **{"PATH": path, **env})


def unpack(tmp_path: Path) -> tuple[Path, set[str]]:
    """The one wheel in `tmp_path`/wheels, laid out as an installer would, and its list of files."""
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        return wheel, set(archive.namelist())


def installed(tmp_path: Path, code: str) -> str:
    """What `code` prints where that wheel is installed: `-S` keeps an editable install of the checkout out."""
    begin = f"import sys; sys.path += [{str(tmp_path / 'installed')!r}, {SITE!r}]\n"
    done = run(sys.executable, "-S", "-c", begin + code, cwd=tmp_path, PYTHONPATH=None)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules(tmp_path: Path) -> set[str]:
    """Every Python file that belongs into the wheel, by its path there."""
    llmx, kernels = tmp_path / "source" / "llmx", tmp_path / "source" / "kernels"
    own = {f"llmx/{path.relative_to(llmx)}" for path in llmx.rglob("*.py")}
    return own | {f"llmx/kernels/{path.relative_to(kernels)}" for path in kernels.rglob("*.py")}


SUM = """
import torch
from llmx.kernels import Kernels, cpu
op = Kernels("cpu").get("philox_uniform")
same = torch.equal(op(torch.tensor([5]), torch.tensor([6]), 7, 8), Kernels("cpu", "reference").get("philox_uniform")(
    torch.tensor([5]), torch.tensor([6]), 7, 8))
print(op.__module__, cpu.describe().split()[0], same, __import__("llmx").__file__)
"""


@needs_build
@pytest.mark.slow
def test_a_wheel_has_all_modules_and_the_library_and_runs_outside_the_checkout(tmp_path):
    done = build(tmp_path, LLMX_REQUIRE_NATIVE="1")
    if done.returncode and shutil.which("c++") is None and "CXX" not in os.environ:
        pytest.skip("no C++ compiler")
    assert done.returncode == 0, done.stdout + done.stderr
    _, names = unpack(tmp_path)
    assert modules(tmp_path) <= names
    assert "llmx/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert len([name for name in names if name.startswith("llmx/kernels/cpu/_native") and name.endswith(".so")]) == 1
    assert not [
        name for name in names if name.endswith((".cpp", ".h")) or name.partition("/")[0] in ("tests", "kernels")
    ]
    module, isa, same, where = installed(tmp_path, SUM).split()
    assert (module, same) == ("llmx.kernels.cpu.random", "True")
    assert isa != "none"
    assert where == str(tmp_path / "installed" / "llmx" / "__init__.py")


@needs_build
@pytest.mark.slow
def test_without_a_compiler_the_install_succeeds_and_the_reference_serves(tmp_path):
    done = build(tmp_path, CC="/bin/false", CXX="/bin/false", LLMX_REQUIRE_NATIVE=None)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = unpack(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert modules(tmp_path) <= names
    module, isa, same, _ = installed(tmp_path, SUM).split()
    assert (module, isa, same) == ("llmx.kernels.reference.random", "none", "True")
    told = installed(tmp_path, "import llmx.cli; llmx.cli.app(['env'])")
    assert "none (installed without a C++ compiler); the torch reference serves" in told


@needs_build
@pytest.mark.slow
def test_a_developer_without_a_compiler_is_told_so(tmp_path):
    done = build(tmp_path, CC="/bin/false", CXX="/bin/false", LLMX_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "CMake configuration failed" in done.stdout + done.stderr


@needs_build
@pytest.mark.slow
def test_a_pure_wheel_can_be_asked_for(tmp_path):
    done = build(tmp_path, LLMX_PURE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, names = unpack(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert modules(tmp_path) <= names
