"""Rows and drafts laid flat. The host knows how many of everything there are; what they hold may live on the device.

So nothing here waits for the device: no shape depends on data, and a dropped entry is aimed at block 0, which is
nobody's. T: tokens of the step, R: rows, W: widest draft tree, M: drawn tokens, G: KV groups.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from llmx.core import Row


def _putter(device: torch.device) -> Callable[[np.ndarray], Tensor]:
    return torch.from_numpy if device.type == "cpu" else lambda array: torch.from_numpy(array).to(device)


@dataclass(frozen=True)
class Drafts:
    """One tree per row, padded to the widest (1 at least). Parents before children; siblings differ; -1 is the root.

    `sizes` are the nodes that each row is given in the batch: `counts`, or more where only the device knows the counts.
    """

    tokens: Tensor  # (R, W)
    parents: Tensor  # (R, W)
    counts: Tensor  # (R,)
    final: Tensor  # (R,) leading slots of the row whose drafter KV is already right, should they be accepted
    sizes: tuple[int, ...]
    depth: int  # of the deepest tree
    chain: bool  # no tree branches

    @staticmethod
    def none(rows: int, device: torch.device) -> Drafts:
        return _no_drafts(rows, device)

    @classmethod
    def chains(cls, chains: SequenceOf[SequenceOf[int]], device: torch.device) -> Drafts:
        return cls.trees([(c, range(-1, len(c) - 1)) for c in chains], device)

    @classmethod
    def trees(cls, trees: SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]], device: torch.device) -> Drafts:
        """From host lists (tokens, parents) per row."""
        sizes = tuple(len(tokens) for tokens, _ in trees)
        width = max(1, *sizes, 1)
        tokens, parents = np.zeros((len(trees), width), np.int64), np.full((len(trees), width), -1, np.int64)
        depth, chain = 0, True
        for r, (of_row, above) in enumerate(trees):
            tokens[r, : sizes[r]], parents[r, : sizes[r]] = of_row, above
            depths: list[int] = []
            for node, parent in enumerate(above):
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
                chain &= parent == node - 1
            depth = max(depth, *depths, 0)
        counts = torch.tensor(sizes, device=device)
        put = _putter(device)
        return cls(put(tokens), put(parents), counts, torch.zeros_like(counts), sizes, depth, chain)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def exists(self) -> Tensor:
        return torch.arange(self.width, device=self.tokens.device) < self.counts[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """(R, W, W): [r, i, j] when node j is node i or above it."""
        rows, width, device = len(self.sizes), self.width, self.tokens.device
        above = torch.zeros(rows, width, width, dtype=torch.bool, device=device)
        every = torch.arange(rows, device=device)
        for node in range(width):
            parent = self.parents[:, node]
            above[:, node] = above[every, parent.clamp(min=0)] & (parent >= 0)[:, None]
            above[:, node, node] = True
        return above & self.exists[:, :, None]

    @cached_property
    def depths(self) -> Tensor:
        """(R, W): 1 for a child of the root, 0 for what doesn't exist."""
        return self.ancestors.sum(-1)

    def check(self, rows: SequenceOf[Row]) -> None:
        """What the conformance test asserts of every drafter's trees."""
        assert all(size <= row.room for size, row in zip(self.sizes, rows, strict=True)), "more drafts than room"
        for r in range(len(rows)):
            count = int(self.counts[r])
            tokens, parents = self.tokens[r, :count].tolist(), self.parents[r, :count].tolist()
            assert all(parent < node for node, parent in enumerate(parents)), "a child before its parent"
            assert len(set(zip(parents, tokens, strict=True))) == count, "two siblings with one token"


@lru_cache(maxsize=64)
def _no_drafts(rows: int, device: torch.device) -> Drafts:
    return Drafts.trees([([], [])] * rows, device)


@dataclass(frozen=True)
class Tips:
    """The rows as tensors. In overlapped stepping `start` and `last` come from the device, ahead of the host."""

    rows: list[Row]
    tables: list[Tensor]  # G x (R, blocks)
    start: Tensor  # (R,)
    last: Tensor  # (R,) the newest token of a row that draws
    room: Tensor  # (R,)
    depth: Tensor  # (R,)
    size: int  # tokens in a block

    @property
    def device(self) -> torch.device:
        return self.start.device

    def pick(self, index: list[int]) -> Tips:
        """Some of the rows."""
        at = torch.tensor(index, dtype=torch.long, device=self.device)
        return Tips(
            [self.rows[i] for i in index],
            [table[at] for table in self.tables],
            self.start[at],
            self.last[at],
            self.room[at],
            self.depth[at],
            self.size,
        )


