"""One bench: its parts in order, and what they found so far, so that an interrupt still leaves a report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmx.bench import rates, serving
from llmx.bench.ceilings import Ceilings, Limit, limit, measure_ceilings, weights_as_computed
from llmx.bench.records import Record, serving_figures
from llmx.bench.stats import repetitions
from llmx.bench.workload import Span, mixed_jobs, vocabulary
from llmx.config import EngineInfo, Metrics
from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.llm import LLM


@dataclass(frozen=True)
class Plan:
    """What to measure. A part of size 0 is left out: `prompt_len` prefill, `gen_len` decode, `requests` serving."""

    prompt_len: int
    gen_len: int
    repeat: int
    concurrency: int
    requests: int
    input_len: Span
    output_len: Span
    seed: int

    @property
    def longest(self) -> int:
        """Most tokens that one of the serving requests can have."""
        return self.input_len.high + self.output_len.high

    def check(self, max_model_len: int) -> None:
        """UsageError for a length that the model's context can't hold."""
        parts = (
            (self.prompt_len, f"-p {self.prompt_len}", self.prompt_len + 1),
            (self.gen_len, f"-n {self.gen_len}", self.gen_len + 2),
            (self.requests, f"--input-len {self.input_len}, --output-len {self.output_len}", self.longest),
        )
        for size, flags, tokens in parts:
            if size and tokens > max_model_len:
                raise UsageError(
                    f"{flags} needs a context of {tokens} tokens; the model runs with {max_model_len}.",
                    hint="Lower the lengths, or raise --max-model-len if the model allows it.",
                )


@dataclass
class Findings:
    """What a bench has measured so far; lists grow while it runs."""

    plan: Plan
    info: EngineInfo
    ceilings: Ceilings | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    before: Metrics | None = None
    after: Metrics | None = None
    interrupted: bool = False

    def results(self) -> dict[str, Any]:
        """The report's `results`: an entry for each part that was asked for."""
        found: dict[str, Any] = {"interrupted": self.interrupted}
        if self.plan.prompt_len:
            found["prefill"] = {"prompt_tokens": self.plan.prompt_len, "tokens_per_second": repetitions(self.prefill)}
        if self.plan.gen_len:
            found["decode"] = {"tokens": self.plan.gen_len, "tokens_per_second": repetitions(self.decode)}
        if self.plan.requests:
            found["serving"] = self._serving()
        if self.ceilings is not None:
            found["ceilings"] = {
                "read_bytes_per_second": self.ceilings.read,
                "matmul_flops_per_second": self.ceilings.matmul,
                "matmul_dtype": self.ceilings.dtype,
            } | {part: one.figures() for part, one in self.limits().items()}
        return found

    def _serving(self) -> dict[str, Any]:
        figures = serving_figures(self.records, self.plan.concurrency)
        figures["num_prompts"] = self.plan.requests
        figures |= {"input_len": str(self.plan.input_len), "output_len": str(self.plan.output_len)}
        if self.before is not None and self.after is not None:
            duration = figures["duration"]
            assert isinstance(duration, float)
            figures |= serving.engine_figures(self.before, self.after, duration)
        return figures

    def limits(self) -> dict[str, Limit]:
        """What the machine would allow, for each part that has a figure."""
        if self.ceilings is None:
            return {}
        weight_bytes, parameters = weights_as_computed(self.info)
        parts = {"prefill": (self.plan.prompt_len, self.prefill), "decode": (1, self.decode)}
        return {
            part: limit(self.ceilings, weight_bytes, parameters, tokens, statistics.fmean(samples))
            for part, (tokens, samples) in parts.items()
            if samples
        }


def prompt_ids(llm: LLM) -> list[int]:
    """What random prompts are made of: the tokenizer's ids without the special ones; with no tokenizer, all ids."""
    tokenizer, size = llm.maybe_tokenizer, llm.info.vocab_size
    return (
        vocabulary(size, ())
        if tokenizer is None
        else vocabulary(min(size, tokenizer.vocab_size), tokenizer.special_ids)
    )


def measure(llm: LLM, found: Findings, tell: Callable[[str], None]) -> None:
    """Run the plan's parts; `found` grows as they go. An interrupt ends it early and is noted there."""
    plan, ids = found.plan, prompt_ids(llm)
    try:
        tell("measuring this machine's read bandwidth and matmul rate")
        found.ceilings = measure_ceilings(found.info.device, found.info.dtype)
        for part, size, run, samples in (
            ("prefill", plan.prompt_len, rates.prefill_rates, found.prefill),
            ("decode", plan.gen_len, rates.decode_rates, found.decode),
        ):
            if size:
                tell(f"{part}: {size} tokens, one warm-up and {plan.repeat} repetitions")
                for rate in run(llm, ids, size, plan.repeat, plan.seed):
                    samples.append(rate)
                    tell(f"{part}: {len(samples)} of {plan.repeat}: {rate:.2f} tokens/s")
        if plan.requests:
            _serve(llm, found, ids, tell)
    except KeyboardInterrupt:
        found.interrupted = True


def _serve(llm: LLM, found: Findings, ids: Sequence[int], tell: Callable[[str], None]) -> None:
    plan = found.plan
    jobs = mixed_jobs(ids, plan.requests, plan.input_len, plan.output_len, plan.seed)
    tell(f"serving: {plan.requests} requests, {plan.concurrency} at once, after a warm-up")
    serving.warm_up(llm, ids, jobs, plan.concurrency, plan.seed)
    found.before = llm.metrics()
    try:
        serving.serve_jobs(llm, jobs, plan.concurrency, found.records, tell)
    finally:
        found.after = llm.metrics()
