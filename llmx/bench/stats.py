"""Means, deviations and percentiles, and the names that `vllm bench serve` gives them. Pure Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between the two nearest ranks: numpy's default."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
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


def share(part: float, whole: float) -> float | None:
    """part / whole, or None when there is no whole."""
    return part / whole if whole else None
