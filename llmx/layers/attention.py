"""Paged self-attention with fused QKV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache
from llmx.kernels import Kernels
from llmx.layers.linear import Linear


@dataclass
class Forward:
    """One forward pass: its batch, the cache, and what layers share in it (rotary tables by id, attention plans by group)."""

    batch: Batch
    cache: Cache
    plans: dict[int, Any] = field(default_factory=dict)
    turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def plan(self, make: Callable[..., Any], layer: int) -> Any:
        group = self.cache.group[layer]
        if group not in self.plans:
            self.plans[group] = make(self.batch, group, self.cache.windows[group])
        return self.plans[group]


class Attention:
    """qkv and output projection around the attention op. `index`: its layer's place in the cache."""

    def __init__(
        self, qkv: Linear, out: Linear, heads: int, scale: float, index: int, kernels: Kernels
    ) -> None:
        self.qkv, self.out, self.heads, self.scale, self.index = qkv, out, heads, scale, index
        self._write, self._plan = kernels.get("rope_and_write"), kernels.get("plan_attention")
        self._attend = kernels.get("attention")

    def __call__(self, x: Tensor, step: Forward, cos: Tensor, sin: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        cache, spec = step.cache, step.cache.specs[self.index]
        keys, values = cache.keys[self.index], cache.values[self.index]
        slots = step.batch.slots[cache.group[self.index]]
        q = self._write(self.qkv(x), self.heads, keys, values, slots, cos, sin)
        plan = step.plan(self._plan, self.index)
        seen = self._attend(q, keys, values, plan, self.scale, window=spec.window, first=spec.first)
        return self.out(seen.flatten(1))
