"""Stored-weight schemes: each file here but the helpers below is one. The folder is the registry."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmx.errors import UsageError
from llmx.schemes.base import Scheme

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored
    from llmx.formats.quantization import Quantization

HELPERS = frozenset({"base", "blocks", "grid", "grids", "whole"})


@functools.cache
def schemes() -> Mapping[str, Scheme]:
    """Every scheme by its file's name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in HELPERS)
    return {name: importlib.import_module(f"{__name__}.{name}").SCHEME for name in names}


@functools.cache
def for_checkpoint(quantization: Quantization | None) -> tuple[Scheme, ...]:
    """The schemes as a checkpoint's config sets them up, the same ones each time."""
    if quantization is None:
        return tuple(schemes().values())
    return tuple(one for scheme in schemes().values() for one in scheme.configured(quantization))


def find(where: str, stored: Mapping[str, Stored], quantization: Quantization | None = None) -> Scheme:
    """The scheme that these tensors of linear `where` are in, `bias` not among them. UsageError if none is built."""
    for scheme in for_checkpoint(quantization):
        if scheme.matches(stored):
            return scheme
    kinds = ", ".join(f"{name} ({tensor.kind})" for name, tensor in sorted(stored.items()))
    raise UsageError(
        f"{where} is stored as {kinds}, which this version can't read.",
        hint=f"the schemes it has are {', '.join(scheme.name for scheme in schemes().values())}",
    )