@dataclass(frozen=True)
class Batch:
    """The flat forward. Token t sees the logical slots below `prefix[t]` of its row, and, in a tree, its ancestors' at
    `base + node`; below `base`, slot and position agree. `low` and `high` bound each row's positions on the host."""

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,) for RoPE and windows
    sequence: Tensor  # (T,) row
    node: Tensor  # (T,) draft node, or -1 for a known token
    prefix: Tensor  # (T,)
    slots: list[Tensor]  # G x (T,) physical slot that is written; 0 for dead nodes and padding
    tables: list[Tensor]  # G x (R, blocks)
    base: Tensor  # (R,) start + count
    start: Tensor  # (R,)
    sample: Tensor  # (M,) tokens after which one is drawn
    size: int
    lengths: tuple[int, ...]  # tokens of each row, drafts included
    counts: tuple[int, ...]  # known ones
    low: tuple[int, ...]  # least start of each row
    high: tuple[int, ...]  # most logical slots that each row's tokens look into
    paths: Tensor | None = None  # (T, depth) nodes from the root down to the token, -1 pads; None: all chains
    drafts_at: Tensor | None = None  # (drafts,) which tokens are draft nodes
    plain: bool = False  # one token in each row, and after each one is drawn


@dataclass(frozen=True)
class Kept:
    """What verification kept. Where their KV belongs: slot and position agree again; 0 for what was dropped."""

    mask: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: list[Tensor]  # G x (T,)
    end: Tensor  # (R,) one past the last kept position


def tables_of(rows: SequenceOf[Row], device: torch.device) -> list[Tensor]:
    """G x (R, widest table), padded with block 0."""
    found = []
    for group in range(len(rows[0].sequence.tables)):
        width = max(1, max(len(r.sequence.tables[group]) for r in rows))
        table = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            mine = row.sequence.tables[group]
            table[i, : len(mine)] = mine
        found.append(_putter(device)(table))
    return found


