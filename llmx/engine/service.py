"""The engine core behind messages: add, abort, ask; tokens, refusals, metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

from llmx.config import STEP_BOUNDS, EngineConfig, EngineInfo, Metrics
from llmx.core import Landed, Sequence
from llmx.engine.build import build_engine
from llmx.engine.engine import Engine
from llmx.engine.memory import out_of_memory
from llmx.engine.messages import Abort, Add, Ask, Measured, Message, Refused, Tokens
from llmx.engine.ranks import Followers
from llmx.errors import LlmxError, RequestError
from llmx.parallel.group import Lost


class Core:
    """One engine and the requests in it. Not thread-safe: whoever steps it also hands it its messages."""

    def __init__(self, engine: Engine, info: EngineInfo, followers: Followers | None = None) -> None:
        self.engine, self.info, self.followers = engine, info, followers
        self._untold: list[Message] = []  # what the other ranks have not heard of yet
        self.requests: dict[str, list[Sequence]] = {}
        self._unstarted: set[str] = set()  # requests of which nothing has landed yet
        self._totals: dict[str, int] = dict.fromkeys(
            ("steps", "most_running", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens"), 0
        ) | dict.fromkeys(("finished", "aborted", "slots_held", "slots_live", "drafted_tokens", "accepted_tokens"), 0)
        self._seconds = 0.0
        self._sizes = [0] * (len(STEP_BOUNDS) + 1)

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> Core:
        try:
            return cls._load(config, progress)
        except Exception as error:
            if (known := out_of_memory(error, f"loading {config.model}", config.memory_utilization)) is None:
                raise
            raise known from error

    @classmethod
    def _load(cls, config: EngineConfig, progress: Callable[[int, int], None] | None) -> Core:
        if config.tensor_parallel_size == 1:
            return cls(*build_engine(config, progress))
        followers = Followers(config)

        def told(done: int, total: int) -> None:
            followers.check()
            if progress is not None:
                progress(done, total)

        try:
            core = cls(*build_engine(config, told, followers.join), followers)
            followers.wait_ready()
        except Lost:
            error = followers.blame()
            followers.close()
            raise error from None
        except BaseException:
            followers.close()
            raise
        return core

    @property
    def busy(self) -> bool:
        scheduler = self.engine.scheduler
        return bool(scheduler.running or scheduler.waiting or self.engine.flight)

    def handle(self, message: Message) -> list[Message]:
        """Take one message; what there is to answer at once."""
        match message:
            case Add(request):
                try:
                    assert request.id not in self.requests, "request ids are unique while they run"
                    self.requests[request.id] = self.engine.add(request)
                    self._unstarted.add(request.id)
                except RequestError as error:
                    return [Refused(request.id, error.message, error.param, error.code, error.status)]
                self._tell(message)
            case Abort(id, choice):
                self._abort(id, choice)
                self._tell(message)
            case Ask(token):
                return [Measured(token, self.measure())]
        return []

    def step(self) -> list[Message]:
        """One step of the engine; what it gave. LlmxError if another rank has died."""
        began = time.perf_counter()
        self.check()
        if self.followers is not None:
            self.followers.step(tuple(self._untold))
            self._untold.clear()
        try:
            landed = self.engine.step()
        except Lost:
            if self.followers is None:  # this is one of them
                raise
            error = self.followers.blame()
            self.close()
            raise error from None
        except (MemoryError, RuntimeError) as failure:
            if (known := out_of_memory(failure, f"computing {self.engine.computed_last} tokens")) is None:
                raise
            self.close()
            raise known from failure
        self._seconds += time.perf_counter() - began
        if landed is None:
            if self.busy:
                raise RuntimeError("the scheduler stands still")
            return []
        self._count(landed)
        told: list[Message] = []
        broken: list[Sequence] = []
        ended: set[str] = set()
        for item in landed:
            news, sequence = self._is_news(item), item.sequence
            if sequence.finish:
                ended.add(sequence.request.id)
            if sequence.finish == "abort":
                broken.append(sequence)
            elif news:
                told.append(self._told(item))
        told += self._refuse(broken)
        for id in ended:
            self._forget(id)  # after all were told: several choices of a request may finish in one step
        return told

    def _refuse(self, broken: list[Sequence]) -> list[Message]:
        """Ends the whole requests of texts that can't go on: half an answer must not look like one."""
        refused: dict[str, Message] = {}
        for sequence in broken:
            assert sequence.constraint is not None, "nothing else ends a text so"
            said = f"The grammar can't be followed after {sequence.output_len} tokens: {sequence.constraint.broken}."
            refused[sequence.request.id] = Refused(sequence.request.id, said, "grammar")
            self._totals["aborted"] += 1
        for id in refused:
            self._abort(id, None)
        return list(refused.values())

    def check(self) -> None:
        """LlmxError if another rank has died; then the others have ended too."""
        if self.followers is None:
            return
        try:
            self.followers.check()
        except LlmxError:
            self.close()
            raise

    def _tell(self, message: Message) -> None:
        """Let the other ranks take it too, before their next step."""
        if self.followers is not None:
            self._untold.append(message)

    def close(self) -> None:
        if self.followers is not None:
            self.followers.close()

    def measure(self) -> Metrics:
        scheduler = self.engine.scheduler
        pool = scheduler.blocks.pools[0]
        return Metrics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=len(pool.free),
            total_blocks=pool.count - 1,
            preemptions=scheduler.preemptions,
            step_seconds=self._seconds,
            step_sizes=tuple(self._sizes),
            **self._totals,
        )

    def _is_news(self, item: Landed) -> bool:
        """The first part of a prompt is too, though no token comes of it: the request has left the queue."""
        id = item.sequence.request.id
        if id in self._unstarted:
            self._unstarted.remove(id)
            return True
        return bool(item.tokens or item.prompt_logprobs or item.sequence.finish)

    def _told(self, item: Landed) -> Tokens:
        sequence = item.sequence
        first = self.requests[sequence.request.id][0]
        told = Tokens(
            sequence.request.id,
            sequence.sibling,
            tuple(item.tokens),
            first.cached,
            sequence.finish,
            sequence.stopped_by,
            None if item.logprobs is None else tuple(item.logprobs),
            tuple(sorted(item.prompt_logprobs.items())) if item.prompt_logprobs else (),
            first.started,
        )
        if sequence.finish:
            self._totals["finished"] += 1
        return told

    def _abort(self, id: str, choice: int | None) -> None:
        for sequence in self.requests.get(id, ()):
            if choice in (None, sequence.sibling) and sequence.finish is None:
                self.engine.scheduler.abort(sequence)
                self._totals["aborted"] += 1
        self._forget(id)

    def _forget(self, id: str) -> None:
        if id in self.requests and all(s.finish for s in self.requests[id]):
            self._unstarted.discard(id)
            for sequence in self.requests.pop(id):
                self._totals["drafted_tokens"] += sequence.drafted
                self._totals["accepted_tokens"] += sequence.accepted

    def _count(self, landed: Iterable[Landed]) -> None:
        scheduler, totals = self.engine.scheduler, self._totals
        items = list(landed)
        totals["steps"] += 1
        totals["most_running"] = max(totals["most_running"], len(items))
        for item in items:
            sequence = item.sequence
            totals["generated_tokens"] += len(item.tokens)
            if item.tokens and sequence.output_len == len(item.tokens) and sequence.sibling == 0:
                totals["prompt_tokens"] += sequence.prompt_len
                totals["cached_tokens"] += sequence.cached
        totals["computed_tokens"] += self.engine.computed_last
        if self.engine.computed_last:  # with overlap there are steps that only land what the one before launched
            self._sizes[bisect_left(STEP_BOUNDS, self.engine.computed_last)] += 1
        held = scheduler.blocks.pools[0].held * scheduler.blocks.size
        totals["slots_held"] += held
        totals["slots_live"] += held - sum(scheduler.blocks.waste(s) for s in scheduler.running)
