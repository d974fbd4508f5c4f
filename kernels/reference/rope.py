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
) -> Tensor:
    """Rotate q and k (not where cos and sin are None), store k and v, return q.

    qkv (rows, (heads + 2 * kv_heads) * head_dim); keys, values (kv_heads, blocks, size, head_dim); slots (rows,)
    physical;
    -> q (rows, heads, head_dim) in qkv's dtype.
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[-1]
    q: Tensor
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for pool, new in ((keys, k), (values, v)):
        pool.view(kv_heads, -1, head_dim).index_copy_(1, slots, new.transpose(0, 1).to(pool.dtype))
    return q
