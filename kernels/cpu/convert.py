"""To float32, which the kernels compute in, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native

HALVES = {torch.float16: 1, torch.bfloat16: 2}


def wide(x: Tensor) -> Tensor:
    """x as contiguous float32: itself where it is that already."""
    if x.dtype == torch.float32:
        return x.contiguous()
    library = native()
    if library is None or x.dtype not in HALVES or not x.is_contiguous():
        return x.float().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    library.widen(out.data_ptr(), x.data_ptr(), x.numel(), HALVES[x.dtype], torch.get_num_threads())
    return out


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, contiguous float32, rounded to `dtype`."""
    library = native()
    if library is None or dtype != torch.bfloat16:
        return x.to(dtype)
    out = torch.empty(x.shape, dtype=dtype)
    library.narrow(out.data_ptr(), x.data_ptr(), x.numel(), torch.get_num_threads())
    return out
