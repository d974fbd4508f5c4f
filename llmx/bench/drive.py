"""Who is sent when: a closed loop of workers, or an open loop that knows its times beforehand. Sends anything."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from llmx.bench.clock import Client, until, watch
from llmx.bench.records import Record
from llmx.bench.workload import Job

MOST_LINES = 100  # of progress; to write them takes the client's time
Tell = Callable[[str], None]
Send = Callable[[Job, Record], Awaitable[None]]


@dataclass(frozen=True)
class Traffic:
    """`offsets` None: a closed loop, the next is sent when one ends. Else when each is due, in seconds after the start.

    `concurrency`: most in flight; None: no bound. In an open loop the client holds back what is beyond it.
    """

    concurrency: int | None
    offsets: tuple[float, ...] | None = None


async def drive(
    send: Send, jobs: Sequence[Job], traffic: Traffic, records: list[Record], client: Client, tell: Tell,
    start: float | None = None,
) -> None:  # fmt: skip
    """Send all `jobs`; `records` grows as they go, in order, so it holds what an interrupt leaves.

    start: time.perf_counter() of offset 0; None: now. The first failure that is not of one request is raised."""
    ended = itertools.count(1)

    async def one(job: Job, record: Record) -> None:
        await send(job, record)
        done = next(ended)
        if done % max(1, len(jobs) // MOST_LINES) == 0 or done == len(jobs):
            tell(f"serving: {done} of {len(jobs)} requests done")

    beat = asyncio.create_task(watch(client))
    try:
        if traffic.offsets is None:
            await _closed(one, jobs, traffic.concurrency or len(jobs), records)
        else:
            await _open(one, jobs, traffic, records, client, time.perf_counter() if start is None else start)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # one engine feeds all: the first failure is the others' too
    finally:
        beat.cancel()


async def _closed(one: Send, jobs: Sequence[Job], concurrency: int, records: list[Record]) -> None:
    """`concurrency` workers take from one queue of jobs."""

    async def worker(queue: Iterator[Job]) -> None:
        for job in queue:
            record = Record(job.input_len or job.prompt_len or 0, job.output_len, time.perf_counter())
            records.append(record)
            await one(job, record)

    queue = iter(jobs)
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker(queue))


async def _open(
    one: Send, jobs: Sequence[Job], traffic: Traffic, records: list[Record], client: Client, start: float
) -> None:  # fmt: skip
    """Each at its time. What the bound holds back is the client's queue, in order of arrival."""
    assert traffic.offsets is not None
    bound = asyncio.Semaphore(traffic.concurrency) if traffic.concurrency else None

    async def task(job: Job, record: Record, due: float) -> None:
        client.delays.append(time.perf_counter() - due)
        async with AsyncExitStack() as stack:
            if bound is not None:
                await stack.enter_async_context(bound)
            record.sent = time.perf_counter()
            await one(job, record)

    async with asyncio.TaskGroup() as group:
        for job, offset in zip(jobs, traffic.offsets, strict=True):
            due = start + offset
            await until(due)
            record = Record(job.input_len or job.prompt_len or 0, job.output_len, due, due=due)
            records.append(record)
            group.create_task(task(job, record, due))
