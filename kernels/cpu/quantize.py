"""Weights to GGUF's blocks in C++, on all threads. `kernels/reference/quantize.py` defines what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native

KINDS = {  # -> (its number in quantize.cpp, inputs in a block, its bytes)
    "Q4_0": (0, 32, 18),
    "Q4_1": (1, 32, 20),
    "Q5_0": (2, 32, 22),
    "Q5_1": (3, 32, 24),
    "Q8_0": (4, 32, 34),
    "IQ4_NL": (5, 32, 18),
    "Q2_K": (6, 256, 84),
    "Q3_K": (7, 256, 110),
    "Q4_K": (8, 256, 144),
    "Q5_K": (9, 256, 176),
    "Q6_K": (10, 256, 210),
    "IQ4_XS": (11, 256, 136),
}


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
