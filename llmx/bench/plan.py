"""What a bench is to measure, and the refusal of what can't be, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmx.bench.arrivals import Ramp, offsets, ramped
from llmx.bench.datasets import Dataset
from llmx.bench.drive import Traffic
from llmx.errors import UsageError

CONTINUOUS, STATIC, TRANSFORMERS, SERVER = "continuous", "static", "transformers", "server"
LEAST_WARM_UPS = 8


@dataclass(frozen=True)
class Point:
    """One thing to measure: who serves, and at which concurrency (None: no bound)."""

    contender: str
    concurrency: int | None

    def label(self, sweep: bool) -> str:
        return f"c{self.concurrency}" if sweep else self.contender


@dataclass(frozen=True)
class Load:
    """The requests of the serving part. `rate` None: a closed loop. `ramp`: a rate that grows. `repeat`: rounds of all.

    warm_ups: None: by the concurrency. warm_prefix: prompts may be in the prefix cache from an earlier round or run.
    """

    dataset: Dataset
    requests: int
    points: tuple[Point, ...]
    rate: float | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    repeat: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    warm_ups: int | None = None
    warm_prefix: bool = False
    static_batch: int = 32
    procs: int = 1
    ramp: Ramp | None = None

    @property
    def is_sweep(self) -> bool:
        return len({point.concurrency for point in self.points}) > 1

    def traffic(self, point: Point, seed: int) -> Traffic:
        """When requests are sent; each seed has its own arrivals."""
        if self.rate is None:
            return Traffic(point.concurrency)
        if self.ramp is not None:
            return Traffic(
                point.concurrency, ramped(self.requests, self.ramp, self.arrivals, self.burstiness, seed)
            )  # fmt: skip
        return Traffic(point.concurrency, offsets(self.requests, self.rate, self.arrivals, self.burstiness, seed))

    def warm_up_count(self, point: Point) -> int:
        return max(LEAST_WARM_UPS, 2 * (point.concurrency or 0)) if self.warm_ups is None else self.warm_ups

    def facts(self, point: Point) -> dict[str, object]:
        """As the report shows it, under vLLM's names."""
        rate = self.rate if self.rate is not None and math.isfinite(self.rate) else "inf"
        ramp = {} if self.ramp is None else {
            "ramp_up_strategy": self.ramp.strategy,
            "ramp_up_start_rps": self.ramp.start,
            "ramp_up_end_rps": self.ramp.end,
        }  # fmt: skip
        return {
            "contender": point.contender,
            "loop": "closed" if self.rate is None else "open",
            "request_rate": rate,
            "burstiness": self.burstiness,
            "arrivals": None if self.rate is None else self.arrivals,
            **ramp,
            **self.dataset.facts(),
        }


@dataclass(frozen=True)
class Plan:
    """What to measure. A part that is 0 or None is left out: `prompt_len` prefill, `gen_len` decode, `load` serving.

    repetitions: of prefill and decode.
    """

    prompt_len: int
    gen_len: int
    repetitions: int
    load: Load | None
    seed: int

    def check(self, max_model_len: int) -> None:
        """UsageError for a length that the model's context can't hold."""
        parts = [
            (self.prompt_len, f"-p {self.prompt_len}", self.prompt_len + 1),
            (self.gen_len, f"-n {self.gen_len}", self.gen_len + 2),
        ]
        if self.load is not None and (longest := self.load.dataset.longest) is not None:
            sizes = self.load.dataset.facts()
            names = ("input_len", "prefix_len", "suffix_len", "output_len")
            flags = ", ".join(f"--{name.replace('_', '-')} {sizes[name]}" for name in names if name in sizes)
            parts.append((longest, flags, longest))
        for size, flags, tokens in parts:
            if size and tokens > max_model_len:
                raise UsageError(
                    f"{flags} needs a context of {tokens} tokens; the model runs with {max_model_len}.",
                    hint="Lower the lengths, or raise --max-model-len if the model allows it.",
                )
