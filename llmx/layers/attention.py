"""Paged self-attention with fused QKV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache
from llmx.kernels import Kernels
from llmx.layers.linear import Linear
from llmx.layers.norm import RMSNorm
from llmx.layers.rope import RopeConfig
from llmx.parallel.group import Group


@dataclass
class Forward:
    """One forward pass: its batch, the cache, and what layers share: cos and sin by rotary rule, plans by KV group."""

    batch: Batch
    cache: Cache
    turns: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    plans: dict[int, Any] = field(default_factory=dict)
    lasting: bool = False  # plans serve later batches of the same shape too, refilled

    def plan(self, make: Callable[..., Any], layer: int) -> Any:
        group = self.cache.group[layer]
        if group not in self.plans:
            options = {"lasting": True} if self.lasting else {}
            self.plans[group] = make(self.batch, group, self.cache.windows[group], **options)
        return self.plans[group]


class Attention:
    """qkv and output projection around the attention op.

    index: the layer's place in the cache. heads: this rank's. scale: of the scores. cap: their tanh soft-cap, 0 for
    none. rope: None leaves q and k unturned. norms: of q and k before they turn, over each head or all of them, as wide
    as their weight.
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        index: int,
        heads: int,
        scale: float,
        cap: float,
        rope: RopeConfig | None,
        norms: tuple[RMSNorm, RMSNorm] | None,
        kernels: Kernels,
        group: Group,
    ) -> None:
        self.qkv, self.out, self.index, self.heads, self.group = qkv, out, index, heads, group
        self.scale, self.cap, self.rope, self.norms = scale, cap, rope, norms
        self._write, self._plan = kernels.get("rope_and_write"), kernels.get("plan_attention")
        self._attend, self._norm_heads = kernels.get("attention"), kernels.get("norm_heads")

    def __call__(self, x: Tensor, step: Forward) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        cache, spec = step.cache, step.cache.specs[self.index]
        keys, values, scales = cache.keys[self.index], cache.values[self.index], cache.scales[self.index]
        slots = step.batch.slots[cache.group[self.index]]
        cos, sin = step.turns[self.rope] if self.rope is not None else (None, None)
        q = self._write(self._normed(self.qkv(x), spec.head_dim), self.heads, keys, values, slots, cos, sin, scales)
        plan = step.plan(self._plan, self.index)
        seen = self._attend(
            q, keys, values, plan, self.scale, window=spec.window, first=spec.first, cap=self.cap, scales=scales
        )
        return self.group.sum(self.out(seen.flatten(1)))

    def _normed(self, qkv: Tensor, head_dim: int) -> Tensor:
        if self.norms is None:
            return qkv
        first, second = self.norms
        q_width = self.heads * head_dim
        k_width = (qkv.shape[1] - q_width) // 2
        if len(first.weight) <= q_width and len(second.weight) <= k_width:
            normed: Tensor = self._norm_heads(qkv, q_width, k_width, first.weight, second.weight, first.eps)
            return normed
        q, k, v = qkv.split([q_width, k_width, k_width], 1)
        return torch.cat([self._norm(q, first), self._norm(k, second), v], 1)

    def _norm(self, part: Tensor, norm: RMSNorm) -> Tensor:
        """Over all heads of all ranks."""
        width, size = len(norm.weight), self.group.size
        copies = part.shape[1] * size // width  # ranks that share a key head each hold a copy of it
        whole = self.group.gather(part).unflatten(1, (size, -1))[:, ::copies].flatten(1)
        place = self.group.rank // copies * part.shape[1]
        return norm(whole)[:, place : place + part.shape[1]]
