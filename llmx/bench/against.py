"""A bench of a server behind a URL."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from llmx.bench.datasets import WORDS, make_jobs, sized, warm_up_jobs
from llmx.bench.drive import Traffic
from llmx.bench.findings import Findings, Run
from llmx.bench.memory import peak_of_listener
from llmx.bench.plan import Load, Point
from llmx.bench.remote import Server, Setup, prepare
from llmx.bench.session import serve
from llmx.bench.workload import Job

Tell = Callable[[str], None]


def measure_server(server: Server, found: Findings, nonce: str, tell: Tell) -> None:
    """Run the plan's load; `found` grows. An interrupt ends it early and is noted there. LlmxError where the server
    can't be reached.

    nonce: new for each bench, so that no prompt, nor salt, is one that the server may have seen."""
    load = found.plan.load
    assert load is not None, "there is nothing else to measure"
    setup, recount = Setup(server), found.recount
    if recount is not None:
        load = replace(load, dataset=sized(load.dataset, recount.tokens))
    try:
        ids = setup.random_ids(found.plan.seed) if load.dataset.of_ids else []
        for turn in range(load.repeat):
            for point in load.points:
                _point(setup, found, load, point, ids, "" if load.warm_prefix else f"{nonce}/{turn}", turn == 0, tell)
                if found.interrupted:
                    return
    except KeyboardInterrupt:
        found.interrupted = True


def _point(
    setup: Setup, found: Findings, load: Load, point: Point, ids: Sequence[int], nonce: str, first: bool, tell: Tell
) -> None:  # fmt: skip
    server, label = setup.server, point.label(load.is_sweep)
    fresh = nonce and f"{nonce}/{label}"
    jobs = _jobs(setup, load, ids, found.plan.seed, fresh)
    if found.recount is not None:
        jobs = [found.recount.prompt(job) for job in jobs]
    if first and (count := load.warm_up_count(point)):
        tell(f"serving ({label}): {count} requests to warm up")
        like = warm_up_jobs(jobs, ids if jobs[0].input_len else [], count, fresh or "warm")
        warm = serve(server, like, Traffic(point.concurrency or count), 1, lambda _: None, False)
        if warm.interrupted:
            raise KeyboardInterrupt
    run = Run(point, before=setup.metrics(), token_source=server.dialect.source)
    found.runs.append(run)
    traffic = load.traffic(point, found.plan.seed)
    session = serve(server, jobs, traffic, load.procs, tell, run.before is not None)
    run.records, run.client, run.gauges = session.records, session.client, session.gauges
    if found.recount is not None:
        found.recount.outputs(run.records, server.dialect.source)
    found.interrupted = session.interrupted
    run.after = setup.metrics()
    address = urlsplit(server.root)
    run.memory = peak_of_listener(address.hostname or "", address.port or 0)


def _jobs(setup: Setup, load: Load, ids: Sequence[int], seed: int, nonce: str) -> list[Job]:
    """As the endpoint takes them. Where the server won't tokenize, a random prompt has a word for each token, and the
    length is what its usage says."""
    dataset = load.dataset
    jobs = make_jobs(dataset, ids or range(len(WORDS)), load.requests, seed, nonce)
    if dataset.of_ids and not ids:
        jobs = [replace(job, prompt=_words(job)) for job in jobs]
    return [prepare(job, setup.server, setup) for job in jobs]


def _words(job: Job) -> str:
    assert isinstance(job.prompt, tuple)
    return " ".join(WORDS[i] if isinstance(i, int) else "" for i in job.prompt)


def fresh_nonce() -> str:
    """Of no seed: two benches never send the same prompts, unless they are to."""
    return f"{random.SystemRandom().getrandbits(64):016x}"
