"""Rotary positions with the write to the paged cache in Triton; `kernels/reference/rope.py` defines it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements of the heads that a program turns


@triton.jit
def _rounded(x):
    """To the nearest whole number, ties to even, of what is far below 2^23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _store(to, x, inverse, mask, CODES: tl.constexpr):
    if CODES:
        x = x * inverse
        x = tl.where(x == x, x, 0.0)
        x = _rounded(tl.minimum(tl.maximum(x, -127.0), 127.0))
    tl.store(to, x.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _move(
    to, scales, source, real, cos, sin,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Heads from `source` to `to` (pointers, (heads, 1)); where HALF, their first 2 * HALF dimensions turned.

    A number is rounded to the source's type and then to the target's, as the reference does. CODES: to int8, with a
    scale for each head, which is none where a number is.
    """
    peak = tl.zeros(real.shape, tl.float32)
    none = tl.zeros(real.shape, tl.float32)  # it becomes none where a number is infinite or none
    d = tl.arange(0, HALF_PAD)[None, :]
    e = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    turned, rest = real & (d < HALF), real & (e < DIM)
    if HALF > 0:
        first = tl.load(source + d, mask=turned, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + d, mask=turned, other=0.0).to(tl.float32)
        c, s = tl.load(cos + d, mask=d < HALF, other=0.0), tl.load(sin + d, mask=d < HALF, other=0.0)
        x = (first * c - second * s).to(source.dtype.element_ty).to(tl.float32)
        y = (second * c + first * s).to(source.dtype.element_ty).to(tl.float32)
        if CODES:
            peak = tl.maximum(peak, tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 1)[:, None])
            none += tl.sum(x * 0.0 + y * 0.0, 1)[:, None]
    if DIM > 2 * HALF:
        z = tl.load(source + e, mask=rest, other=0.0).to(tl.float32)
        if CODES:
            peak = tl.maximum(peak, tl.max(tl.abs(z), 1)[:, None])
            none += tl.sum(z * 0.0, 1)[:, None]
    inverse = peak
    if CODES:
        tl.store(scales, tl.div_rn(peak, tl.full(real.shape, 127.0, tl.float32)) + none, mask=real)
        divisor = tl.where(peak > 0.0, peak, 1.0)
        inverse = tl.where(peak > 0.0, tl.div_rn(tl.full(real.shape, 127.0, tl.float32), divisor), 0.0)
        inverse = tl.where(none == none, inverse, 0.0)
    if HALF > 0:
        _store(to + d, x, inverse, turned, CODES)
        _store(to + HALF + d, y, inverse, turned, CODES)
    if DIM > 2 * HALF:
        _store(to + e, z, inverse, rest, CODES)


@triton.jit(do_not_specialize=["pool_slots"])
def rope_kernel(
    q, qkv, keys, values, scales, slots, cos, sin, stride, pool_slots, heads, kv_heads,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, HEADS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of q heads and then of kv heads)."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, q_tiles = qkv + token * stride, tl.cdiv(heads, HEADS)
    cos += token * HALF
    sin += token * HALF
    if tile < q_tiles:
        head = (tile * HEADS + tl.arange(0, HEADS))[:, None]
        place = q + (token * heads + head) * DIM
        _move(place, scales, source + head * DIM, head < heads, cos, sin, DIM, HALF, HALF_PAD, REST_PAD, False)
    else:
        head = ((tile - q_tiles) * HEADS + tl.arange(0, HEADS))[:, None]
        real = head < kv_heads
        slot = head.to(tl.int64) * pool_slots + tl.load(slots + token)
        source += heads * DIM
        factor = scales + slot * 2
        _move(keys + slot * DIM, factor, source + head * DIM, real, cos, sin, DIM, HALF, HALF_PAD, REST_PAD, CODES)
        source += kv_heads * DIM
        _move(values + slot * DIM, factor + 1, source + head * DIM, real, cos, sin, DIM, 0, HALF_PAD, DIM_PAD, CODES)


def shape(dim: int, half: int, heads: int) -> dict[str, Any]:
    """How a program is cut."""
    padded, size = triton.next_power_of_2(dim), triton.next_power_of_2
    return {
        "DIM": dim,
        "HALF": half,
        "HALF_PAD": size(max(half, 1)),
        "REST_PAD": size(max(dim - 2 * half, 1)),
        "DIM_PAD": padded,
        "HEADS": max(1, min(TILE // padded, size(heads))),
        "num_warps": 4,
        "enable_fp_fusion": False,  # products are rounded, as the reference's are
    }


def rope_and_write(
    qkv: Tensor,
    heads: int,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    scales: Tensor | None = None,
) -> Tensor:
    """Rotate q and k (not where cos and sin are None), store k and v, return q, (rows, heads, head_dim).

    keys, values and scales are contiguous, as they are made for a CUDA device.
    """
    assert keys.is_contiguous(), "pools are made for a CUDA device"
    kv_heads, blocks, size, dim = keys.shape
    rows = len(qkv)
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return q
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    half = 0
    if cos is not None and sin is not None:
        cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    turns, held = (q if cos is None else cos, q if sin is None else sin), q if scales is None else scales
    cut = shape(dim, half, heads)
    tiles = triton.cdiv(heads, cut["HEADS"]) + triton.cdiv(kv_heads, cut["HEADS"])
    with torch.cuda.device_of(qkv):
        rope_kernel[(rows, tiles)](
            q, qkv, keys, values, held, slots.contiguous(), *turns,
            qkv.stride(0), blocks * size, heads, kv_heads, CODES=scales is not None, **cut,
        )  # fmt: skip
    return q
