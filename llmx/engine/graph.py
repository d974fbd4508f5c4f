"""Small forwards recorded once and replayed: a step of few tokens costs more in Python than in its kernels.

A graph belongs to a shape: so many tokens, rows, blocks in the tables, nodes in a path. What a step computes with is
copied to where the recorded ops read it. How ops are recorded is the device's own: the table's `recorder`.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache

log = logging.getLogger(__name__)

MOST_TOKENS = 64  # of a forward that is recorded: in larger ones Python is lost beside the kernels
MOST_GRAPHS = 128
LEAST_BLOCKS = (
    16  # tables are as wide as a power of two of at least so many, so that a text that grows fits in its graph
)

Key = tuple[Any, ...]


class Graph:
    """One recorded forward: its inputs, its results, and the ops between."""

    def __init__(self, batch: Batch) -> None:
        self.batch = replace(
            batch,
            tokens=torch.empty_like(batch.tokens),
            positions=torch.empty_like(batch.positions),
            prefix=torch.empty_like(batch.prefix),
            slots=[torch.empty_like(slots) for slots in batch.slots],
            tables=[table.new_zeros(len(table), table_width(table.shape[1])) for table in batch.tables],
            base=torch.empty_like(batch.base),
            paths=None if batch.paths is None else batch.paths.contiguous().clone(),
        )
        self.plans: dict[int, Any] = {}
        self.recorded: Any = None
        self.results = (batch.tokens, batch.tokens)
        self._shares = (batch.lengths, batch.counts)
        self._fill(batch)

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The forward of another batch of this shape."""
        self._fill(batch)
        if (batch.lengths, batch.counts) != self._shares:
            for plan in self.plans.values():
                plan.refill(batch)
            self._shares = (batch.lengths, batch.counts)
        self.recorded.replay()
        hidden, taps = self.results
        return _copied(hidden, taps)

    def _fill(self, batch: Batch) -> None:
        mine = self.batch
        mine.tokens.copy_(batch.tokens)
        mine.positions.copy_(batch.positions)
        mine.prefix.copy_(batch.prefix)
        mine.base.copy_(batch.base)
        for to, slots in zip(mine.slots, batch.slots, strict=True):
            to.copy_(slots)
        for to, table in zip(mine.tables, batch.tables, strict=True):
            to[:, : table.shape[1]] = table  # what is left behind them no query looks into
        if mine.paths is not None and batch.paths is not None:
            mine.paths.copy_(batch.paths)


class Graphs:
    """The forwards of a model over its cache, those of few tokens by graph. LLMX_GRAPH=0: none, to bisect.

    A shape is recorded when it is seen for the second time. The least recently used graph goes when there are too many.
    A model whose forward has torch ops between the native ones runs without, and says so in the debug log.
    """

    def __init__(self, model: Any, cache: Cache) -> None:
        self.model, self.cache = model, cache
        kernels = model.kernels
        usable = model.group.size == 1 and kernels.has("recorder") and os.environ.get("LLMX_GRAPH") != "0"
        self.recorder = kernels.get("recorder")() if usable else None
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._refused: set[Key] = set()
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def forward(self, batch: Batch, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """As the model's: hidden (T, hidden) and taps (T, len(taps) * hidden), to the bit."""
        if self.recorder is None or len(batch.tokens) > MOST_TOKENS:
            return self._eager(batch, taps)
        depth = None if batch.paths is None else batch.paths.shape[1]
        widths = tuple(table_width(table.shape[1]) for table in batch.tables)
        key = (len(batch.tokens), len(batch.lengths), widths, depth, taps, torch.get_num_threads())
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            self.replays += 1
            return graph.replay(batch)
        if (taps, depth is None) in self._refused:
            return self._eager(batch, taps)
        if key in self._seen:
            del self._seen[key]
            return self._record(key, batch, taps)
        remember(self._seen, key, None)
        return self._eager(batch, taps)

    def _eager(self, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.model.forward(batch, self.cache, taps=taps)
        return found

    def _record(self, key: Key, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        assert self.recorder is not None
        graph = Graph(batch)
        results, graph.recorded = self.recorder.record(
            lambda: self.model.forward(graph.batch, self.cache, taps=taps, plans=graph.plans)
        )
        if graph.recorded is None:
            self._refused.add((taps, batch.paths is None))
            log.debug("no graphs for this model: its forward calls %s", self.recorder.refused)
            hidden, seen = results
            return hidden, seen
        graph.results = results
        remember(self._graphs, key, graph)
        return _copied(*graph.results)


def _copied(hidden: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """The next replay, also of another graph, writes where the results lie."""
    return hidden.clone(), taps.clone() if taps.shape[1] else hidden.new_empty(len(hidden), 0)


def remember(found: OrderedDict[Key, Any], key: Key, value: Any) -> None:
    found[key] = value
    if len(found) > MOST_GRAPHS:
        found.popitem(last=False)


def table_width(blocks: int) -> int:
    """Of a recorded forward's tables, where the longest has so many blocks."""
    return max(LEAST_BLOCKS, 1 << (blocks - 1).bit_length())
