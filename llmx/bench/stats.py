"""Means, deviations and percentiles, and the names that `vllm bench serve` gives them. Pure Python."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between the two nearest ranks: numpy's default."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    if rank == low or ordered[low] == ordered[high]:  # also between two infinities
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def repetitions(samples: Sequence[float]) -> dict[str, object]:
    """{mean, sd, samples} over repetitions, as llama-bench: sd is the sample's (n - 1); None where it is undefined."""
    return {
        "mean": statistics.fmean(samples) if samples else None,
        "sd": statistics.stdev(samples) if len(samples) > 1 else None,
        "samples": list(samples),
    }


def latencies(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """{"mean_ttft_ms": ...}: mean, median, std (of the population), percentiles, in milliseconds; None without data."""
    ms = [1e3 * s for s in seconds]
    figures: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(ms) if ms else None,
        f"median_{name}_ms": statistics.median(ms) if ms else None,
        f"std_{name}_ms": statistics.pstdev(ms) if ms else None,
    }
    for q in PERCENTILES:
        figures[f"p{q}_{name}_ms"] = percentile(ms, q) if ms else None
    return figures


def adjusted(seconds: Sequence[float], failures: int, q: float) -> float | None:
    """The q-th percentile in milliseconds where each failure took for ever: dropping slow requests makes none faster.

    None where there was neither."""
    if not seconds and not failures:
        return None
    return 1e3 * percentile([*seconds, *[math.inf] * failures], q)


def nested(figures: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """{"p99_ttft_ms": 5} as {"ttft_ms": {"p99": 5}}: the same figures by paths, as gates name them."""
    found: dict[str, dict[str, object]] = {}
    for key, value in figures.items():
        if match := re.fullmatch(r"(mean|median|std|p\d+|adj_p\d+)_(\w+_ms)", key):
            found.setdefault(match[2], {})[match[1]] = value
    return found


def spread(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(means, deviations) over whole runs of each figure, nested as the figures are. What is no number is the first's.

    A deviation is the sample's (n - 1); figures that a run lacks have none."""
    means: dict[str, Any] = {}
    deviations: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run.get(key) for run in runs]
        if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
            means[key], inner = spread(cast(list[Mapping[str, Any]], values))
            if inner:
                deviations[key] = inner
        elif all(_is_number(value) for value in values):
            mean = statistics.fmean(cast(list[float], values))
            whole = all(isinstance(value, int) for value in values) and mean == int(mean)
            means[key] = int(mean) if whole else mean
            if len(values) > 1 and math.isfinite(mean):
                deviations[key] = statistics.stdev(cast(list[float], values))
        else:
            means[key] = next((value for value in values if value is not None), None)
    return means, deviations


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def share(part: float, whole: float) -> float | None:
    """part / whole, or None when there is no whole."""
    return part / whole if whole else None
