"""The one table: op -> implementation. A backend is a folder under kernels/; what it lacks falls to the reference."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from llmx.errors import UsageError

_TREE = Path(__file__).parents[2] / "kernels"
if _TREE.is_dir():  # run from the tree without an install: the build maps these folders under this package
    __path__.append(str(_TREE))

BACKENDS = ("cuda", "cpu", "reference")


class Kernels:
    """The implementations for one device, chosen when an op is first asked for and reported in every result.

    A backend is a package with `KERNELS` (op -> "module:function", imported lazily) and, if it may not run here,
    `available()`. LLMX_KERNELS=reference (or `forced`) takes every op from that backend, to bisect.

    activations: what rows are multiplied with weights in whole numbers as: "int8" or "int8-pow2", rounded to 8 bits, or
    "bf16", not.
    """

    def __init__(self, device: str, forced: str | None = None, activations: str = "bf16") -> None:
        self.device, self.activations = device, activations
        self.forced = forced or os.environ.get("LLMX_KERNELS") or None
        if self.forced is not None and self.forced not in BACKENDS:
            raise UsageError(f"LLMX_KERNELS={self.forced} is not a backend; there are {', '.join(BACKENDS)}.")
        self._chosen: dict[str, tuple[str, Callable[..., Any]]] = {}

    def get(self, op: str) -> Callable[..., Any]:
        """The implementation of `op`; UsageError that names what was tried if no backend has it."""
        if op not in self._chosen:
            self._chosen[op] = self._choose(op)
        return self._chosen[op][1]

    def has(self, op: str) -> bool:
        """Whether a backend has `op`: some are there to be fast, and need no reference."""
        return op in self._chosen or self._where(op) is not None

    def chosen(self) -> tuple[tuple[str, str], ...]:
        """(op, backend) for every op that was asked for."""
        return tuple(sorted((op, backend) for op, (backend, _) in self._chosen.items()))

    def _choose(self, op: str) -> tuple[str, Callable[..., Any]]:
        if (found := self._where(op)) is None:
            tried = ", ".join(self._backends())
            raise UsageError(f"no kernel {op!r} for {self.device}; tried {tried}.", hint="unset LLMX_KERNELS")
        name, where = found
        module, function = where.split(":")
        return name, getattr(importlib.import_module(f"llmx.kernels.{name}.{module}"), function)

    def _backends(self) -> list[str]:
        return [self.forced] if self.forced else [name for name in (self.device, "reference") if name in BACKENDS]

    def _where(self, op: str) -> tuple[str, str] | None:
        """The first backend with `op`, and its place there."""
        for name in self._backends():
            backend = _backend(name)
            if backend is not None and (where := backend.KERNELS.get(op)):
                return name, where
        return None


def _backend(name: str) -> ModuleType | None:
    """The backend's package; None where it isn't built or does not run here."""
    try:
        package = importlib.import_module(f"llmx.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"llmx.kernels.{name}":
            raise
        return None
    if package.__file__ is None:  # a folder that only leftovers live in imports as a namespace
        return None
    return package if getattr(package, "available", lambda: True)() else None
