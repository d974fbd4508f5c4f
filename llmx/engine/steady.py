"""Steps that are recorded whole, from token ids to drawn tokens: each row goes on by the one token that it drew last.

Between two requests' coming and going all steps are like that, and what Python does in one costs more than it seems:
a step reads all weights, so each finds Python's code and data out of the caches. Here one native call is a step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from llmx.batch import Batch, Drafts, one_each
from llmx.core import Row
from llmx.engine.graph import Graphs, remember, table_width
from llmx.sampler import Draws, rules_of
from llmx.speculative.base import Needs
from llmx.speculative.verify import Verdict, verify

log = logging.getLogger(__name__)

MOST_ROWS = 64  # of a step that is recorded: in larger ones Python is lost beside the kernels
Key = tuple[int, ...]


class SteadyStep:
    """A recorded step of so many rows with tables so wide. Its results lie where they lie until the next step."""

    def __init__(self, rows: int, widths: tuple[int, ...], size: int, redraw: Any) -> None:
        """redraw: makes the op that draws after the rows at some positions."""
        each, cpu, ones = one_each(rows), torch.device("cpu"), (1,) * rows
        tokens, positions, prefix, *slots = (torch.zeros(rows, dtype=torch.long) for _ in range(3 + len(widths)))
        tables = [torch.zeros(rows, width, dtype=torch.long) for width in widths]
        self.batch = Batch(
            tokens, positions, each.index, each.none, prefix, slots, tables, prefix, positions, each.index, size,
            ones, ones, (0,) * rows, (widths[0] * size,) * rows, plain=True,
        )  # fmt: skip
        self.redraw = redraw(prefix)
        self.drafts, self.draws = Drafts.none(rows, cpu), Draws(self.redraw.tokens)
        self.verdict: Verdict = verify(self.drafts, self.batch, self.draws)
        self.plans: dict[int, Any] = {}
        self.recorded: Any = None
        self.hidden = self.taps = tokens  # until it is recorded
        self._size, self.drawn = size, self.redraw.tokens.numpy()  # drawn: (rows,)
        self._tokens, self._positions, self._prefix = tokens.numpy(), positions.numpy(), prefix.numpy()
        groups = zip(slots, tables, strict=True)
        self._groups = [(slot.numpy(), table.numpy(), [list[int]() for _ in ones]) for slot, table in groups]

    def fill(self, rows: list[Row]) -> None:
        """What the next run computes with."""
        starts, size = [row.start for row in rows], self._size
        self._tokens[:] = [row.sequence.tokens[-1] for row in rows]
        self._positions[:] = starts
        np.add(self._positions, 1, out=self._prefix)
        for group, (slots, table, known) in enumerate(self._groups):
            blocks = [row.sequence.tables[group] for row in rows]
            if blocks != known:
                for i, mine in enumerate(blocks):
                    if mine != known[i]:
                        table[i, : len(mine)] = mine  # what is left behind them no query looks into
                        known[i] = list(mine)
            slots[:] = [mine[at // size] * size + at % size for mine, at in zip(blocks, starts, strict=True)]


class Steady:
    """The steady steps of a model over its cache, by shape. A shape is recorded when it is seen for the second time.

    None where ops can't be recorded, and for a model whose forward or head has torch ops between the native ones.
    """

    def __init__(self, graphs: Graphs, needs: Needs) -> None:
        """needs: the drafter's; only one that needs nothing has nothing to do in a step."""
        self._graphs, kernels = graphs, graphs.model.kernels
        usable = needs == Needs() and kernels.has("redraw")
        self._redraw = kernels.get("redraw") if usable else None
        self._steps: OrderedDict[Key, SteadyStep] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self.runs = 0

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, rows: list[Row]) -> tuple[SteadyStep, list[int]] | None:
        """The step, which has been run, and the tokens that it drew; None: these rows make no such step."""
        if self._redraw is None or self._graphs.recorder is None or len(rows) > MOST_ROWS:
            return None
        for row in rows:
            sequence = row.sequence
            if not row.draws or row.count != 1 or row.after is not None or sequence.constraint is not None:
                return None
            if sequence.request.params.logprobs is not None:
                return None
        key = (len(rows), *_widths(rows))
        step = self._steps.get(key)
        if step is None:
            if key not in self._seen:
                remember(self._seen, key, None)
                return None
            step = SteadyStep(len(rows), key[1:], self._graphs.cache.size, self._redraw)
        sequences = [row.sequence for row in rows]
        rules = rules_of(sequences, self._graphs.model.kernels)
        step.redraw.fill(rules, [sequence.tokens for sequence in sequences])
        step.fill(rows)
        if step.recorded is not None:
            self._steps.move_to_end(key)
            self.runs += 1
            step.recorded.replay()
        elif self._record(step):
            del self._seen[key]
            remember(self._steps, key, step)
        return step, step.drawn.tolist()

    @torch.inference_mode()
    def _record(self, step: SteadyStep) -> bool:
        """Run it for the first time. False: it can't be recorded, and none of this model's can be."""
        model, recorder = self._graphs.model, self._graphs.recorder
        assert recorder is not None, "looked at in `step`"

        def run() -> None:
            step.hidden, step.taps = model.forward(step.batch, self._graphs.cache, plans=step.plans)
            step.redraw(model.head(step.hidden))  # the logits' memory is free again for other recordings

        _, step.recorded = recorder.record(run)
        if step.recorded is None:
            self._redraw = None
            log.debug("no steps are recorded whole: forward or head call %s", recorder.refused)
        return step.recorded is not None


def _widths(rows: list[Row]) -> tuple[int, ...]:
    """Of the tables, by KV group."""
    groups = range(len(rows[0].sequence.tables))
    return tuple([table_width(max([len(row.sequence.tables[group]) for row in rows])) for group in groups])
