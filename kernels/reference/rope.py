"""Rotary position embedding, and the write of keys and values into the paged cache."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (rows, heads, head_dim); cos, sin (rows, rotated / 2) f32. Halves are paired (GPT-NeoX order); dimensions past
    `rotated` pass through. Su et al. 2021. Computed in f32, rounded once."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


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
    """Rotate q and k (not where cos and sin are None), store k and v, return q.

    qkv (rows, (heads + 2 * kv_heads) * head_dim); keys, values (kv_heads, blocks, size, head_dim); slots (rows,)
    physical; scales (kv_heads, blocks, size, 2) f32, of keys and of values, where these are int8;
    -> q (rows, heads, head_dim) in qkv's dtype.
    """
    kv_heads, _, size, head_dim = keys.shape
    q: Tensor
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    block, place = slots // size, slots % size
    for i, (pool, new) in enumerate(((keys, k), (values, v))):
        new = new.transpose(0, 1)
        if scales is not None:
            new, factors = quantize(new.float())
            scales[:, block, place, i] = factors
        pool[:, block, place] = new.to(pool.dtype)
    return q


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., n) f32 -> int8 codes and scales (...,): x is about code * scale. Symmetric, to the nearest, ties to even.
    Where a number of x is none, the scale is none."""
    amax = x.abs().amax(-1)
    scales = torch.where(amax.isfinite(), amax / 127, torch.nan)
    inverse = torch.where(amax > 0, 127 / amax, 0.0)
    codes = (x * inverse[..., None]).nan_to_num(0.0).round().clamp(-127, 127)
    return codes.to(torch.int8), scales
