"""Requests through one `LLM` in this process: continuous batching, or static batches of the same engine."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.bench import clock
from llmx.bench.clock import Client
from llmx.bench.drive import Send, Tell, Traffic, drive
from llmx.bench.records import Record
from llmx.bench.stats import share
from llmx.bench.workload import Job, forced
from llmx.config import Metrics
from llmx.errors import RequestError

if TYPE_CHECKING:
    from llmx.llm import LLM


class StaticBatches:
    """First come, first served: a batch begins at once with whatever waits, at most `size`, and nobody joins it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = 0

    async def enter(self) -> None:
        """Returns when the batch of the caller begins."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        loop.call_soon(self._begin)  # after all that arrive at the same moment
        await turn

    def leave(self) -> None:
        self._left -= 1
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        while self._left == 0 and self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]
            alive = [turn for turn in batch if not turn.done()]
            self._left = len(alive)
            for turn in alive:
                turn.set_result(None)


def sender(llm: LLM, batches: StaticBatches | None = None) -> Send:
    """Sends one request to the engine and writes down each arrival as it comes. A request that can't run is a failed
    one. Times count from when it was due: what waits for a batch, or for the client's bound, waits."""

    async def send(job: Job, record: Record) -> None:
        record.sent = record.sent if record.due is None else record.due
        if batches is not None:
            await batches.enter()
        try:
            await _follow(llm, job, record)
        except RequestError as error:
            record.error = error.message
        finally:
            if batches is not None:
                batches.leave()
        record.ended = True

    return send


async def _follow(llm: LLM, job: Job, record: Record) -> None:
    assert isinstance(job.prompt, tuple), "texts were encoded before"
    with llm.open(job.prompt, forced(job.output_len, job.exact), salt=job.salt.encode()) as stream:  # type: ignore[arg-type]
        async for delta in stream:
            if delta.token_ids:
                record.arrivals.append((time.perf_counter(), len(delta.token_ids)))
            if delta.finish_reason == "abort":
                record.error = "aborted"
        record.cached = stream.cached_tokens
    record.strict = job.exact


def serve_jobs(
    llm: LLM, jobs: Sequence[Job], traffic: Traffic, records: list[Record], client: Client, tell: Tell,
    batches: StaticBatches | None = None,
) -> None:  # fmt: skip
    """Run `jobs`. `records` grows as they are sent, so it holds what an interrupt leaves. LlmxError when the engine
    fails."""
    clock.run(lambda: drive(sender(llm, batches), jobs, traffic, records, client, tell))


def warm_up(llm: LLM, jobs: Sequence[Job], concurrency: int) -> None:
    """So that no timed request pays for a first call."""
    serve_jobs(llm, jobs, Traffic(concurrency), [], Client(), lambda _: None)


def engine_figures(before: Metrics, after: Metrics, duration: float) -> dict[str, object]:
    """What the engine's counters say about the time between two readings."""
    prompt, cached = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
    held, live = after.slots_held - before.slots_held, after.slots_live - before.slots_live
    figures: dict[str, object] = {
        "steps": after.steps - before.steps,
        "computed_tokens": after.computed_tokens - before.computed_tokens,
        "cached_tokens": cached,
        "cache_hit_rate": share(cached, prompt),
        "kv_utilisation": share(live, held),
        "preemptions": after.preemptions - before.preemptions,
        "busy_share": share(after.step_seconds - before.step_seconds, duration),
        "most_running_since_start": after.most_running,
    }
    if drafted := after.drafted_tokens - before.drafted_tokens:
        accepted = after.accepted_tokens - before.accepted_tokens
        figures |= {"spec_decode_draft_tokens": drafted, "spec_decode_accepted_tokens": accepted}
        figures["spec_decode_acceptance_rate"] = 100 * accepted / drafted
    return figures


def peak_memory() -> dict[str, int | None]:
    """Most bytes that this process, the engine in it, has held since its start, and that torch has held on CUDA."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        peak = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return {
        "peak_memory_bytes": peak,
        "peak_device_memory_bytes": torch.cuda.max_memory_allocated() if torch is not None and cuda else None,
    }
