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


def norm_heads(qkv: Tensor, q_width: int, k_width: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """qkv (rows, width) -> the same with the first q_width columns and the next k_width normed, the rest as it was.

    Each norm goes over as many columns as its weight has: a head, or all of them.
    """
    q, k, v = qkv.split([q_width, k_width, qkv.shape[1] - q_width - k_width], 1)
    q, k = (
        rms_norm(part.reshape(-1, len(weight)), weight, eps).view_as(part)
        for part, weight in ((q, q_weight), (k, k_weight))
    )
    return torch.cat([q, k, v], 1)
