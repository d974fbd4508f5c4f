"""Norms, rotary positions with the write to the cache, and gated activations in C++; the reference defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.attention import POOLS
from llmx.kernels.reference import rope

WIDEST_HEAD = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, hidden), weight (hidden,) f32 -> (rows, hidden) in x's dtype; computed in f32, rounded once."""
    return _norm(x.float().contiguous(), None, weight, eps)[0].to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, both (rows, hidden) in x's dtype."""
    if x.dtype == torch.float32:
        return _norm(x.contiguous(), residual.contiguous(), weight, eps)
    total = x + residual  # rounded to x's dtype, as the norm sees it
    return rms_norm(total, weight, eps), total


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    rows, hidden = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    library.rms_norm(
        out.data_ptr(),
        total.data_ptr(),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        rows,
        hidden,
        eps,
        torch.get_num_threads(),
    )
    return out, total


def rope_and_write(
    qkv: Tensor,
    heads: int,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Rotate q and k (not where cos and sin are None), store k and v, return q, (rows, heads, head_dim)."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    kv_heads, blocks, size, dim = keys.shape
    if qkv.dtype != torch.float32 or keys.dtype == torch.float16 or dim > WIDEST_HEAD:
        return rope.rope_and_write(qkv, heads, keys, values, slots, cos, sin)
    rows, qkv, slots = len(qkv), qkv.contiguous(), slots.contiguous()
    q = torch.empty(rows, heads, dim)
    half = 0
    if cos is not None and sin is not None:
        cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    library.rope_and_write(
        q.data_ptr(),
        qkv.data_ptr(),
        rows,
        keys.data_ptr(),
        values.data_ptr(),
        heads,
        kv_heads,
        dim,
        half,
        blocks * size,
        POOLS[keys.dtype],
        slots.data_ptr(),
        0 if cos is None else cos.data_ptr(),
        0 if sin is None else sin.data_ptr(),
        torch.get_num_threads(),
    )
    return q


def silu_mul(gate_up: Tensor) -> Tensor:
    """(rows, 2 * inner), gate before up -> silu(gate) * up, (rows, inner); in f32, rounded once."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """As silu_mul, with GELU's tanh approximation of the gate."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    wide = gate_up.float().contiguous()
    rows, inner = len(wide), wide.shape[1] // 2
    out = torch.empty(rows, inner)
    library.gated(out.data_ptr(), wide.data_ptr(), rows, inner, gelu, torch.get_num_threads())
    return out.to(gate_up.dtype)
