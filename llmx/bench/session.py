"""The measured requests against a server, from one process or several; answers are parsed when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from llmx.bench import clock
from llmx.bench.clock import Client
from llmx.bench.drive import Tell, Traffic, drive
from llmx.bench.http import Exchange
from llmx.bench.records import Record
from llmx.bench.remote import Server, parse_metrics, send
from llmx.bench.sse import RETOKENIZED, fill
from llmx.bench.workload import Job

GAUGE_SECONDS = 1.0
AHEAD_SECONDS = 0.05  # from the word to all processes to the first request
MOST_WARM = 64  # connections opened ahead where no bound says how many it takes
PATIENCE = 30.0  # for processes to hand over what they have after an interrupt


@dataclass
class Session:
    """What the requests gave. `gauges`: shares of the KV cache in use, sampled."""

    records: list[Record] = field(default_factory=list)
    client: Client = field(default_factory=Client)
    gauges: list[float] = field(default_factory=list)
    interrupted: bool = False


def serve(server: Server, jobs: Sequence[Job], traffic: Traffic, procs: int, tell: Tell, gauges: bool) -> Session:
    """Send all jobs; what an interrupt leaves is in the session too."""
    procs = min(procs, len(jobs), traffic.concurrency or len(jobs))
    if procs > 1:
        return _together(server, jobs, traffic, procs, tell, gauges)
    session = Session()
    _run(server, jobs, traffic, session, tell, gauges, None)
    return session


def _run(
    server: Server, jobs: Sequence[Job], traffic: Traffic, session: Session, tell: Tell, gauges: bool,
    start: Connection | None,
) -> None:  # fmt: skip
    """`start`: where to say that all is ready, and to hear when the first request is due."""
    exchanges: list[tuple[Record, Exchange]] = []
    samples: list[Exchange] = []

    async def all_of_them() -> None:
        pool = server.pool()
        requests = {id(job): server.request(pool, job) for job in jobs}  # encoded before the clock runs
        try:
            await pool.warm(min(traffic.concurrency or MOST_WARM, len(jobs)))
            sampling = asyncio.create_task(_sample(server, samples)) if gauges else None

            async def one(job: Job, record: Record) -> None:
                exchange = Exchange()
                exchanges.append((record, exchange))
                await send(pool, requests[id(job)], record, exchange)

            begin = None if start is None else _agree(start)
            try:
                await drive(one, jobs, traffic, session.records, session.client, tell, begin)
            finally:
                if sampling is not None:
                    sampling.cancel()
        finally:
            pool.close()

    try:
        with _no_collection():
            clock.run(all_of_them)
    except KeyboardInterrupt:
        session.interrupted = True
    for record, exchange in exchanges:
        fill(record, exchange, server.dialect.source != RETOKENIZED)
    for exchange in samples:
        found = parse_metrics(exchange.body.decode(errors="replace")) or {}
        if "kv_cache_usage_perc" in found:
            session.gauges.append(found["kv_cache_usage_perc"])


@contextmanager
def _no_collection() -> Iterator[None]:
    """A pass of the garbage collector holds the loop up for as long as a token takes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _sample(server: Server, samples: list[Exchange]) -> None:
    """Reads /metrics once a second, on a connection of its own."""
    pool = server.pool()
    request = pool.encode("GET", "/metrics", None)
    try:
        while True:
            await asyncio.sleep(GAUGE_SECONDS)
            samples.append(Exchange())
            await pool.ask(request, samples[-1])
    finally:
        pool.close()


def _agree(start: Connection) -> float:
    start.send("ready")
    begin: float = start.recv()
    return begin


def _together(
    server: Server, jobs: Sequence[Job], traffic: Traffic, procs: int, tell: Tell, gauges: bool
) -> Session:  # fmt: skip
    """Every `procs`-th job to each process. On Linux and macOS their clocks (CLOCK_MONOTONIC) are one."""
    context = multiprocessing.get_context("spawn")
    session, running = Session(), list[tuple[BaseProcess, Connection]]()
    tell(f"serving: {len(jobs)} requests by {procs} client processes")
    try:
        for rank in range(procs):
            ours, theirs = context.Pipe()
            part = (server, jobs[rank::procs], _part(traffic, rank, procs), gauges and rank == 0)
            process: BaseProcess = context.Process(target=_process, args=(theirs, *part), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        with contextlib.suppress(EOFError):  # one that died is found below
            for _, pipe in running:
                pipe.recv()
        begin = time.perf_counter() + AHEAD_SECONDS
        for _, pipe in running:
            with contextlib.suppress(OSError):
                pipe.send(begin)
        _collect(session, running)
    finally:
        for process, pipe in running:
            process.kill()
            process.join()
            pipe.close()
    session.records.sort(key=lambda record: record.sent if record.due is None else record.due)
    return session


def _collect(session: Session, running: Sequence[tuple[BaseProcess, Connection]]) -> None:
    """What each process has, also after an interrupt, of which all of them are told."""
    for _, pipe in running:
        while True:
            try:
                # After an interrupt a process that hangs is left alone; before it, requests take as long as they take.
                part = pipe.recv() if not session.interrupted or pipe.poll(PATIENCE) else None
                break
            except KeyboardInterrupt:
                session.interrupted = True
                for process, _ in running:
                    if process.pid is not None and process.is_alive():
                        os.kill(process.pid, signal.SIGINT)
            except EOFError:
                part = None
                break
        if isinstance(part, Exception):
            raise part
        if isinstance(part, Session):
            session.records += part.records
            session.client.add(part.client)
            session.gauges += part.gauges
            session.interrupted = session.interrupted or part.interrupted


def _part(traffic: Traffic, rank: int, procs: int) -> Traffic:
    bound = traffic.concurrency
    return Traffic(
        None if bound is None else bound // procs + (rank < bound % procs),
        None if traffic.offsets is None else traffic.offsets[rank::procs],
    )


def _process(pipe: Connection, server: Server, jobs: Sequence[Job], traffic: Traffic, gauges: bool) -> None:
    """A client process: its result, or the error that ended it, goes back."""
    session = Session()
    result: Any = session
    try:
        _run(server, jobs, traffic, session, lambda _: None, gauges, pipe)
    except KeyboardInterrupt:  # before the loop, or after it
        session.interrupted = True
    except Exception as error:
        result = error
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # nobody listens any more
        pipe.send(result)
