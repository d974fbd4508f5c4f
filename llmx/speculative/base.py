"""The drafter's contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmx.batch import Batch, Drafts, Kept, Tips
from llmx.cache.pools import Cache, LayerSpec
from llmx.kernels import Kernels
from llmx.sampler import Points, draw


@dataclass(frozen=True)
class Needs:
    """What a drafter asks for, known from its config before the cache is sized."""

    tokens: int = 0  # most nodes of one tree
    depth: int | None = None  # deepest tree; None: a chain of all `tokens`
    host: bool = False  # reads sequence.tokens: no drafts for a row that follows a flying one
    slots: int = 0  # most slots past the last known token that it writes while drafting
    taps: tuple[int, ...] = ()  # the target's hidden states it reads: input of layer i, -1 after the norm
    layers: tuple[LayerSpec, ...] = ()  # KV layers of its own, numbered behind the target's


@dataclass(frozen=True)
class Lent:
    """What the target lends: read its weights and KV; write only slots from row.start on: these are rewritten."""

    model: Any
    cache: Cache
    kernels: Kernels

    def tap(self, tips: Tips) -> Tensor:
        """(R, taps): the target's hidden states at start - 1"""
        return self.cache.last_tap(tips)

    def draw(self, logits: Tensor, tips: Tips, positions: Tensor, path: Tensor) -> Tensor:
        """With the target's whole pipeline and its very noise: a sampled draft that agrees as often as it can."""
        every = torch.arange(len(tips.rows), device=tips.device)
        return draw(logits, Points([r.sequence for r in tips.rows], every, positions, path), self.kernels).tokens


class Drafter(Protocol):
    """Invariant kept by `propose` and `observe` together: the drafter's KV is final in every slot below `computed`."""

    @property
    def needs(self) -> Needs: ...

    def propose(self, tips: Tips, lent: Lent) -> Drafts:
        """A tree of at most row.room nodes for each row. Rows without room get none."""
        ...

    def observe(self, drafts: Drafts, batch: Batch, kept: Kept, taps: Tensor, lent: Lent) -> None:
        """The verified rows of this step. Called before their taps and KV are settled, and anything is hashed."""
        ...


class NoDrafter:
    """One token a step."""

    needs = Needs()

    def propose(self, tips: Tips, lent: Lent) -> Drafts:
        return Drafts.none(len(tips.rows), tips.device)

    def observe(self, drafts: Drafts, batch: Batch, kept: Kept, taps: Tensor, lent: Lent) -> None:
        pass
