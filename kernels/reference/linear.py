"""A linear layer, row by row the same whatever the number of rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# How torch's float32 product adds up depends on how many rows there are: on Intel's processors it takes other code for
# few, and threads divide the inputs of some shapes. So each product on the CPU is of ROWS rows; on AMD's, where a row
# has equal bits in any multiple of FEW rows, it is of all.
ROWS, FEW = 16, 4


@cache
def on_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, n_in), weight (n_out, n_in), bias (n_out,) or None -> (rows, n_out) in x.dtype.

    On the CPU all is computed in float32 and rounded once, so many rows at a time and the last of them padded with
    zeros that a row's bits do not depend on its neighbours. Elsewhere the product is torch's own, in x.dtype.
    """
    if x.device.type != "cpu":
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    rows = x.shape[0]
    padding = -rows % (FEW if on_amd() else ROWS)
    x32 = functional.pad(x.float(), (0, 0, 0, padding)) if padding else x.float()
    weight32 = weight.float()
    parts = [x32] if on_amd() else x32.split(ROWS)
    product = torch.cat([functional.linear(part, weight32) for part in parts])[:rows]
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype)


APART = 21, 15  # the largest whole number beside which the others of a run have bits enough; with powers of two


def round_rows(x: Tensor, powers: bool = False) -> Tensor:
    """x (rows, n_in) as products of bytes see it: each 32 inputs rounded to 8 bits, in x.dtype.

    scale = max |x| / 127, q = round(x * (127 / max |x|)), ties to even; the result is q * scale. As ggml's Q8_0, but
    with scales in float32, and where a single |q| is above APART, its number is apart: it stays as it is, and the run
    is rounded without it, as LLM.int8() keeps what exceeds the rest (arXiv:2208.07339). A run with an infinity or NaN
    becomes NaN, one of numbers below 1e-36 zeros.

    powers: the scale is rounded up to a power of two, as 32 numbers share one in the Microscaling format MXINT8
    (arXiv:2310.10537), where none is cut off. A run of numbers up to 2^-93 becomes zeros, one with more than 2^106 NaN.
    """
    groups = x.float().reshape(len(x), -1, 32)
    rounded, scale = _round_runs(groups, powers)
    above = rounded.abs() > APART[powers]
    apart = above & (above.sum(-1, keepdim=True) == 1)
    if bool(apart.any()):
        rounded, scale = _round_runs(groups.masked_fill(apart, 0.0), powers)
    return torch.where(apart, groups, rounded * scale).reshape(x.shape).to(x.dtype)


def _round_runs(groups: Tensor, powers: bool) -> tuple[Tensor, Tensor]:
    """(rows, runs, 32) -> whole numbers, in float32, and the scale of each run, (rows, runs, 1)."""
    most = groups.abs().amax(-1, keepdim=True)
    if not powers:
        up = torch.where(most > 1e-36, 127.0 / most, 0.0)  # 127 by less is infinite
        return (groups * up).round(), most / 127.0
    part, exponent = torch.frexp(most / 127.0)  # part from 0.5 on, below 1
    scale = torch.ldexp(torch.ones_like(most), exponent - (part == 0.5).int())
    scale = torch.where(most > 2.0**-93, scale, 1.0)
    rounded = torch.where(most > 2.0**-93, (groups / scale).round(), 0.0)
    return torch.where(most <= 2.0**106, rounded, torch.nan), scale
