"""The numbers behind a draw, operation by operation, so that every device and instruction set has the same bits.

Only float32 additions, multiplications and shifts, each rounded by itself (no fused ones), and sums of whole numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT = 2.0**34  # of the likeliest token. A sum over 2**19 tokens is exact in float64, so its order is free.
LOG2E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
    *(2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
ROOT_HALF = 0x3F3504F3  # sqrt(1/2) as bits


def weights(below: Tensor) -> Tensor:
    """f32, at most 0: how far a logit is below its row's largest -> e**below in units of 2**-34, whole, as f64.

    Cody and Waite's reduction and Cephes' polynomial (expf).
    """
    x = below.clamp(min=-30.0)  # there it rounds to zero
    n = torch.round(x * LOG2E)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = _polynomial(EXP, r)
    e = (p * (r * r) + r) + 1.0
    e = e * ((n.int() + 127) << 23).view(torch.float32)
    return torch.round(e.double() * WEIGHT)


def gumbel(uniform: Tensor) -> Tensor:
    """-log(-log(u)) of u in (0, 1), f32."""
    return -_log(-_log(uniform))


def _log(x: Tensor) -> Tensor:
    """Of positive normal numbers, by Cephes' polynomial (logf)."""
    bits = x.view(torch.int32)
    n = (bits - ROOT_HALF) >> 23
    f = (bits - (n << 23)).view(torch.float32) - 1.0  # sqrt(1/2) - 1 to sqrt(2) - 1
    n, z = n.float(), f * f
    y = _polynomial(LOG, f) * f * z
    y = y + n * LN2_LOW
    y = y - z * 0.5
    return (f + y) + n * LN2_HIGH


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = p * x + c
    return p
