"""`llmx env`: what this machine and this installation can do."""

from __future__ import annotations

import sys
from typing import Any

from llmx.commands.options import Json


def env(json: Json = None) -> None:
    """Say what this machine and this installation can do."""
    import torch  # noqa: F401
    from rich.console import Console

    from llmx.device import thread_count
    from llmx.report import Report

    # CUDA's share of the environment is only known with torch loaded.
    report = Report("env", results={"threads": thread_count(), "kernels": _backends()})
    # Nobody's window limits a pipe or a file: a wrapped cell is hard to grep.
    Console(width=None if sys.stdout.isatty() else 200).print(report.environment_table(), report.table())
    if json is not None:
        report.write_json(json)


def _backends() -> dict[str, Any]:
    """Each folder of kernels: what it says of itself and the ops it has."""
    import importlib

    from llmx.kernels import BACKENDS

    found: dict[str, Any] = {}
    for name in BACKENDS:
        try:
            package = importlib.import_module(f"llmx.kernels.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"llmx.kernels.{name}":
                raise
            continue
        usable = not hasattr(package, "available") or package.available()
        says = package.describe() if hasattr(package, "describe") else "torch"
        found[name] = {"is": says, "ops": sorted(package.KERNELS) if usable else []}
    return found
