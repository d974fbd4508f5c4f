"""The tensors behind the blocks: keys and values of every layer, and one tap per block for drafters."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

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


SCALES = 8  # bytes of the two that a token and head has beside int8 keys and values


def block_bytes(specs: Sequence[LayerSpec], window: int | None, size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of the group with this window."""
    heads = [(spec.kv_heads, spec.head_dim) for spec in specs if spec.window == window]
    scales = SCALES if dtype == torch.int8 else 0
    return sum(size * heads * (2 * dim * dtype.itemsize + scales) for heads, dim in heads)


def new_pools(
    kv_heads: int, blocks: int, size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Zeros: keys and values (kv_heads, blocks, size, head_dim); for int8 scales (kv_heads, blocks, size, 2) f32, of
    a token's keys and of its values, else None.

    On the CPU a block is one piece of memory: for each head its keys with those of a dimension side by side, which is
    how a score takes them, then its values, then the scales. There the three are views.
    """
    shape, quantized = (kv_heads, blocks, size, head_dim), dtype == torch.int8
    if device.type != "cpu":
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return keys, values, torch.zeros(*shape[:3], 2, device=device) if quantized else None
    part = size * head_dim * dtype.itemsize
    whole = _untouched(blocks, kv_heads, 2 * part + (SCALES * size if quantized else 0))
    keys = whole[..., :part].view(dtype).unflatten(2, (head_dim, size)).permute(1, 0, 3, 2)
    values = whole[..., part : 2 * part].view(dtype).unflatten(2, (size, head_dim)).permute(1, 0, 2, 3)
    if not quantized:
        return keys, values, None
    return keys, values, whole[..., 2 * part :].view(torch.float32).unflatten(2, (2, size)).permute(1, 0, 3, 2)


def _untouched(blocks: int, kv_heads: int, size: int) -> Tensor:
    """uint8 zeros that take memory only where something is written, in large pages where the system has them."""
    memory = mmap.mmap(-1, blocks * kv_heads * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, kv_heads, size)


class Cache:
    """Layers [0, target) are the target's, the rest a drafter's. Layers with the same free rule share a block table.

    keys[l], values[l], scales[l]: as new_pools makes them. taps: (blocks of group 0, tap_dim), of the last verified
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
        pools = [
            new_pools(s.kv_heads, blocks[g], size, s.head_dim, dtype, device)
            for s, g in zip(specs, self.group, strict=True)
        ]
        self.keys, self.values = [keys for keys, _, _ in pools], [values for _, values, _ in pools]
        self.scales = [scales for _, _, scales in pools]
        taps = dtype if dtype.is_floating_point else torch.float32
        self.taps = torch.zeros(blocks[0], tap_dim, dtype=taps, device=device)
        if poison:
            for layer in range(len(specs)):
                for pool in self._pools(layer):
                    if pool.is_floating_point():
                        pool[:, 1:] = torch.nan

    def _pools(self, layer: int) -> list[Tensor]:
        """All alike: heads, blocks, slots of a block, and what a slot holds."""
        scales = self.scales[layer]
        return [self.keys[layer], self.values[layer], *([] if scales is None else [scales])]

    @property
    def bytes(self) -> int:
        return self.taps.nbytes + sum(t.nbytes for layer in range(len(self.keys)) for t in self._pools(layer))

    def copy(self, copies: Copies) -> None:
        """Copy on write, before anyone (a drafter too) writes in this step."""
        for group in range(len(self.windows)):
            if not (mine := [(source, to) for g, source, to in copies if g == group]):
                continue
            source, to = torch.tensor(mine, device=self.device).T
            for layer, of in enumerate(self.group):
                if of == group:
                    for pool in self._pools(layer):
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
            self.taps.index_copy_(0, blocks, taps.to(self.taps.dtype))
            self.taps[0] = 0

    def _compact(self, batch: Batch, kept: Kept, drafts: Tensor) -> None:
        """All sequences at once; gathers everything before it scatters. Chains never move, so they don't come here."""
        for layer in range(self.target):
            group = self.group[layer]
            source, to = batch.slots[group][drafts], kept.slots[group][drafts]
            for pool in self._pools(layer):
                pool[:, to // self.size, to % self.size] = pool[:, source // self.size, source % self.size]

    def last_tap(self, tips: Tips) -> Tensor:
        """(R, tap_dim): the target's tap at start - 1, wherever it was computed: chunk, decode, prefix hit or fork."""
        at = (tips.start - 1).clamp(min=0) // self.size
        block = tips.tables[0].gather(1, at[:, None])[:, 0]
        return self.taps[block] * (tips.start > 0)[:, None]
