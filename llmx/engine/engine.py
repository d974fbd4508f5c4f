"""The step, and the parts it goes through: launch, decide, land; in sequence or overlapped."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmx.batch import Batch, Drafts, Tips, build, tips_of
from llmx.cache.blocks import BlockManager, Copies, GroupShape
from llmx.cache.pools import Cache, windows_of
from llmx.core import Emitted, Landed, Logprob, Request, Row, Sequence
from llmx.engine.constraints import Grammars
from llmx.engine.graph import Graphs
from llmx.engine.steady import Steady, SteadyStep
from llmx.errors import UsageError
from llmx.sampler import Draws, draw, likeliest
from llmx.scheduler import Limits, Scheduler
from llmx.speculative.base import Drafter, Lent, NoDrafter
from llmx.speculative.verify import Verdict, emit, points, verify

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

PROMPT_ROWS = 256  # prompt positions whose logits are held at once
SCORE_BYTES = 2**26  # of logits that are handed out at once

NOTHING: dict[int, Logprob] = {}  # no log-probabilities of prompt tokens: a steady step computes none of those

Take = Callable[[Sequence, int, Tensor], None]  # (sequence, position of the first row, logits (rows, vocab) f32)


@dataclass(frozen=True)
class Launched:
    """The forward of one step, and what went into it; all of the step, if it was a steady one.

    A steady step's tensors are the next one's too.
    """

    rows: list[Row]
    drafts: Drafts
    batch: Batch
    hidden: Tensor
    taps: Tensor
    steady: tuple[SteadyStep, list[int]] | None = None


@dataclass(frozen=True)
class Decided:
    """What the step draws and keeps, still on the device."""

    rows: list[Row]
    drafts: Drafts
    draws: Draws
    verdict: Verdict
    prompts: list[dict[int, Logprob]]
    drawn: list[int] | None = None  # a steady step's, on the host already


class Engine:
    """A model, its cache and its scheduler. `blocks`: per KV group, block 0 included, in the order of `windows_of`."""

    def __init__(
        self,
        model: Any,
        *,
        drafter: Drafter | None = None,
        limits: Limits,
        blocks: SequenceOf[int],
        size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        prefix_caching: bool = True,
        poison: bool = False,
        record: bool = True,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        """record: forwards may be recorded and replayed, which passes no Python of the model's again. tokenizer: reads
        the model's, at the first request with a grammar."""
        drafter = drafter or NoDrafter()
        needs, specs = drafter.needs, model.specs
        every = [*specs, *needs.layers]
        windows, depth = windows_of(every), needs.tokens if needs.depth is None else needs.depth
        if narrow := [w for w in windows if w is not None and w <= depth]:
            raise UsageError(f"Drafts {depth} tokens deep don't fit a sliding window of {narrow[0]}.")
        limits = replace(limits, draft_tokens=needs.tokens, draft_slots=needs.slots, host_drafter=needs.host)
        groups = [GroupShape(window, count) for window, count in zip(windows, blocks, strict=True)]
        self.model, self.drafter, self.device = model, drafter, device
        self.scheduler = Scheduler(limits, BlockManager(size, groups, prefix_caching=prefix_caching))
        tap_dim = len(needs.taps) * model.config.hidden
        self.cache = Cache(
            every, len(specs), blocks, size, tap_dim=tap_dim, dtype=kv_dtype, device=device, poison=poison
        )
        self.graphs = Graphs(model, self.cache, limits.running, record)
        self.steady = Steady(self.graphs, needs)
        self.lent = Lent(model, self.cache, model.kernels)
        self.grammars = Grammars(tokenizer, model.config.vocab)
        self.flight: Decided | None = None
        self.computed_last = 0  # tokens of the last launch, if it launched anything
        self.take: Take | None = None  # who gets the logits that requests' `score_from` ask for

    def step(self) -> list[Landed] | None:
        """One step, or with overlap the launch of one and the landing of the one before. None: nothing to do."""
        if self.scheduler.limits.overlap:
            return self._overlapped()
        launched = self.launch()
        return None if launched is None else self.land(self.decide(launched))

    def _overlapped(self) -> list[Landed] | None:
        launched, before = self.launch(self.flight), self.flight
        landed = self.land(before) if before else []
        self.flight = self.decide(launched) if launched else None
        return landed if launched or before else None

    def launch(self, before: Decided | None = None) -> Launched | None:
        """Counts and blocks on the host, the rest tensors: nothing here waits for the tokens of the step before."""
        rows, copies = self.scheduler.schedule()
        self.computed_last = 0
        if not rows:
            return None
        if not (copies or before or self.take) and (steady := self.steady.step(rows)) is not None:
            step, self.computed_last = steady[0], len(rows)
            return Launched(rows, step.drafts, step.batch, step.hidden, step.taps, steady)
        return self._launch(rows, copies, before)

    @torch.inference_mode()
    def _launch(self, rows: list[Row], copies: Copies, before: Decided | None) -> Launched:
        self.cache.copy(copies)
        tips = follow(tips_of(rows, self.cache.size, self.device), before)
        drafts = self.drafter.propose(tips, self.lent)
        batch = build(tips, drafts)
        self.computed_last = len(batch.tokens)
        hidden, taps = self.graphs.forward(batch, self.drafter.needs.taps)
        return Launched(rows, drafts, batch, hidden, taps)

    def decide(self, step: Launched) -> Decided:
        """Drafter first (it reads the taps of the step before), then KV and taps: so hashes come after both."""
        if step.steady is not None:
            done, drawn = step.steady
            return Decided(step.rows, step.drafts, done.draws, done.verdict, [], drawn)
        return self._decide(step)

    @torch.inference_mode()
    def _decide(self, step: Launched) -> Decided:
        rows, drafts, batch = step.rows, step.drafts, step.batch
        hand_out(self.model, rows, batch, step.hidden, self.take)
        logits = self.model.head(step.hidden if batch.plain else step.hidden[batch.sample])
        draws = self._draw(step, logits) if len(batch.sample) else _none(logits)
        if self.model.group.size > 1:
            draws = replace(draws, tokens=self.model.group.agree(draws.tokens))  # rank 0 has the say
        verdict = verify(drafts, batch, draws)
        self.drafter.observe(drafts, batch, verdict.kept, step.taps, self.lent)
        self.cache.settle(batch, verdict.kept, step.taps)
        return Decided(rows, drafts, draws, verdict, score_prompts(self.model, rows, batch, step.hidden))

    def _draw(self, step: Launched, logits: Tensor) -> Draws:
        """The step before has landed: history, and with it each grammar's state, is as it will stay."""
        wanted = points(step.rows, step.drafts, step.batch)
        allowed = self.grammars.allowed(step.rows, step.drafts, wanted)
        return draw(logits, wanted if allowed is None else replace(wanted, allowed=allowed), self.model.kernels)

    def land(self, step: Decided) -> list[Landed]:
        """The one trip to the host."""
        if step.drawn is not None:
            return self.scheduler.commit(step.rows, [Emitted([token], None, NOTHING) for token in step.drawn])
        return self.scheduler.commit(step.rows, emit(step.rows, step.drafts, step.verdict, step.draws, step.prompts))

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; its `n` sequences. RequestError if it could never run."""
        begun = None if request.params.grammar is None else self.grammars.start(request)
        sequences = self.scheduler.add(request)
        for sequence in sequences:
            sequence.constraint = None if begun is None else begun.copy()
        return sequences

    def run(self, requests: SequenceOf[Request]) -> list[Sequence]:
        """All of them to their end, and the pool whole again."""
        sequences = [s for r in requests for s in self.add(r)]
        while any(s.finish is None for s in sequences) or self.flight:
            if self.step() is None:
                raise RuntimeError("the scheduler stands still")
        return sequences


def _none(logits: Tensor) -> Draws:
    return Draws(torch.zeros(0, dtype=torch.long, device=logits.device))


def follow(tips: Tips, before: Decided | None) -> Tips:
    """Rows behind a flying one start where that one ends, with the token that it drew."""
    if before is None or not (late := [i for i, r in enumerate(tips.rows) if r.after]):
        return tips
    place = {id(row): i for i, row in enumerate(before.rows)}
    came = [place[id(tips.rows[i].after)] for i in late]
    at, source = torch.tensor([late, came], device=tips.device)
    start = tips.start.index_copy(0, at, before.verdict.start[source])
    return replace(tips, start=start, last=tips.last.index_copy(0, at, before.verdict.last[source]))


def hand_out(model: Any, rows: list[Row], batch: Batch, hidden: Tensor, take: Take | None) -> None:
    """Logits of prompt positions, a bounded piece at a time. Of several ranks all compute them, and one takes them."""
    at = 0
    for row, length in zip(rows, batch.lengths, strict=True):
        request = row.sequence.request
        if request.score_from is not None:
            first, end = max(request.score_from, row.start), min(row.start + row.count, len(request.prompt))
            piece = max(4, SCORE_BYTES // (4 * model.config.vocab))
            for start in range(first, end, piece):
                stop = min(start + piece, end)
                logits = model.head(hidden[at + start - row.start : at + stop - row.start])
                if take is not None:
                    take(row.sequence, start, logits)
        at += length


def score_prompts(model: Any, rows: list[Row], batch: Batch, hidden: Tensor) -> list[dict[int, Logprob]]:
    """Log-probabilities of prompt tokens, by position: the head on known rows whose next token is known, in chunks."""
    found: list[dict[int, Logprob]] = [{} for _ in rows]
    places: list[tuple[int, int, int]] = []  # (row, token of the batch, position of the token that is scored)
    at = 0
    for r, (row, length) in enumerate(zip(rows, batch.lengths, strict=True)):
        sequence = row.sequence
        if sequence.request.params.prompt_logprobs is not None:
            last = min(row.start + row.count, sequence.prompt_len - 1)
            places += [(r, at + p - row.start, p + 1) for p in range(row.start, last)]
        at += length
    for i in range(0, len(places), PROMPT_ROWS):
        chunk = places[i : i + PROMPT_ROWS]
        tokens = torch.tensor([t for _, t, _ in chunk], device=hidden.device)
        actual = [rows[r].sequence.tokens[p] for r, _, p in chunk]
        scores = model.head(hidden[tokens]).log_softmax(-1)
        width = max(1, *(rows[r].sequence.request.params.prompt_logprobs or 0 for r, _, _ in chunk))
        values, ids = likeliest(scores, width)
        own = scores.gather(1, torch.tensor(actual, device=hidden.device)[:, None])[:, 0].tolist()
        table = zip(chunk, actual, own, ids.tolist(), values.tolist(), strict=True)
        for (r, _, position), token, value, top_ids, top_values in table:
            wanted = rows[r].sequence.request.params.prompt_logprobs
            top = tuple(zip(top_ids[:wanted], top_values[:wanted], strict=True))
            found[r][position] = Logprob(token, value, top)
    return found
