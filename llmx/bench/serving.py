"""Requests at a fixed concurrency through one `LLM`: a closed loop of asyncio workers that write down what arrives."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmx.bench.records import Record
from llmx.bench.stats import share
from llmx.bench.workload import Job, forced, random_prompt
from llmx.config import Metrics
from llmx.errors import RequestError

if TYPE_CHECKING:
    from llmx.llm import LLM

Tell = Callable[[str], None]


async def _follow(llm: LLM, job: Job, records: list[Record]) -> None:
    """Send one request; write down each arrival as it comes. A request that can't run is a failed one."""
    record = Record(len(job.prompt), job.output_len, time.perf_counter())
    records.append(record)
    try:
        with llm.open(list(job.prompt), forced(job.output_len)) as stream:  # so an interrupt leaves nothing running
            async for delta in stream:
                if delta.token_ids:
                    record.arrivals.append((time.perf_counter(), len(delta.token_ids)))
                if delta.finish_reason == "abort":
                    record.error = "aborted"
    except RequestError as error:
        record.error = error.message
    record.ended = True


async def _worker(llm: LLM, jobs: Iterator[Job], records: list[Record], count: Callable[[], None]) -> None:
    for job in jobs:
        await _follow(llm, job, records)
        count()


async def _loop(llm: LLM, jobs: Sequence[Job], records: list[Record], concurrency: int, tell: Tell) -> None:
    """`concurrency` workers take from one queue of jobs."""
    queue, ended = iter(jobs), itertools.count(1)

    def count() -> None:
        tell(f"serving: {next(ended)} of {len(jobs)} requests done")

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(_worker(llm, queue, records, count))


def serve_jobs(llm: LLM, jobs: Sequence[Job], concurrency: int, records: list[Record], tell: Tell) -> None:
    """Run `jobs`, at most `concurrency` at once, in order. `records` grows as they are sent, so it holds what an
    interrupt leaves. Raises LlmxError when the engine fails."""
    try:
        asyncio.run(_loop(llm, jobs, records, concurrency, tell))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # one engine feeds all workers: the first failure is the others' too


def warm_up(llm: LLM, ids: Sequence[int], jobs: Sequence[Job], concurrency: int, seed: int) -> None:
    """`concurrency` short requests with prompts of their own, so that no timed one pays for a first call."""
    shortest = min(len(job.prompt) for job in jobs)
    small = [Job(random_prompt(ids, shortest, f"warm-up/{seed}/{i}"), 2) for i in range(concurrency)]
    serve_jobs(llm, small, concurrency, [], lambda _: None)


def engine_figures(before: Metrics, after: Metrics, duration: float) -> dict[str, object]:
    """What the engine's counters say about the time between two readings."""
    prompt, cached = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
    held, live = after.slots_held - before.slots_held, after.slots_live - before.slots_live
    return {
        "steps": after.steps - before.steps,
        "computed_tokens": after.computed_tokens - before.computed_tokens,
        "cached_tokens": cached,
        "cached_token_share": share(cached, prompt),
        "kv_utilisation": share(live, held),
        "preemptions": after.preemptions - before.preemptions,
        "busy_share": share(after.step_seconds - before.step_seconds, duration),
        "most_running_since_start": after.most_running,
    }
