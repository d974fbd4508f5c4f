"""The tensors behind the blocks: keys and values of every layer, and one tap per block for drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmx.batch import Batch, Kept, Tips
from llmx.cache.blocks import Copies


@dataclass(frozen=True)
class LayerSpec:
    """One layer's KV. `window`: it looks back on so many tokens (None: all). `first`: the first slot that holds a key
    (an EAGLE layer's is 1: its slot j holds (token j, feature j - 1))."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    first: int = 0


def windows_of(specs: Sequence[LayerSpec]) -> tuple[int | None, ...]:
    """The KV groups: one per free rule, the one that keeps everything first. Taps live in the first group's blocks."""
    windows = {spec.window for spec in specs}
    return tuple(sorted(windows, key=lambda w: (w is not None, w or 0)))


def block_bytes(specs: Sequence[LayerSpec], window: int | None, size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of the group with this window."""
    values = sum(2 * size * spec.kv_heads * spec.head_dim for spec in specs if spec.window == window)
    return values * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU memory that is taken only where something is written: torch.zeros would touch all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


class Cache:
    """Layers [0, target) are the target's, the rest a drafter's. Layers with the same free rule share a block table.

    keys[l], values[l]: (kv_heads, blocks, size, head_dim). taps: (blocks of group 0, tap_dim), of the last verified
    position in each block. `poison` fills what nobody wrote with NaN, so that a test sees it read.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        target: int,
        blocks: Sequence[int],
        size: int,
        *,
        tap_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.specs, self.target, self.size, self.dtype, self.device = tuple(specs), target, size, dtype, device
        self.windows = windows_of(specs)
        self.group = [self.windows.index(spec.window) for spec in specs]
        shapes = [(s.kv_heads, blocks[g], size, s.head_dim) for s, g in zip(specs, self.group, strict=True)]
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]
        self.taps = torch.zeros(blocks[0], tap_dim, dtype=dtype, device=device)
        if poison:
            for pool in (*self.keys, *self.values):
                pool[:, 1:] = torch.nan

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values, self.taps))

    def copy(self, copies: Copies) -> None:
        """Copy on write, before anyone (a drafter too) writes in this step."""
        for group in range(len(self.windows)):
            if not (mine := [(source, to) for g, source, to in copies if g == group]):
                continue
            source, to = torch.tensor(mine, device=self.device).T
            for layer, of in enumerate(self.group):
                if of == group:
                    for pool in (self.keys[layer], self.values[layer]):
                        pool.index_copy_(1, to, pool.index_select(1, source))
            if group == 0 and self.taps.shape[1]:
                self.taps.index_copy_(0, to, self.taps.index_select(0, source))

    def settle(self, batch: Batch, kept: Kept, taps: Tensor) -> None:
        """After verification: accepted tree nodes move to the slots of their positions; each block keeps its last tap.

        taps: (T, tap_dim) of this step.
        """
        if batch.paths is not None and batch.drafts_at is not None:
            self._compact(batch, kept, batch.drafts_at)
        if self.taps.shape[1]:
            last = (kept.positions % self.size == self.size - 1) | (kept.positions == kept.end[batch.sequence] - 1)
            blocks = torch.where(kept.mask & last, kept.slots[0] // self.size, 0)
            self.taps.index_copy_(0, blocks, taps.to(self.dtype))
            self.taps[0] = 0

    def _compact(self, batch: Batch, kept: Kept, drafts: Tensor) -> None:
        """All sequences at once; gathers everything before it scatters. Chains never move, so they don't come here."""
        for layer in range(self.target):
            slots = (batch.slots[self.group[layer]][drafts], kept.slots[self.group[layer]][drafts])
            for pool in (self.keys[layer], self.values[layer]):
                flat = pool.view(pool.shape[0], -1, pool.shape[-1])
                flat.index_copy_(1, slots[1], flat.index_select(1, slots[0]))

    def last_tap(self, tips: Tips) -> Tensor:
        """(R, tap_dim): the target's tap at start - 1, wherever it was computed: chunk, decode, prefix hit or fork."""
        at = (tips.start - 1).clamp(min=0) // self.size
        block = tips.tables[0].gather(1, at[:, None])[:, 0]
        return self.taps[block] * (tips.start > 0)[:, None]
