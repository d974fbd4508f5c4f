"""Weights to GGUF's blocks in C++, on all threads. `kernels/reference/quantize.py` defines what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.pack import KINDS  # quantize.cpp numbers them in the same way


def quantize_blocks(rows: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """rows (n, inputs), float32, finite; importance (inputs,), float32, >= 0 -> (n, bytes), uint8."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    number, size, block_bytes = KINDS[kind]
    n, inputs = rows.shape
    assert inputs % size == 0, f"{inputs} inputs are not whole blocks of {size}"
    assert rows.dtype == torch.float32, f"{rows.dtype} is not what is read"
    rows = rows.contiguous()
    if importance is not None:
        assert importance.shape == (inputs,), "a number for each input"
        importance = importance.float().contiguous()
    out = torch.empty(n, inputs // size * block_bytes, dtype=torch.uint8)
    library.quantize_blocks(
        out.data_ptr(),
        rows.data_ptr(),
        0 if importance is None else importance.data_ptr(),
        n,
        inputs,
        number,
        torch.get_num_threads(),
    )
    return out
