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


@dataclass
class Forward:
    """One forward pass: its batch, the cache, and what layers share: cos and sin by rotary rule, plans by KV group."""

    batch: Batch
    cache: Cache
    turns: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    plans: dict[int, Any] = field(default_factory=dict)

    def plan(self, make: Callable[..., Any], layer: int) -> Any:
        group = self.cache.group[layer]
        if group not in self.plans:
            self.plans[group] = make(self.batch, group, self.cache.windows[group])
        return self.plans[group]


class Attention:
    """qkv and output projection around the attention op.

    index: the layer's place in the cache. scale: of the scores. cap: their tanh soft-cap, 0 for none. rope: None
    leaves q and k unturned. norms: of q and k before they turn, over each head or all of them, as wide as their weight.
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
    ) -> None:
        self.qkv, self.out, self.index, self.heads = qkv, out, index, heads
        self.scale, self.cap, self.rope, self.norms = scale, cap, rope, norms
        self._write, self._plan = kernels.get("rope_and_write"), kernels.get("plan_attention")
        self._attend = kernels.get("attention")

    def __call__(self, x: Tensor, step: Forward) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        cache, spec = step.cache, step.cache.specs[self.index]
        keys, values = cache.keys[self.index], cache.values[self.index]
        slots = step.batch.slots[cache.group[self.index]]
        cos, sin = step.turns[self.rope] if self.rope is not None else (None, None)
        q = self._write(self._normed(self.qkv(x), spec.head_dim), self.heads, keys, values, slots, cos, sin)
        plan = step.plan(self._plan, self.index)
        seen = self._attend(q, keys, values, plan, self.scale, window=spec.window, first=spec.first, cap=self.cap)
        return self.out(seen.flatten(1))

    def _normed(self, qkv: Tensor, head_dim: int) -> Tensor:
        if self.norms is None:
            return qkv
        kv_heads = (qkv.shape[1] // head_dim - self.heads) // 2
        q, k, v = qkv.split([self.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
        q, k = (
            norm(part.reshape(-1, len(norm.weight))).view_as(part)
            for norm, part in zip(self.norms, (q, k), strict=True)
        )
        return torch.cat([q, k, v], 1)
