"""Weights to GGUF's blocks, and float16 and bfloat16 to float32, in C++ on arrays: what converts files needs no torch.

`kernels/reference/quantize.py` defines the blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmx.kernels.cpu import native
from llmx.kernels.cpu.kinds import KINDS  # quantize.cpp numbers them in the same way

HALVES = {"F16": 1, "BF16": 2}


def quantize_blocks(
    rows: NDArray[np.float32], kind: str, importance: NDArray[np.float32] | None = None, threads: int = 1
) -> NDArray[np.uint8]:
    """rows (n, inputs), finite; importance (inputs,), >= 0 -> (n, bytes)."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    number, size, block_bytes = KINDS[kind]
    n, inputs = rows.shape
    assert inputs % size == 0, f"{inputs} inputs are not whole blocks of {size}"
    assert rows.dtype == np.float32, f"{rows.dtype} is not what is read"
    rows = _whole(rows)
    if importance is not None:
        assert importance.shape == (inputs,), "a number for each input"
        assert importance.dtype == np.float32, f"{importance.dtype} is not what is read"
        importance = _whole(importance)
    out = np.empty((n, inputs // size * block_bytes), np.uint8)
    library.quantize_blocks(
        out.ctypes.data,
        rows.ctypes.data,
        0 if importance is None else importance.ctypes.data,
        n,
        inputs,
        number,
        threads,
    )
    return out


def widen_halves(halves: NDArray[np.uint16], kind: str, threads: int = 1) -> NDArray[np.float32]:
    """halves: bits of F16 or BF16, of any shape -> the same numbers."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    halves = _whole(halves)
    out = np.empty(halves.shape, np.float32)
    library.widen(out.ctypes.data, halves.ctypes.data, halves.size, HALVES[kind], threads)
    return out


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    """One number after the other, on whole numbers' addresses, which a file need not keep."""
    return np.require(array, requirements=["C", "A"])
