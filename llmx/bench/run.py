"""A bench of a model in this process: its parts in order, so that an interrupt still leaves what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmx.bench import rates, serving
from llmx.bench.baseline import Transformers
from llmx.bench.ceilings import measure_ceilings
from llmx.bench.datasets import make_jobs, sized, warm_up_jobs
from llmx.bench.findings import Findings, Run
from llmx.bench.plan import STATIC, TRANSFORMERS, Load, Point
from llmx.bench.workload import Job, vocabulary

if TYPE_CHECKING:
    from llmx.llm import LLM

Tell = Callable[[str], None]


def prompt_ids(llm: LLM) -> list[int]:
    """What random prompts are made of: the tokenizer's ids without the special ones; with no tokenizer, all ids."""
    tokenizer, size = llm.maybe_tokenizer, llm.info.vocab_size
    return (
        vocabulary(size, ())
        if tokenizer is None
        else vocabulary(min(size, tokenizer.vocab_size), tokenizer.special_ids)
    )


def measure(llm: LLM, found: Findings, tell: Tell) -> None:
    """Run the plan's parts; `found` grows as they go. An interrupt ends it early and is noted there."""
    plan, ids = found.plan, prompt_ids(llm)
    try:
        tell("measuring this machine's read bandwidth and matmul rate")
        found.ceilings = measure_ceilings(llm.info.device, llm.info.dtype)
        for part, size, run, samples in (
            ("prefill", plan.prompt_len, rates.prefill_rates, found.prefill),
            ("decode", plan.gen_len, rates.decode_rates, found.decode),
        ):
            if size:
                tell(f"{part}: {size} tokens, one warm-up and {plan.repetitions} repetitions")
                for rate in run(llm, ids, size, plan.repetitions, plan.seed):
                    samples.append(rate)
                    tell(f"{part}: {len(samples)} of {plan.repetitions}: {rate:.2f} tokens/s")
        if plan.load is not None:
            _serve(llm, found, plan.load, ids, tell)
    except KeyboardInterrupt:
        found.interrupted = True


def _serve(llm: LLM, found: Findings, load: Load, ids: Sequence[int], tell: Tell) -> None:
    """Rounds over the points in turn, so that what the machine does meanwhile meets all of them."""
    theirs = None
    if any(point.contender == TRANSFORMERS for point in load.points):
        tell("loading the model in transformers")
        theirs = Transformers(llm.config.model, llm.info.dtype, llm.info.device, load.static_batch)
    dataset = sized(load.dataset, lambda text: len(llm.tokenizer.encode(text, add_special=False, parse_special=False)))
    for turn in range(load.repeat):
        for point in load.points:
            label = point.label(load.is_sweep)
            nonce = "" if load.warm_prefix else f"{label}/{turn}"
            jobs = encoded(llm, make_jobs(dataset, ids, load.requests, found.plan.seed, nonce))
            if turn == 0:
                tell(f"serving ({label}): {load.requests} requests, after a warm-up")
                _warm_up(llm, theirs, load, point, warm_jobs(load, point, jobs, ids, label))
            run = Run(point)
            found.runs.append(run)
            if point.contender == TRANSFORMERS and theirs is not None:
                run.dtype = theirs.dtype
                theirs.serve(jobs, load.traffic(point, found.plan.seed), run.records, tell)
            else:
                serve_point(llm, load, run, jobs, found.plan.seed, tell)


def serve_point(llm: LLM, load: Load, run: Run, jobs: Sequence[Job], seed: int, tell: Tell) -> None:
    """One round of one point by the engine; `run` has what an interrupt leaves."""
    batches = serving.StaticBatches(load.static_batch) if run.point.contender == STATIC else None
    run.before = llm.metrics()
    try:
        serving.serve_jobs(llm, jobs, load.traffic(run.point, seed), run.records, run.client, tell, batches)
    finally:
        run.after = llm.metrics()
        run.memory = serving.peak_memory()


def warm_jobs(load: Load, point: Point, jobs: Sequence[Job], ids: Sequence[int], nonce: str) -> list[Job]:
    """As many short requests as there are at once."""
    count = (point.concurrency or load.static_batch) if load.warm_ups is None else load.warm_ups
    return warm_up_jobs([min(jobs, key=lambda job: job.input_len)], ids, count, nonce)


def _warm_up(llm: LLM, theirs: Transformers | None, load: Load, point: Point, jobs: Sequence[Job]) -> None:
    if not jobs:
        return
    if point.contender == TRANSFORMERS and theirs is not None:
        theirs.serve(jobs, replace(load, rate=None).traffic(point, 0), [], lambda _: None)
    else:
        serving.warm_up(llm, jobs, len(jobs))


def encoded(llm: LLM, jobs: Sequence[Job]) -> list[Job]:
    """Texts and chats as token ids: what the engine takes. UsageError where the model has no tokenizer."""
    return [job if job.input_len else replace(job, prompt=tuple(_ids(llm, job))) for job in jobs]


def _ids(llm: LLM, job: Job) -> list[int]:
    if isinstance(job.prompt, str):
        return llm.tokenizer.encode(job.prompt)
    messages = [message for message in job.prompt if isinstance(message, Mapping)]
    if llm.tokenizer.template is None:
        return llm.tokenizer.encode("\n\n".join(message["content"] for message in messages))
    return llm.render(messages)
