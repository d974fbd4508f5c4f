"""Drafters for tests: one replays a known text, one is always wrong, one checks the tap that it is lent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed

import torch
from engine.common import CPU, VOCAB, Key, key_of
from torch import Tensor

from llmx.batch import Batch, Drafts, Kept, Tips
from llmx.core import Row
from llmx.speculative.base import Lent, Needs, NoDrafter


@dataclass(frozen=True)
class Replay(NoDrafter):
    """`known[id, choice]` is the output to come; `off` is added to each token, so that 1 is never right.

    Wrong siblings before each right node make every tree move its KV. `dead`: more nodes in the batch than there are
    drafts, as when only the device knows how many there are.
    """

    known: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    deep: int = 4
    siblings: int = 0
    off: int = 0
    dead: bool = False
    host: bool = True

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(self.deep * (1 + self.siblings), self.deep, host=self.host)

    def propose(self, tips: Tips, lent: Lent) -> Drafts:
        starts = tips.start.tolist()  # behind a row in flight the host knows it only from here
        trees = [self._tree(row, start) if row.room else ([], []) for row, start in zip(tips.rows, starts, strict=True)]
        drafts = Drafts.trees(trees, CPU)
        if not self.dead:
            drafts.check(tips.rows)
            return drafts
        sizes = tuple(row.room for row in tips.rows)
        more = max(0, max(sizes) - drafts.width)
        pad = torch.nn.functional.pad
        tokens, parents = pad(drafts.tokens, (0, more)), pad(drafts.parents, (0, more), value=-1)
        return changed(drafts, tokens=tokens, parents=parents, sizes=sizes)

    def _tree(self, row: Row, start: int) -> tuple[list[int], list[int]]:
        done, text = start + 1 - row.sequence.prompt_len, self.known[key_of(row.sequence)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in text[done : done + min(self.deep, row.depth)]:
            level = [(token + 1 + i) % VOCAB for i in range(self.siblings)] + [(token + self.off) % VOCAB]
            tokens, parents = tokens + level, parents + [parent] * len(level)
            parent = len(tokens) - 1
        return tokens[: row.room], parents[: row.room]


@dataclass(frozen=True)
class CheckTaps(Replay):
    """Replays, and compares the tap that it is lent with `truth[id, choice]`: (positions, taps) of a naive forward."""

    truth: Mapping[Key, Tensor] = field(default_factory=dict)
    taps: tuple[int, ...] = (1, -1)
    checked: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    seen: list[Key] = field(default_factory=list)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return changed(super().needs, taps=self.taps)

    def propose(self, tips: Tips, lent: Lent) -> Drafts:
        self.seen[:] = [key_of(row.sequence) for row in tips.rows]
        lent_taps = lent.tap(tips)
        for row, start, tap in zip(tips.rows, tips.start.tolist(), lent_taps, strict=True):
            if start:
                torch.testing.assert_close(tap, self.truth[key_of(row.sequence)][start - 1], rtol=1e-4, atol=1e-4)
                self.checked.append(start)
            else:
                assert not tap.any(), "there is nothing before the first token"
        return super().propose(tips, lent)

    def observe(self, drafts: Drafts, batch: Batch, kept: Kept, taps: Tensor, lent: Lent) -> None:
        """Here the tap of the step before is still in its block, and this step's are in `taps`."""
        self.observed.extend(batch.positions[kept.mask].tolist())
        for row, sequence in enumerate(self.seen):
            if (before := int(batch.start[row]) - 1) >= 0:
                block = batch.tables[0][row, before // batch.size]
                torch.testing.assert_close(lent.cache.taps[block], self.truth[sequence][before], rtol=1e-4, atol=1e-4)
        for t in kept.mask.nonzero().flatten().tolist():
            sequence, position = self.seen[int(batch.sequence[t])], int(batch.positions[t])
            if position < len(self.truth[sequence]):  # what is in flight behind a finished text is dropped
                torch.testing.assert_close(taps[t], self.truth[sequence][position], rtol=1e-4, atol=1e-4)
