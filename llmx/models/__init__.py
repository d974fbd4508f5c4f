"""Model families, a file each. The folder is the registry: `ARCHITECTURES` in a file says what it runs."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint
from llmx.formats.fields import Fields, load_json
from llmx.formats.gguf import Gguf, open_gguf
from llmx.formats.hub import Located
from llmx.formats.safetensors import open_safetensors


@dataclass(frozen=True)
class Opened:
    """A model's checked files: the family's module, its `Config`, the checkpoint."""

    family: ModuleType
    architecture: str
    config: Any  # the family's frozen Config
    checkpoint: Checkpoint
    names: Names
    metadata: Fields
    stored_dtype: str | None  # the dtype that a Hugging Face config names


@dataclass(frozen=True)
class Names:
    """The way from a model's own tensor names (Hugging Face style) to those stored.

    `table` maps name patterns with `{i}` for the layer to stored names (GGUF); empty: names are stored as they are.
    `permuted`: last component of a name -> heads, where rows are stored with a head's two halves interleaved.
    """

    table: dict[str, str]
    permuted: dict[str, int]

    def stored(self, name: str, suffix: str) -> str:
        if not self.table:
            return f"{name}.{suffix}"
        parts = name.split(".")
        index = next((part for part in parts if part.isdigit()), "")
        pattern = ".".join("{i}" if part.isdigit() else part for part in parts)
        return f"{self.table[pattern].replace('{i}', index)}.{suffix}"

    def permute(self, name: str) -> int | None:
        return self.permuted.get(name.rsplit(".", 1)[-1])


def open_model(located: Located, checkpoint: Checkpoint | None = None) -> Opened:
    """Open and check a located model's files. UsageError for an architecture that no family runs, or a bad config.

    checkpoint: of a folder, one that is open already, and is taken as it is.
    """
    return _open_gguf(located) if located.kind == "gguf" else _open_folder(located, checkpoint)


def _open_folder(located: Located, checkpoint: Checkpoint | None) -> Opened:
    fields = load_json(located.path / "config.json")
    named = fields.strings("architectures")
    family = family_of(named[0] if named else "none", fields.where)
    if not fields.boolean("is_causal", True):
        raise UsageError(f"{fields.where}: is_causal is false; this version runs causal models.")
    config = family.Config.from_hf(fields)
    dtype = fields.text("dtype", None) or fields.text("torch_dtype", None)
    checkpoint = checkpoint or open_safetensors(located.path)
    return Opened(family, named[0], config, checkpoint, Names({}, {}), fields, dtype)


def _open_gguf(located: Located) -> Opened:
    checkpoint: Gguf = open_gguf(located.path)
    fields = Fields(checkpoint.metadata, located.path.name)
    architecture = fields.text("general.architecture")
    family = _family("GGUF_ARCHITECTURES", architecture, fields.where)
    config = family.Config.from_gguf(fields, checkpoint)
    permuted = {part: getattr(config, heads) for part, heads in family.GGUF_PERMUTED.items()}
    return Opened(family, architecture, config, checkpoint, Names(family.GGUF, permuted), fields, None)


def family_of(architecture: str, where: str) -> ModuleType:
    """The family that runs transformers' `architecture`; UsageError, beginning with `where`, if there is none."""
    return _family("ARCHITECTURES", architecture, where)


@cache
def families() -> tuple[ModuleType, ...]:
    """Every file of this folder."""
    return tuple(importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))


def _family(table: str, architecture: str, where: str) -> ModuleType:
    for family in families():
        if architecture in getattr(family, table):
            found: ModuleType = family
            return found
    known = sorted(name for family in families() for name in getattr(family, table))
    raise UsageError(
        f"{where}: the architecture {architecture[:80]!r} is not built; this version runs {', '.join(known)}."
    )


def random_shape(name: str) -> tuple[ModuleType, Any]:
    """A family and its Config for random weights: what benchmarks and smoke tests run where there is no model."""
    for family in families():
        if (shape := getattr(family, "SHAPES", {}).get(name)) is not None:
            return family, shape
    known = sorted(name for family in families() for name in getattr(family, "SHAPES", {}))
    raise UsageError(f"There is no random shape {name!r}; there are {', '.join(known)}.")
