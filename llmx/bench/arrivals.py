"""When requests arrive in an open loop: fixed before the run, whatever becomes of the requests."""

from __future__ import annotations

import itertools
import math
import random

from llmx.errors import UsageError

PROCESSES = ("poisson", "gamma", "constant")


def parse_rate(text: str) -> float:
    """Requests per second, or `inf`: all at once. UsageError for anything else."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise UsageError(f"--request-rate must be a number above 0, or inf, not {text!r}.")
    return rate


def offsets(count: int, rate: float, process: str, burstiness: float, seed: int) -> tuple[float, ...]:
    """Seconds after the start at which each of `count` requests arrives, ascending; the last at count / rate.

    Gaps are constant, or drawn from a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less comes in bursts, more is more regular. Scaled, as `vllm bench serve` does, so that the rate is met.
    """
    if math.isinf(rate):
        return (0.0,) * count
    if process == "constant":
        return tuple((i + 1) / rate for i in range(count))
    shape = 1.0 if process == "poisson" else burstiness
    rng = random.Random(f"arrivals/{seed}")
    sums = list(itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)))
    scale = count / rate / sums[-1] if sums and sums[-1] > 0 else 1.0
    return tuple(at * scale for at in sums)
