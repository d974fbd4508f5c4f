"""The serving figures, on requests whose times are written down by hand."""

from __future__ import annotations

import pytest

from llmx.bench.definitions import DEFINITIONS
from llmx.bench.records import Record, serving_figures, steady
from llmx.bench.serving import engine_figures
from llmx.config import Metrics


def request(sent: float, *arrivals: tuple[float, int], input_len: int = 10, wanted: int | None = None) -> Record:
    tokens = sum(n for _, n in arrivals)
    return Record(input_len, tokens if wanted is None else wanted, sent, list(arrivals), ended=True)


def test_times_of_one_request_follow_their_definitions() -> None:
    record = request(1.0, (1.5, 1), (1.6, 1), (2.0, 2))
    assert record.ttft == pytest.approx(0.5)
    assert record.e2el == pytest.approx(1.0)
    assert record.tpot == pytest.approx(0.5 / 3)  # by tokens, not by deltas
    assert record.token_gaps == pytest.approx([0.1, 0.2, 0.2])
    assert [gap for gap, _ in record.chunk_gaps] == pytest.approx([0.1, 0.4])


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    figures = serving_figures([request(0.0, (1.0, 1)), request(0.0, (1.0, 1), (1.2, 1))], 2)
    assert figures["mean_tpot_ms"] == pytest.approx(200.0)
    assert figures["completed"] == 2


def test_throughput_counts_completed_requests_over_the_whole_run() -> None:
    records = [request(0.0, (1.0, 1), (2.0, 3)), request(1.0, (3.0, 1), (5.0, 5), input_len=20)]
    figures = serving_figures(records, 2)
    assert figures["duration"] == pytest.approx(5.0)
    assert figures["output_throughput"] == pytest.approx(10 / 5)
    assert figures["total_token_throughput"] == pytest.approx(40 / 5)
    assert figures["request_throughput"] == pytest.approx(2 / 5)
    assert figures["concurrency_mean"] == pytest.approx((2 + 4) / 5)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 10)


def test_a_request_that_stops_early_or_breaks_is_failed_and_in_no_latency() -> None:
    short = request(0.0, (9.0, 1), wanted=4)
    broken = Record(10, 4, 0.0, [(8.0, 1)], ended=True, error="The engine said no.")
    figures = serving_figures([short, broken, request(0.0, (0.1, 1), (0.2, 1))], 3)
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert figures["p99_ttft_ms"] == pytest.approx(100.0)
    assert sorted(figures["errors"]) == ["The engine said no.", "wrong number of tokens (of 4)"]


def test_what_an_interrupt_cut_off_is_neither_completed_nor_failed() -> None:
    running = Record(10, 4, 0.0, [(0.5, 1)])
    waiting = Record(10, 4, 0.2)
    figures = serving_figures([request(0.0, (0.1, 1), (0.2, 1)), running, waiting], 3)
    assert (figures["num_prompts"], figures["completed"], figures["failed"]) == (3, 1, 0)


def test_nothing_done_gives_nulls_and_no_division_by_zero() -> None:
    figures = serving_figures([], 8)
    assert figures["output_throughput"] is None
    assert figures["mean_ttft_ms"] is None


def test_the_steady_window_ends_when_no_request_takes_a_free_place() -> None:
    # two at once: A 0..4, B 0..2, C 2..6: from 4 on C is alone
    a = request(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    b = request(0.0, (1.0, 1), (2.0, 1))
    c = request(2.0, (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 1))
    window = steady([a, b, c], 2)
    assert window["seconds"] == pytest.approx(4.0)
    assert window["output_throughput"] == pytest.approx(8 / 4)
    assert steady([a], 2)["seconds"] is None


def test_engine_figures_are_differences_of_counters() -> None:
    before = Metrics(steps=10, prompt_tokens=100, cached_tokens=50, slots_held=1000, slots_live=10, step_seconds=1.0)
    after = Metrics(
        steps=30, prompt_tokens=300, cached_tokens=60, slots_held=3000, slots_live=1910, step_seconds=2.5, preemptions=4
    )
    figures = engine_figures(before, after, duration=2.0)
    assert figures["steps"] == 20
    assert figures["cache_hit_rate"] == pytest.approx(0.05)
    assert figures["kv_utilisation"] == pytest.approx(0.95)
    assert figures["busy_share"] == pytest.approx(0.75)
    assert figures["preemptions"] == 4
    assert engine_figures(before, before, 0.0)["kv_utilisation"] is None


def test_every_latency_and_throughput_figure_is_defined() -> None:
    figures = serving_figures([request(0.0, (0.1, 1), (0.2, 1))], 1)
    measured = {name.removesuffix("_ms").split("_", 1)[1] for name in figures if name.endswith("_ms")}
    measured = {"adj_p99" if name.startswith("p99_") else name for name in measured}
    measured |= {name for name in figures if name.endswith("_throughput")}
    assert measured == {"ttft", "tpot", "itl", "icl", "e2el", "adj_p99"} | {
        "request_throughput",
        "output_throughput",
        "total_token_throughput",
    }
    assert measured <= set(DEFINITIONS)
