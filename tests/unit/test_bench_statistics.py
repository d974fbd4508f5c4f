"""Statistics of the bench, against numpy and the statistics module, and on cases worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmx.bench.stats import PERCENTILES, latencies, percentile, repetitions, share


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0, 1, 50, 90, 95, 99, 100])
def test_percentiles_are_numpys(count: int, q: int) -> None:
    values = [random.Random(count).gauss(5, 2) for _ in range(count)]
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-12)


def test_latencies_have_vllms_names_in_milliseconds() -> None:
    seconds = [0.010, 0.020, 0.060]
    figures = latencies("ttft", seconds)
    assert figures["mean_ttft_ms"] == pytest.approx(30.0)
    assert figures["median_ttft_ms"] == pytest.approx(20.0)
    assert figures["std_ttft_ms"] == pytest.approx(float(np.std(seconds)) * 1e3)
    assert figures["p99_ttft_ms"] == pytest.approx(float(np.percentile(seconds, 99)) * 1e3)
    assert set(figures) == {"mean_ttft_ms", "median_ttft_ms", "std_ttft_ms"} | {f"p{q}_ttft_ms" for q in PERCENTILES}


def test_without_data_a_figure_is_absent_and_not_zero() -> None:
    assert set(latencies("tpot", []).values()) == {None}
    assert share(1, 0) is None


def test_the_deviation_over_repetitions_is_that_of_a_sample() -> None:
    figures = repetitions([1.0, 2.0, 6.0])
    assert figures["mean"] == pytest.approx(3.0)
    assert figures["sd"] == pytest.approx(float(np.std([1.0, 2.0, 6.0], ddof=1)))
    assert figures["samples"] == [1.0, 2.0, 6.0]
    assert repetitions([4.0])["sd"] is None
    assert repetitions([]) == {"mean": None, "sd": None, "samples": []}
