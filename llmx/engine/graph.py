"""Forwards recorded once and replayed: in Python a step of few tokens costs more than its kernels, one of many enough.

A recorded forward serves every batch of as many tokens as it has room for, or fewer, however they are shared out among
rows: no op's result for a row depends on how many rows there are. What a step computes with is copied to where the
recorded ops read it. How ops are recorded is the device's own: the table's `recorder`.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache

log = logging.getLogger(__name__)

ROOMS = (67, 521)  # tokens that recorded forwards have room for: primes, which the recorder tells from other numbers
MOST_GRAPHS = 128
LEAST_BLOCKS = (
    16  # tables are as wide as a power of two of at least so many, so that a text that grows fits in its graph
)

Key = tuple[Any, ...]


class Graph:
    """One recorded forward: its inputs, its results, and the ops between."""

    def __init__(self, room: int, rows: int, widths: tuple[int, ...], depth: int | None, size: int) -> None:
        """room, rows: tokens and rows that it can take. widths: of the tables, by KV group. depth: of the paths of
        draft trees; None: there are none."""
        tokens, positions, prefix, zero, *slots = (torch.zeros(room, dtype=torch.long) for _ in range(4 + len(widths)))
        tables = [torch.zeros(rows, width, dtype=torch.long) for width in widths]
        base = torch.zeros(rows, dtype=torch.long)
        paths = None if depth is None else torch.full((room, depth), -1, dtype=torch.long)
        ones, zeros = (1,) * room, (0,) * room
        self.batch = Batch(
            tokens, positions, zero, zero, prefix, slots, tables, base, zero, zero, size, ones, ones, zeros, zeros,
            paths,
        )  # fmt: skip
        self.plans: dict[int, Any] = {}
        self.recorded: Any = None
        self.results = (tokens, tokens)
        self._shares: Any = None
        self._units = 0

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The forward of a batch that there is room for."""
        self._fill(batch)
        if (batch.lengths, batch.counts) != self._shares:
            self._units = max([plan.refill(batch) for plan in self.plans.values()], default=0)
            self._shares = (batch.lengths, batch.counts)
        count = len(batch.tokens)
        self.recorded.replay_rows(count, self._units)
        hidden, taps = self.results  # the next replay, also of another graph, writes there
        return hidden[:count].clone(), taps[:count].clone() if taps.shape[1] else hidden.new_empty(count, 0)

    def _fill(self, batch: Batch) -> None:
        mine, count, rows = self.batch, len(batch.tokens), len(batch.lengths)
        mine.tokens[:count] = batch.tokens
        mine.positions[:count] = batch.positions
        mine.prefix[:count] = batch.prefix
        mine.base[:rows] = batch.base
        for to, slots in zip(mine.slots, batch.slots, strict=True):
            to[:count] = slots
        for to, table in zip(mine.tables, batch.tables, strict=True):
            to[:rows, : table.shape[1]] = table  # what is left behind them no query looks into
        if mine.paths is not None and batch.paths is not None:
            mine.paths[:count] = batch.paths


class Graphs:
    """The forwards of a model over its cache, all but the largest by graph. LLMX_GRAPH=0: none, to bisect.

    A graph is recorded when it is wanted for the second time. The least recently used goes when there are too many. A
    model whose forward has torch ops between the native ones runs without, and says so in the debug log.
    """

    def __init__(self, model: Any, cache: Cache, rows: int = ROOMS[-1], record: bool = True) -> None:
        """rows: most in one batch. record: False where Python of the model's own has to see every forward."""
        self.model, self.cache, self._rows = model, cache, rows
        kernels = model.kernels
        usable = record and model.group.size == 1 and kernels.has("recorder") and os.environ.get("LLMX_GRAPH") != "0"
        self.recorder = kernels.get("recorder")() if usable else None
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._refused: set[Key] = set()
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def forward(self, batch: Batch, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """As the model's: hidden (T, hidden) and taps (T, len(taps) * hidden), to the bit."""
        room = next((room for room in ROOMS if len(batch.tokens) <= room), None)
        if self.recorder is None or room is None:
            return self._eager(batch, taps)
        depth = None if batch.paths is None else batch.paths.shape[1]
        widths = tuple([table_width(table.shape[1]) for table in batch.tables])
        key = (room, widths, depth, taps, torch.get_num_threads())
        graph = self._graphs.get(key)
        if graph is None:
            if (taps, depth is None) in self._refused:
                return self._eager(batch, taps)
            if key not in self._seen:
                remember(self._seen, key, None)
                return self._eager(batch, taps)
            del self._seen[key]
            graph = Graph(room, min(room, self._rows), widths, depth, self.cache.size)
            if not self._record(graph, taps):
                self._refused.add((taps, depth is None))
                return self._eager(batch, taps)
            remember(self._graphs, key, graph)
        self._graphs.move_to_end(key)
        self.replays += 1
        return graph.replay(batch)

    def _eager(self, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.model.forward(batch, self.cache, taps=taps)
        return found

    def _record(self, graph: Graph, taps: tuple[int, ...]) -> bool:
        """False: it can't be recorded. Nothing is computed."""
        assert self.recorder is not None
        graph.results, graph.recorded = self.recorder.record(
            lambda: self.model.forward(graph.batch, self.cache, taps=taps, plans=graph.plans), len(graph.batch.tokens)
        )
        if graph.recorded is None:
            log.debug("no graphs for this model: its forward calls %s", self.recorder.refused)
        return graph.recorded is not None


def remember(found: OrderedDict[Key, Any], key: Key, value: Any) -> None:
    found[key] = value
    if len(found) > MOST_GRAPHS:
        found.popitem(last=False)


def table_width(blocks: int) -> int:
    """Of a recorded forward's tables, where the longest has so many blocks."""
    return max(LEAST_BLOCKS, 1 << (blocks - 1).bit_length())
