"""RMS norm, alone or after a residual add, in Triton; `kernels/reference/norm.py` defines them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384  # elements of a row that a program holds in registers; it walks over a longer row twice
TILE = 1024  # elements a program has at least, of several rows where they are short


@triton.jit
def _sum(x, residual, at, to, mask, ADD: tl.constexpr):
    """What is normed, as f32: x, or x + residual rounded to their type."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = value + tl.load(residual + to, mask=mask, other=0.0).to(tl.float32)
    return value.to(x.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    out, total, x, residual, weight, rows, cols, x_stride, residual_stride, eps,
    ADD: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles). WHOLE: BLOCK covers a row, so it is read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    of_x, of_residual, of_out = row[:, None] * x_stride, row[:, None] * residual_stride, row[:, None] * cols
    real = row[:, None] < rows
    if WHOLE:
        mask = real & (at < cols)
        value = _sum(x, residual, of_x + at, of_residual + at, mask, ADD)
        scale = tl.rsqrt(tl.sum(value * value, 1) / cols + eps)[:, None]
        if ADD:
            tl.store(total + of_out + at, value.to(total.dtype.element_ty), mask=mask)
        w = tl.load(weight + at, mask=at < cols, other=0.0).to(tl.float32)
        tl.store(out + of_out + at, (value * scale * w).to(out.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, cols, BLOCK):
            mask = real & (start + at < cols)
            value = _sum(x, residual, of_x + start + at, of_residual + start + at, mask, ADD)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 1) / cols + eps)[:, None]
        for start in range(0, cols, BLOCK):
            mask = real & (start + at < cols)
            value = _sum(x, residual, of_x + start + at, of_residual + start + at, mask, ADD)
            if ADD:
                tl.store(total + of_out + start + at, value.to(total.dtype.element_ty), mask=mask)
            w = tl.load(weight + start + at, mask=start + at < cols, other=0.0).to(tl.float32)
            tl.store(out + of_out + start + at, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def shape(cols: int) -> dict[str, Any]:
    """How a program is cut for rows of this width. It does not depend on how many there are: nor do a row's bits."""
    block = min(triton.next_power_of_2(cols), WIDEST)
    rows = max(1, TILE // block)
    return {"WHOLE": block >= cols, "ROWS": rows, "BLOCK": block, "num_warps": min(16, max(2, rows * block // 512))}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, hidden), weight (hidden,) -> (rows, hidden) in x's dtype; computed in f32, rounded once."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, both (rows, hidden) in x's dtype."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    other = x if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    if not rows:
        return out, total
    cut = shape(cols)
    with torch.cuda.device_of(x):
        norm_kernel[(triton.cdiv(rows, cut["ROWS"]),)](
            out, total, x, other, weight, rows, cols, x.stride(0), other.stride(0), eps,
            ADD=residual is not None, **cut,
        )  # fmt: skip
    return out, total
