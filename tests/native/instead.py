"""A pytest plugin (`-p native.instead`) that has the tests run a library built another way: LLMX_NATIVE=its path."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch
from torch import Tensor

from llmx.kernels import cpu
from llmx.kernels.cpu import linear

NAME = "llmx.kernels.cpu._native"


def _load() -> None:
    found = importlib.util.spec_from_file_location(NAME, os.environ["LLMX_NATIVE"])
    assert found is not None
    assert found.loader is not None
    assert NAME not in sys.modules
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sys.modules[NAME] = module
    cpu._native = module  # type: ignore[attr-defined]


def _guarded(size: int) -> Tensor:
    """As `memory.take`, but from the allocator that a sanitizer watches: one tensor does not lead to the next."""
    return torch.zeros(size, dtype=torch.uint8)


_load()
linear.take = _guarded
