"""When requests arrive in an open loop: fixed before the run, whatever becomes of the requests."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from llmx.errors import UsageError

RAMPS = ("linear", "exponential")
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


@dataclass(frozen=True)
class Ramp:
    """A rate that goes from `start` to `end` requests a second over the run."""

    strategy: str
    start: float
    end: float

    def rate(self, i: int, count: int) -> float:
        """Of the i-th of `count` requests."""
        progress = i / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def parse_ramp(text: str) -> Ramp:
    """`linear:1:10` or `exponential:1:10`, in requests a second. UsageError for anything else."""
    strategy, *ends = text.split(":")
    try:
        rates = [float(end) for end in ends]
    except ValueError:
        rates = []
    if strategy not in RAMPS or len(rates) != 2 or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(
            f"--ramp-up {text!r} is no ramp.", "Write linear:1:10 or exponential:1:10, in requests a second."
        )
    return Ramp(strategy, *rates)


def ramped(count: int, ramp: Ramp, process: str, burstiness: float, seed: int) -> tuple[float, ...]:
    """As `offsets`, with a rate of its own for each gap, and not scaled, as `vllm bench serve` has it."""
    shape = 1.0 if process == "poisson" else burstiness
    rng = random.Random(f"arrivals/{seed}")

    def gap() -> float:
        return 1.0 if process == "constant" else rng.gammavariate(shape, 1 / shape)

    return tuple(itertools.accumulate(gap() / ramp.rate(i, count) for i in range(count)))


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
