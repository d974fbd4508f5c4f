"""Counter-based random numbers in C++; `kernels/reference/random.py` defines them."""

from __future__ import annotations

import torch

from llmx.kernels.cpu import native


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, vocab: int) -> torch.Tensor:
    """(rows,), (rows,) int64 -> (rows, vocab) float32 in (0, 1), bit-equal to the reference."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    assert seeds.dtype == positions.dtype == torch.int64
    assert seeds.shape == positions.shape
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(len(seeds), vocab, dtype=torch.float32)
    library.philox_uniform(
        out.data_ptr(), seeds.data_ptr(), positions.data_ptr(), len(seeds), vocab, stream & 0xFFFFFFFF
    )
    return out
