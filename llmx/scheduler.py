"""Which tokens of which sequences the next step computes. Knows counts and blocks; neither tensors nor drafters."""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, replace

from llmx.cache.blocks import BlockManager, Copies
from llmx.core import Emitted, Landed, Request, Row, Sequence
from llmx.errors import RequestError, UsageError


@dataclass(frozen=True)
class Limits:
    """What one step and one sequence may take."""

    budget: int = 512  # tokens in one step, drafts included
    running: int = 32  # sequences at once; each gets at least one token per step, so it may not exceed the budget
    length: int = 2048  # prompt and output together
    draft_tokens: int = 0  # most drafts per row
    draft_slots: int = 0  # most slots past the last known token that a drafter writes
    host_drafter: bool = False  # reads sequence.tokens, so it has nothing to say behind a row in flight
    overlap: bool = False  # launch a sequence's next row before the one before it has landed

    def __post_init__(self) -> None:
        if self.running > self.budget:
            raise UsageError(
                f"{self.running} sequences at once need a step budget of as many tokens, not {self.budget}.",
                hint="raise --max-num-batched-tokens or lower --max-num-seqs",
            )


class Scheduler:
    """Serves old before young. Nobody preempts an older one, so the oldest always gets on, and all of them end."""

    def __init__(self, limits: Limits, blocks: BlockManager) -> None:
        self.limits, self.blocks = limits, blocks
        self.waiting: list[Sequence] = []  # by age
        self.running: list[Sequence] = []  # by age
        self.arrivals = self.preemptions = 0

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; its `n` sequences. RequestError if it could never run."""
        longest, limits = len(request.prompt) + request.max_tokens, self.limits
        if not request.prompt:
            raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
        if longest > limits.length:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} are {longest} tokens, more "
                f"than the context of {limits.length}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if request.params.n > limits.running:
            raise RequestError(
                f"n={request.params.n} is more than the {limits.running} sequences that run at once.", param="n"
            )
        if short := self.blocks.shortage(longest - 1):  # the last token's KV is never written
            raise RequestError(
                f"{longest} tokens need {short[0]} KV blocks; the cache has {short[1]}.", param="max_tokens"
            )
        siblings = [Sequence(request, i, self.arrivals, list(request.prompt)) for i in range(request.params.n)]
        self.arrivals += 1
        siblings[0].unborn = siblings[1:]
        insort(self.waiting, siblings[0], key=lambda s: s.age)
        return siblings

    def schedule(self) -> tuple[list[Row], Copies]:
        """The rows of the next step, their slots reserved, and the blocks to copy before anything is written."""
        rows: list[Row] = []
        copies: Copies = []
        budget, before = self.limits.budget, self.preemptions
        queue = [s for s in self.running if self._may_fly(s)]
        for place, sequence in enumerate(queue):
            if not sequence.tables:  # preempted by an older one, just now
                continue
            spare = budget - (len(queue) - place - 1)  # one token is the right of each that follows
            if (row := self._row(sequence, spare, copies, preempt=True)) is not None:
                rows.append(row)
                budget -= row.count
        if self.preemptions == before:
            budget = self._admit(rows, copies, budget)
        if self.limits.draft_tokens:
            for i, row in enumerate(rows):
                rows[i] = self._with_room(row, budget, copies)
                budget -= rows[i].room
        for row in rows:
            row.sequence.flying = row
        return rows, copies

    def _admit(self, rows: list[Row], copies: Copies, budget: int) -> int:
        while self.waiting and budget:
            sequence = self.waiting[0]
            if sum(1 + len(s.unborn) for s in (sequence, *self.running)) > self.limits.running:
                break
            self.blocks.adopt(sequence)
            row = self._row(sequence, budget, copies, preempt=False)
            # The watermark: a free block for each that runs already, or it would soon preempt this one again.
            if row is None or (self.running and self.blocks.least_free() < len(self.running)):
                self.blocks.release(sequence)
                break
            if not sequence.preemptions:
                sequence.cached, sequence.started = sequence.computed, time.monotonic()
            insort(self.running, self.waiting.pop(0), key=lambda s: s.age)
            self._fork(sequence)  # a prefix hit may leave nothing but the last token
            rows.append(row)
            budget -= row.count
        return budget

    def _row(self, sequence: Sequence, budget: int, copies: Copies, preempt: bool) -> Row | None:
        flying, start, remaining = sequence.flying, sequence.computed, sequence.remaining
        if flying is None and remaining == 1 and budget and self.blocks.fits(sequence, start + 1):
            return Row(sequence, start, 1, draws=True)  # nearly always: the token that it drew last
        if flying is not None:
            start += flying.count  # at least: from `computed`, since the flying row's own start may have been a guess
            remaining = 1 if flying.draws else len(sequence.tokens) - start
        slack = flying.room if flying else 0
        count = min(remaining, budget, self.blocks.reach(sequence) - slack - start)
        if flying and count <= 0:  # what is in flight fills a window group; its windows move on when it lands
            return None
        if sequence.unborn and remaining > 1:  # stop before the last token, so that each sibling draws from it
            count = min(count, remaining - 1)
        assert count > 0, "a row without tokens would be scheduled for ever"
        while (moved := self.blocks.reserve(sequence, start + count + slack)) is None:
            if not preempt or (victim := self._victim(sequence)) is None:
                return None
            self._preempt(victim)
        copies += moved
        behind = flying if flying and flying.draws else None
        return Row(sequence, start, count, draws=count == remaining, after=behind)

    def _with_room(self, row: Row, budget: int, copies: Copies) -> Row:
        """Drafts use what is left of budget and pool; they never cost anybody else a block."""
        sequence = row.sequence
        if not row.draws or row.count > 1 or (row.after and self.limits.host_drafter):
            return row
        depth = sequence.request.max_tokens - sequence.output_len - (2 if row.after else 1)
        room = min(self.limits.draft_tokens, budget)
        slots = max(room, self.limits.draft_slots) + (row.after.room if row.after else 0)
        if room <= 0 or depth <= 0 or (moved := self.blocks.reserve(sequence, row.start + 1 + slots)) is None:
            return row
        copies += moved
        return replace(row, room=room, depth=depth)

    def _may_fly(self, sequence: Sequence) -> bool:
        """Not while a row is flying, unless steps overlap; then the one that follows it, unless past the end."""
        if sequence.flying is None:
            return True
        certain = sequence.flying.draws and sequence.output_len + 1 >= sequence.request.max_tokens
        return self.limits.overlap and not certain and not sequence.unborn

    def _victim(self, sequence: Sequence) -> Sequence | None:
        younger = (s for s in reversed(self.running) if s.age > sequence.age and not s.flying)
        return next(younger, None)

    def _preempt(self, victim: Sequence) -> None:
        """By recompute: the text is kept, its KV is not (but what was published may still be there)."""
        self.blocks.release(victim)
        self.running.remove(victim)
        insort(self.waiting, victim, key=lambda s: s.age)
        victim.preemptions += 1
        self.preemptions += 1

    def commit(self, rows: list[Row], emitted: list[Emitted]) -> list[Landed]:
        """Land a step: text grows token by token, KV below `computed` becomes final, sequences end."""
        landed = []
        for row, new in zip(rows, emitted, strict=True):
            sequence = row.sequence
            if sequence.flying is row:
                sequence.flying = None
            if sequence.finish:  # it ended in the step before, when this one had been launched already
                continue
            said = take(sequence, new)
            sequence.computed += row.count + max(0, said - 1)
            sequence.drafted += new.drafted
            self.blocks.publish(sequence)
            self.blocks.pass_window(sequence)
            if sequence.unborn:
                self._fork(sequence)
            if sequence.finish:
                self._end(sequence)
            elif not sequence.flying and self.limits.draft_tokens:
                self.blocks.shrink(sequence, len(sequence.tokens))
            logprobs = None if new.logprobs is None else new.logprobs[:said]
            tokens = new.tokens if said == len(new.tokens) else new.tokens[:said]
            landed.append(Landed(sequence, tokens, logprobs, new.prompt_logprobs))
        return landed

    def abort(self, sequence: Sequence) -> None:
        """End it where it is. What is in flight for it is dropped when it lands."""
        if sequence.finish is None:
            sequence.finish = "abort"
            self._end(sequence)
            if heirs := [s for s in sequence.unborn if s.finish is None]:  # they live on: the next computes the prompt
                heirs[0].unborn = heirs[1:]
                insort(self.waiting, heirs[0], key=lambda s: s.age)
            sequence.unborn = []

    def _end(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _fork(self, parent: Sequence) -> None:
        if parent.unborn and parent.remaining == 1:
            for child in parent.unborn:
                if child.finish is None:
                    self.blocks.fork(parent, child)
                    insort(self.running, child, key=lambda s: s.age)
            parent.unborn = []


def take(sequence: Sequence, new: Emitted) -> int:
    """Token by token, as if there had been no drafts: what comes after a stop was never said. How many were said."""
    request, length = sequence.request, sequence.output_len
    for i, token in enumerate(new.tokens):
        sequence.tokens.append(token)
        sequence.accepted += i < len(new.tokens) - 1
        length += 1
        if token in request.stops and length > request.params.min_tokens:
            sequence.finish, sequence.stopped_by = "stop", token
        elif sequence.constraint is not None and (ended := sequence.constraint.push(token)):
            sequence.finish = ended
        elif length >= request.max_tokens:
            sequence.finish = "length"
        if sequence.finish:
            return i + 1
    return len(new.tokens)
