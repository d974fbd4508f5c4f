"""Triton kernels for CUDA devices. Neither torch nor triton is imported before an op is asked for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

KERNELS: dict[str, str] = {
    **{op: f"norm:{op}" for op in ("rms_norm", "add_rms_norm")},
    "rope_and_write": "rope:rope_and_write",
    **{op: f"attention:{op}" for op in ("plan_attention", "attention")},
}


@cache
def lacks() -> str | None:
    """What Triton needs and this machine doesn't have; None: it can run. It compiles a launcher in C."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a folder that happens to be called so has no origin
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton finds no C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "triton finds no Python.h"
    return None


def available() -> bool:
    return lacks() is None


def describe() -> str:
    """One line for `llmx env` and the reports."""
    if reason := lacks():
        return f"none ({reason}); the torch reference serves"
    import triton

    return f"triton {triton.__version__}"
