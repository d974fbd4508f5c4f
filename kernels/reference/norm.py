"""RMS norm, alone or after a residual add. Sums run over a row of fixed length: a row does not see its neighbours."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, hidden), weight (hidden,) f32 -> (rows, hidden) in x's dtype; computed in f32, rounded once.

    Zhang & Sennrich 2019.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, both (rows, hidden) in x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total
