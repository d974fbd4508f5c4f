"""From runs to results: what names figures have, what bounds them, and whose memory is read."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from llmx.bench.ceilings import Ceilings, serving_limit
from llmx.bench.clock import Client
from llmx.bench.datasets import RANDOM, Dataset
from llmx.bench.findings import Findings, Run, compared
from llmx.bench.memory import peak_of_listener
from llmx.bench.plan import CONTINUOUS, SERVER, STATIC, Load, Plan, Point
from llmx.bench.records import Record
from llmx.bench.table import bound_line, comparison_lines, server_bound
from llmx.bench.workload import Span
from llmx.config import Metrics

DATASET = Dataset(RANDOM, Span(2, 5), Span(3, 6))


def run(point: Point, seconds: float, busy: float = 1.0) -> Run:
    """Two requests of two tokens, the second token at `seconds`."""
    records = [Record(4, 2, 0.0, [(seconds / 2, 1), (seconds, 1)], ended=True) for _ in range(2)]
    after = Metrics(steps=2, computed_tokens=10, prompt_tokens=8, slots_held=20, slots_live=10, step_seconds=busy)
    return Run(point, records, Client(), Metrics(), after)


def findings(points: tuple[Point, ...], runs: list[Run], **load: Any) -> Findings:
    return Findings(Plan(0, 0, 1, Load(DATASET, 2, points, **load), seed=0), runs=runs)


def test_rounds_become_means_deviations_and_what_is_unsteady() -> None:
    point = Point(CONTINUOUS, 2)
    serving = findings((point,), [run(point, 1.0), run(point, 3.0)], repeat=2).results()["serving"]
    assert serving["mean_e2el_ms"] == pytest.approx(2000.0)
    assert serving["e2el_ms"]["mean"] == pytest.approx(2000.0)
    assert serving["sd"]["mean_e2el_ms"] == pytest.approx(1000 * 2**0.5)
    assert [one["mean_e2el_ms"] for one in serving["repeats"]] == pytest.approx([1000.0, 3000.0])
    assert "mean_e2el_ms" in serving["unsteady"]
    assert serving["output_throughput"] == pytest.approx((4 / 1 + 4 / 3) / 2)
    steady = findings((point,), [run(point, 1.0), run(point, 1.01)], repeat=2).results()["serving"]
    assert steady["unsteady"] == []
    assert "sd" not in findings((point,), [run(point, 1.0)]).results()["serving"]


def test_contenders_are_compared_round_by_round() -> None:
    ours, static = Point(CONTINUOUS, 2), Point(STATIC, 2)
    runs = [run(ours, 1.0), run(static, 4.0), run(ours, 2.0), run(static, 4.0), run(ours, 1.0), run(static, 10.0)]
    results = findings((ours, static), runs, repeat=3).results()
    assert results["comparison"]["static"]["p99_e2el_lower_by"] == pytest.approx(0.75)  # of 0.75, 0.5, 0.9
    assert results["comparison"]["static"]["output_throughput_ratio"] == pytest.approx(4.0)
    assert "p99 E2E 75.0 % lower, 4.00 times" in comparison_lines(results)[0]
    assert compared({}, {})["p99_e2el_lower_by"] is None


@pytest.mark.parametrize("contender", [CONTINUOUS, SERVER])
def test_names_that_a_gate_can_have_are_known_before_the_run(contender: str) -> None:
    names = findings((Point(contender, 2),), [], slo={"ttft": 5.0}).names()
    assert {"ttft_ms.p99", "serving.ttft_ms.p99", "p99_ttft_ms", "failed", "preemptions", "busy_share"} <= set(names)
    assert {"slo.attainment", "cache_hit_rate", "peak_memory_bytes", "client.loop_lag_ms_p99"} <= set(names)
    assert ("kv_utilisation" in names) is (contender == CONTINUOUS)
    assert ("kv_cache_usage.mean" in names) is (contender == SERVER)


def test_every_figure_of_a_run_was_named_before_it() -> None:
    point = Point(CONTINUOUS, 2)
    before = set(findings((point,), []).names())
    results = findings((point,), [run(point, 1.0)]).results()
    numbers = {key for key, value in results["serving"].items() if isinstance(value, float)}
    assert numbers <= before


def test_serving_is_bounded_by_its_steps_or_its_tokens() -> None:
    ceilings = Ceilings(read=10e9, matmul=100e9, dtype="float32")
    reads = serving_limit(ceilings, 4 * 10**9, 10**9, steps=10, computed=20, tokens=15, reached=3.0)
    assert reads.by == "memory reads"
    assert reads.tokens_per_second == pytest.approx(15 / 4.0)  # 40 GB at 10 GB/s
    assert "serving reads 40 GB of weights in all its steps" in bound_line("serving", reads)
    computes = serving_limit(ceilings, 4 * 10**9, 10**9, steps=10, computed=2000, tokens=15, reached=0.3)
    assert computes.by == "arithmetic"
    assert computes.tokens_per_second == pytest.approx(15 / 40.0)  # 4 TFLOP at 100 GFLOP/s
    assert "an output token, prompts included" in bound_line("serving", computes)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"client": {"client_bound": True}}, "this client"),
        ({"loop": "open", "request_rate": 5.0, "request_throughput": 4.9, "busy_share": 0.5}, "the arrivals"),
        ({"loop": "open", "request_rate": 5.0, "request_throughput": 3.0}, "fewer requests than were due"),
        ({"loop": "open", "request_rate": "inf", "request_throughput": 3.0}, "fewer requests than were due"),
        ({"loop": "closed", "request_rate": "inf", "max_concurrency": 8}, "the server at 8 requests at once"),
    ],
)
def test_what_bounds_a_server_as_seen_from_outside(figures: dict[str, Any], says: str) -> None:
    whole = {"client": {"client_bound": False}, "request_throughput": 1.0} | figures
    assert says in server_bound(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_who_listens_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = peak_of_listener("127.0.0.1", port)
        assert found["peak_memory_bytes"] is not None
        assert found["peak_process_memory_bytes"] is not None
        assert found["peak_memory_bytes"] >= found["peak_process_memory_bytes"] > 2**20
        assert peak_of_listener("192.0.2.1", port) == {}
    assert peak_of_listener("127.0.0.1", port) == {}
