"""The bench's parts in order, on a stand-in for the engine that can be interrupted where a test wants it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmx.bench import run
from llmx.bench.ceilings import Ceilings, limit
from llmx.bench.datasets import RANDOM, Dataset
from llmx.bench.findings import Findings
from llmx.bench.plan import CONTINUOUS, Load, Plan, Point
from llmx.bench.run import measure
from llmx.bench.table import bound_line, serving_lines
from llmx.bench.workload import Span
from llmx.config import EngineInfo, Metrics
from llmx.core import Delta, SamplingParams
from llmx.errors import LlmxError, RequestError, UsageError

LOAD = Load(Dataset(RANDOM, Span(2, 5), Span(3, 6)), requests=6, points=(Point(CONTINUOUS, 2),))
PLAN = Plan(8, 4, 3, LOAD, seed=1)
INFO = EngineInfo(
    **dict.fromkeys(EngineInfo.__dataclass_fields__, 1)
    | {
        "model": "stand-in",
        "device": "cpu",
        "dtype": "float32",
        "parameters": 1000,
        "pass_bytes": 4000,
        "max_model_len": 64,
    }
)


@dataclass
class StandInStream:
    llm: StandIn
    count: int
    left: bool = False
    cached_tokens: int = 0

    def deltas(self) -> Iterator[Delta]:
        for i in range(self.count):
            self.llm.emitted += 1
            if self.llm.emitted == self.llm.interrupt_at:
                signal.raise_signal(signal.SIGINT)
            if self.llm.emitted == self.llm.break_at:
                raise LlmxError("The engine stopped.")
            yield Delta(0, "x", (7,), "length" if i + 1 == self.count else None)

    def __iter__(self) -> Iterator[Delta]:
        return self.deltas()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        self.llm.running += 1
        self.llm.most = max(self.llm.most, self.llm.running)
        try:
            for delta in self.deltas():
                await asyncio.sleep(0)
                yield delta
        finally:
            self.llm.running -= 1

    def __enter__(self) -> StandInStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True


@dataclass
class StandIn:
    """Gives as many tokens as asked for; raises at the token with a chosen number."""

    interrupt_at: int = 0
    break_at: int = 0
    refuse: int = 0  # prompts of this length can't run
    emitted: int = 0
    running: int = 0
    most: int = 0
    info: EngineInfo = INFO
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    salts: list[bytes] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    streams: list[StandInStream] = field(default_factory=list)
    maybe_tokenizer: Any = field(default_factory=lambda: SimpleNamespace(special_ids=frozenset({0}), vocab_size=90))

    def __post_init__(self) -> None:
        self.info = replace(INFO, vocab_size=100)

    def metrics(self) -> Metrics:
        return Metrics(generated_tokens=self.emitted, step_seconds=0.0)

    def open(self, prompt: Sequence[int], params: SamplingParams, *, salt: bytes = b"") -> StandInStream:
        if len(prompt) == self.refuse:
            raise RequestError("That one can't run.")
        self.prompts.append(tuple(prompt))
        self.salts.append(salt)
        self.params.append(params)
        assert params.max_tokens is not None
        self.streams.append(StandInStream(self, params.max_tokens))
        return self.streams[-1]


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_ceilings", lambda device, dtype: Ceilings(10e9, 100e9, "float32"))


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C as a program that was just started has it; test runners may have changed it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def findings(llm: StandIn, plan: Plan = PLAN) -> Findings:
    found = Findings(plan, llm.info)
    measure(cast(Any, llm), found, lambda _: None)
    return found


def test_each_part_runs_its_warm_up_and_its_repetitions_on_new_prompts() -> None:
    llm = StandIn()
    results = findings(llm).results()
    assert len(results["prefill"]["tokens_per_second"]["samples"]) == 3
    assert len(results["decode"]["tokens_per_second"]["samples"]) == 3
    assert [len(prompt) for prompt in llm.prompts[:8]] == [8] * 4 + [1] * 4
    assert [params.max_tokens for params in llm.params[:8]] == [1] * 4 + [5] * 4
    assert len(set(llm.prompts[:4])) == 4
    assert all(params.ignore_eos and params.temperature == 0 for params in llm.params)
    assert {token for prompt in llm.prompts for token in prompt} <= set(range(1, 90))  # 0 is special; 100 are padded


def test_serving_keeps_the_asked_concurrency_and_loses_no_request() -> None:
    llm = StandIn()
    results = findings(llm).results()
    assert llm.most == 2
    assert results["serving"]["completed"] == 6
    assert results["serving"]["failed"] == 0
    assert results["serving"]["total_output_tokens"] == sum(p.max_tokens or 0 for p in llm.params[-6:])
    assert results["serving"]["total_input_tokens"] == sum(len(prompt) for prompt in llm.prompts[-6:])


def test_parts_of_size_zero_are_left_out() -> None:
    llm = StandIn()
    results = findings(llm, replace(PLAN, prompt_len=0, load=None)).results()
    assert set(results) == {"interrupted", "decode", "ceilings"}
    assert {len(prompt) for prompt in llm.prompts} == {1}


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_keeps_the_repetitions_done_and_skips_the_rest() -> None:
    found = findings(StandIn(interrupt_at=3))  # the warm-up and one repetition of prefill are done
    results = found.results()
    assert found.interrupted
    assert results["interrupted"] is True
    assert len(results["prefill"]["tokens_per_second"]["samples"]) == 1
    assert results["decode"]["tokens_per_second"] == {"mean": None, "sd": None, "samples": []}
    assert results["serving"]["completed"] == 0


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_while_serving_keeps_the_requests_that_were_done() -> None:
    whole = StandIn()
    findings(whole)
    llm = StandIn(interrupt_at=whole.emitted - 1)
    found = findings(llm)
    results = found.results()
    assert found.interrupted
    assert 0 < results["serving"]["completed"] < 6
    assert results["serving"]["failed"] == 0
    assert llm.running == 0
    assert all(stream.left for stream in llm.streams[-6:])


def test_a_refused_request_is_a_failed_one_and_the_others_go_on() -> None:
    llm = StandIn()
    findings(llm)
    refused = len(llm.prompts[-1])
    plan = replace(PLAN, prompt_len=0, gen_len=0)
    again = findings(StandIn(refuse=refused), plan).results()["serving"]
    assert again["failed"] > 0
    assert again["completed"] + again["failed"] == 6
    assert again["errors"][0].startswith("That one can't run.")


def test_a_broken_engine_ends_the_bench_with_its_own_error() -> None:
    with pytest.raises(LlmxError, match="The engine stopped"):
        findings(StandIn(break_at=30))


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        (replace(PLAN, prompt_len=64), "-p 64"),
        (replace(PLAN, gen_len=63), "-n 63"),
        (replace(PLAN, load=replace(LOAD, dataset=Dataset(RANDOM, Span(2, 60), Span(3, 6)))), "--input-len 2:60"),
    ],
)
def test_lengths_beyond_the_context_are_refused_with_the_numbers(plan: Plan, flag: str) -> None:
    with pytest.raises(UsageError, match=rf"{flag}.* needs a context of 6\d tokens; the model runs with 64"):
        plan.check(64)
    replace(plan, prompt_len=0, gen_len=0, load=None).check(64)


@pytest.mark.parametrize(
    ("reached", "verdict"),
    [(2.0, "memory reads bound it"), (0.5, "attention, sampling"), (9.0, "caches")],
)
def test_the_closing_line_says_what_bounds_a_rate(reached: float, verdict: str) -> None:
    line = bound_line("decode", limit(Ceilings(10e9, 100e9, "float32"), 4 * 10**9, 10**9, 1, reached))
    assert line.startswith("decode reads 4 GB of weights a token: 10 GB/s, measured here, allow 2.5 tokens/s")
    assert verdict in line


def test_a_warm_cache_is_pointed_out() -> None:
    figures = findings(StandIn()).results()["serving"]
    assert not any("prefix cache" in line for line in serving_lines(figures))
    assert any("prefix cache" in line for line in serving_lines(figures | {"cache_hit_rate": 0.4}))