def slots_of(table: Tensor, sequence: Tensor, logical: Tensor, size: int) -> Tensor:
    """Physical slots of logical ones. What lies past a row's table is clamped: its results are dropped anyway."""
    return table[sequence, (logical // size).clamp(max=table.shape[1] - 1)] * size + logical % size


def tips_of(rows: list[Row], size: int, device: torch.device) -> Tips:
    columns = np.array([(r.start, r.sequence.tokens[-1], r.room, r.depth) for r in rows], np.int64)
    start, last, room, depth = _putter(device)(np.ascontiguousarray(columns.T)).unbind()
    return Tips(rows, tables_of(rows, device), start, last, room, depth, size)


def causal(tokens: Tensor, sequence: Tensor, positions: Tensor, tips: Tips, lengths: tuple[int, ...]) -> Batch:
    """Rows without a tree, given flat and row by row: a drafter's own forward. Slot = position."""
    slots = [slots_of(table, sequence, positions, tips.size) for table in tips.tables]
    high = tuple(r.start + r.count + r.room + length for r, length in zip(tips.rows, lengths, strict=True))
    low = tuple(r.start for r in tips.rows)
    node, every = torch.full_like(tokens, -1), torch.arange(len(tokens), device=tokens.device)
    start = tips.start
    return Batch(
        tokens, positions, sequence, node, positions + 1, slots, tips.tables, start, start, every, tips.size,
        lengths, lengths, low, high,
    )  # fmt: skip


def build(tips: Tips, drafts: Drafts) -> Batch:
    """The step's forward from its rows and drafts."""
    rows, start, size, device = tips.rows, tips.start, tips.size, tips.device
    if device.type == "cpu" and not any(drafts.sizes) and all(r.draws and r.count == 1 and not r.after for r in rows):
        return _plain(tips)
    counts, lengths, sequence, offset, known = _layout(rows, drafts)
    put = _putter(device)
    node_of = np.where(offset >= counts[sequence], offset - counts[sequence], -1)
    draws = np.array([r.draws for r in rows])
    tip = np.flatnonzero(draws[sequence] & (offset == counts[sequence] - 1))
    draft = np.flatnonzero(node_of >= 0)
    sample = np.flatnonzero(draws[sequence] & (offset >= counts[sequence] - 1))

    row, node, count = put(sequence), put(node_of), put(counts)
    tokens, logical, base = put(known), start[row] + put(offset), start + count
    tokens[put(tip)] = tips.last[put(sequence[tip])]
    positions, prefix, paths, drafts_at, alive = logical, logical + 1, None, None, None
    if len(draft):
        drafts_at = put(draft)
        of_row, of_node = row[drafts_at], node[drafts_at]
        tokens[drafts_at] = drafts.tokens[of_row, of_node]
        alive = torch.ones_like(row, dtype=torch.bool).index_put((drafts_at,), drafts.exists[of_row, of_node])
        if not drafts.chain:
            depth = (base - 1)[of_row] + drafts.depths[of_row, of_node]
            positions = logical.index_put((drafts_at,), depth)
            prefix = positions + 1
            paths = _paths(drafts, row, node)
    slots = [slots_of(table, row, logical, size) for table in tips.tables]
    if alive is not None:
        slots = [torch.where(alive, slot, slot % size) for slot in slots]  # a dead node's KV goes to nobody's block
        prefix = torch.where(alive, prefix, 0)  # and it sees nothing: its own slot may hold anything
    slack = [r.after.room if r.after else 0 for r in rows]
    high = tuple(int(r.start + n + s) for r, n, s in zip(rows, lengths, slack, strict=True))
    return Batch(
        tokens, positions, row, node, prefix, slots, tips.tables, base, start, put(sample), size,
        tuple(lengths.tolist()), tuple(counts.tolist()), tuple(r.start for r in rows), high, paths, drafts_at,
    )  # fmt: skip


def _plain(tips: Tips) -> Batch:
    """The commonest batch, one known token in each row, with as little as can be done for it."""
    start, count = tips.start.numpy(), len(tips.rows)
    each, after = one_each(count), start + 1
    block, within = np.divmod(start, tips.size)
    put = torch.from_numpy
    slots = [put(table.numpy()[each.host, block] * tips.size + within) for table in tips.tables]
    prefix, ones = put(after), (1,) * count
    return Batch(
        tips.last, tips.start, each.index, each.none, prefix, slots, tips.tables, prefix, tips.start, each.index,
        tips.size, ones, ones, tuple(start.tolist()), tuple(after.tolist()), plain=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Each:
    """Constants of a plain batch on the CPU; nobody writes to them."""

    host: np.ndarray  # (R,) 0, 1, ...
    index: Tensor  # the same
    none: Tensor  # (R,) -1
    all: Tensor  # (R,) true


@lru_cache(maxsize=64)
def one_each(rows: int) -> Each:
    host = np.arange(rows)
    return Each(host, torch.from_numpy(host), torch.full((rows,), -1), torch.ones(rows, dtype=torch.bool))


def _layout(rows: list[Row], drafts: Drafts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(R,) known counts, (R,) lengths, (T,) row, (T,) offset in the row, (T,) known tokens, 0 where unknown."""
    counts = np.array([r.count for r in rows], np.int64)
    lengths = counts + np.array(drafts.sizes, np.int64)
    sequence = np.repeat(np.arange(len(rows)), lengths)
    first = np.cumsum(lengths) - lengths
    offset = np.arange(len(sequence)) - first[sequence]
    known = np.zeros(len(sequence), np.int64)
    for r, row in enumerate(rows):
        if row.after is None:
            known[first[r] : first[r] + row.count] = row.sequence.tokens[row.start : row.start + row.count]
    return counts, lengths, sequence, offset, known


def _paths(drafts: Drafts, row: Tensor, node: Tensor) -> Tensor:
    """(T, depth): nodes from a tree's root down to each draft token, by depth; -1 pads, known tokens have none."""
    above = drafts.ancestors[row, node.clamp(min=0)] & (node >= 0)[:, None]  # (T, W)
    place = torch.where(above, drafts.depths[row] - 1, drafts.depth)  # where each ancestor goes; the rest past the end
    paths = torch.full((len(row), drafts.depth + 1), -1, dtype=torch.long, device=row.device)
    nodes = torch.arange(drafts.width, device=row.device).expand_as(place)
    return paths.scatter_(1, place, torch.where(above, nodes, -1))[:, : drafts.depth]


def pad(batch: Batch, tokens: int, rows: int) -> Batch:
    """The fixed shapes of a captured graph. A padding token is a row of its own kind: it writes to and sees block 0."""
    extra, more_rows = tokens - len(batch.tokens), rows - len(batch.lengths)
    assert extra >= more_rows >= 1 or (extra == 0 and more_rows == 0), "padding tokens belong to padding rows"
    if not extra:
        return batch

    def grow(tensor: Tensor, count: int, value: int = 0) -> Tensor:
        return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), value)])

    share = [extra // more_rows + (i < extra % more_rows) for i in range(more_rows)]
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths), rows), torch.tensor(share)).to(
        batch.sequence.device
    )
    ones, zeros = tuple(1 for _ in share), tuple(0 for _ in share)
    return replace(
        batch,
        tokens=grow(batch.tokens, extra),
        positions=grow(batch.positions, extra),
        sequence=torch.cat([batch.sequence, owner]),
        node=grow(batch.node, extra, -1),
        prefix=grow(batch.prefix, extra, 1),
        slots=[grow(slot, extra) for slot in batch.slots],
        tables=[grow(table, more_rows) for table in batch.tables],
        base=grow(batch.base, more_rows),
        start=grow(batch.start, more_rows),
        lengths=batch.lengths + tuple(share),
        counts=batch.counts + tuple(share),
        low=batch.low + zeros,
        high=batch.high + ones,
        paths=None if batch.paths is None else grow(batch.paths, extra, -1),
    )
