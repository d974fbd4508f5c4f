"""Norms, rotary positions with the write to the cache, gated activations, sums, copies; the reference defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.attention import POOLS, strides
from llmx.kernels.cpu.convert import narrowed, wide
from llmx.kernels.reference import rope

WIDEST_HEAD = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, hidden), weight (hidden,) f32 -> (rows, hidden) in x's dtype; computed in f32, rounded once."""
    return narrowed(_norm(wide(x), None, weight, eps)[0], x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, both (rows, hidden) in x's dtype."""
    if x.dtype == torch.float32:
        return _norm(x.contiguous(), residual.contiguous(), weight, eps)
    total = add_scaled(x, 1.0, residual)  # rounded to x's dtype, as the norm sees it
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
    scales: Tensor | None = None,
) -> Tensor:
    """Rotate q and k (not where cos and sin are None), store k and v, return q, (rows, heads, head_dim)."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    kv_heads, _, size, dim = keys.shape
    plain = qkv.dtype == torch.float32 or qkv.dtype == keys.dtype  # else keys are rounded twice
    if not plain or keys.dtype == torch.float16 or dim > WIDEST_HEAD:
        return rope.rope_and_write(qkv, heads, keys, values, slots, cos, sin, scales)
    block_bytes, head_bytes = strides(keys, values, scales)
    rows, x, slots = len(qkv), wide(qkv), slots.contiguous()
    q = torch.empty(rows, heads, dim)
    half = 0
    if cos is not None and sin is not None:
        cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    library.rope_and_write(
        q.data_ptr(),
        x.data_ptr(),
        rows,
        keys.data_ptr(),
        values.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        heads,
        kv_heads,
        dim,
        half,
        size,
        block_bytes,
        head_bytes,
        POOLS[keys.dtype],
        slots.data_ptr(),
        0 if cos is None else cos.data_ptr(),
        0 if sin is None else sin.data_ptr(),
        torch.get_num_threads(),
    )
    return narrowed(q, qkv.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """(rows, 2 * inner), gate before up -> silu(gate) * up, (rows, inner); in f32, rounded once."""
    return _gated(gate_up, 0)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """As silu_mul, with GELU's tanh approximation of the gate."""
    return _gated(gate_up, 1)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As silu_mul, with the exact GELU of the gate."""
    return _gated(gate_up, 2)


def _gated(gate_up: Tensor, kind: int) -> Tensor:
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    x = wide(gate_up)
    rows, inner = len(x), x.shape[1] // 2
    out = torch.empty(rows, inner)
    library.gated(out.data_ptr(), x.data_ptr(), rows, inner, kind, torch.get_num_threads())
    return narrowed(out, gate_up.dtype)


def norm_heads(qkv: Tensor, q_width: int, k_width: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """qkv (rows, width) with the RMS norms of q and k, over as many columns as their weights have."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    x = wide(qkv)
    out = torch.empty_like(x)
    library.norm_heads(
        out.data_ptr(),
        x.data_ptr(),
        *x.shape,
        q_width,
        k_width,
        q_weight.data_ptr(),
        len(q_weight),
        k_weight.data_ptr(),
        len(k_weight),
        eps,
        torch.get_num_threads(),
    )
    return narrowed(out, qkv.dtype)


def add_scaled(x: Tensor, scale: float, y: Tensor | None) -> Tensor:
    """x * scale + y, each rounded to x's dtype; without y x * scale."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    if x.dtype != torch.float32 and y is not None and scale != 1.0:
        x, scale = add_scaled(x, scale, None), 1.0
    first, second = wide(x), None if y is None else wide(y)
    out = torch.empty_like(first)
    library.add_scaled(
        out.data_ptr(),
        first.data_ptr(),
        scale,
        0 if second is None else second.data_ptr(),
        out.numel(),
        torch.get_num_threads(),
    )
    return narrowed(out, x.dtype)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (n, width), index (rows,) -> (rows, width); what is past the last row takes the last."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    x, index = x.contiguous(), index.contiguous()
    out = torch.empty(len(index), x.shape[1], dtype=x.dtype)
    each = x.shape[1] * x.element_size()
    library.copy_rows(
        out.data_ptr(), each, x.data_ptr(), each, each, index.data_ptr(), len(x), len(index), torch.get_num_threads()
    )
    return out


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (rows, any) of one dtype -> (rows, sum of widths), side by side."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    rows, size = len(parts[0]), parts[0].element_size()
    out = torch.empty(rows, sum(part.shape[1] for part in parts), dtype=parts[0].dtype)
    at, stride = out.data_ptr(), out.shape[1] * size
    for part in parts:
        part = part.contiguous()
        each = part.shape[1] * size
        library.copy_rows(at, stride, part.data_ptr(), each, each, 0, rows, rows, torch.get_num_threads())
        at += each
    return out
