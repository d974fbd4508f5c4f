"""What a bench has measured so far, and the report's `results` made of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmx.bench.ceilings import Ceilings, Limit, limit, serving_limit, weights_as_computed
from llmx.bench.clock import Client
from llmx.bench.plan import SERVER, Load, Plan, Point
from llmx.bench.records import Record, detailed, serving_figures
from llmx.bench.recount import Recount
from llmx.bench.remote import COUNTERS, Server, delta_figures
from llmx.bench.serving import engine_figures
from llmx.bench.slo import goodput
from llmx.bench.stats import nested, repetitions, share, spread
from llmx.config import EngineInfo, Metrics
from llmx.gates import figures as with_paths

UNSTEADY = 0.05  # coefficient of variation over whole runs from which a figure is pointed out
POINTED_OUT = (
    "throughput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "p99_ttft_ms",
    "p99_e2el_ms",
)
WARM = 0.01  # share of cached prompt tokens from which TTFT is not that of new prompts


@dataclass
class Run:
    """One round of one point. Counters from before and after it: of the engine here, or of a server's /metrics."""

    point: Point
    records: list[Record] = field(default_factory=list)
    client: Client = field(default_factory=Client)
    before: Metrics | Mapping[str, float] | None = None
    after: Metrics | Mapping[str, float] | None = None
    memory: Mapping[str, int | None] = field(default_factory=dict)
    gauges: Sequence[float] = ()
    token_source: str = "ids"
    dtype: str | None = None  # what a contender other than our engine computed in

    def figures(self, load: Load) -> dict[str, Any]:
        """All figures of this run, flat under vLLM's names, and by paths."""
        figures: dict[str, Any] = {**load.facts(self.point), **serving_figures(self.records, self.point.concurrency)}
        figures["num_prompts"] = load.requests
        duration = figures["duration"]
        if isinstance(self.before, Metrics) and isinstance(self.after, Metrics):
            figures |= engine_figures(self.before, self.after, duration)
        else:
            figures |= self._told()
            if not isinstance(self.before, Metrics) and not isinstance(self.after, Metrics):
                figures |= delta_figures(self.before, self.after, duration)
        if self.gauges:
            figures["kv_cache_usage"] = {"mean": statistics.fmean(self.gauges), "max": max(self.gauges)}
        figures |= {"token_source": self.token_source, **self.memory}
        figures |= {"compute_dtype": self.dtype} if self.dtype else {}
        figures["request_goodput"] = None
        if load.slo:
            figures |= goodput(self.records, load.slo, duration)
        gap = figures["mean_itl_ms"] or figures["mean_icl_ms"]
        figures["client"] = self.client.figures(gap / 1e3 if gap else None)
        return figures | nested(figures)

    def _told(self) -> dict[str, Any]:
        """What the answers said of the prefix cache and, where tokens were counted as ids, of their number."""
        done = [record for record in self.records if record.completed]
        known = [record for record in done if record.cached is not None]
        cached = sum(record.cached or 0 for record in known)
        again = [record for record in done if record.retokenized is not None]
        recounted, counted = sum(r.retokenized or 0 for r in again), sum(r.output_len for r in again)
        return {
            "retokenized_output_tokens": recounted if again else None,
            "retokenized_difference": share(recounted - counted, counted),
            "cached_tokens": cached if known else None,
            "cache_hit_rate": share(cached, sum(record.input_len for record in known)),
            "token_count_mismatch": sum(r.told is not None and r.told != r.output_len for r in done),
        }


@dataclass
class Findings:
    """Lists grow while the bench runs. `info`: of the engine here; `server`: what is at a URL instead.

    identity: which weights the model here is, as the report shows it. recount: what counts a server's tokens again."""

    plan: Plan
    info: EngineInfo | None = None
    server: Server | None = None
    ceilings: Ceilings | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    interrupted: bool = False
    identity: Mapping[str, Any] = field(default_factory=dict)
    recount: Recount | None = None

    def names(self) -> list[str]:
        """Paths of the figures that a whole run of the plan can have, for who wants to know before it."""
        here = self.plan.load is None or self.plan.load.points[0].contender != SERVER
        memory = dict.fromkeys(
            ("peak_memory_bytes", "peak_device_memory_bytes" if here else "peak_process_memory_bytes")
        )
        counters: Metrics | dict[str, float] = Metrics(drafted_tokens=1) if here else dict.fromkeys(COUNTERS, 1.0)
        none = type(counters)()
        points = self.plan.load.points if self.plan.load is not None else ()
        runs = [
            Run(point, before=none, after=counters, memory=memory, gauges=() if here else (0.0,)) for point in points
        ]
        whole = replace(self, runs=runs * (self.plan.load.repeat if self.plan.load is not None else 1))
        return [path for path, _ in with_paths(by_short_paths(whole.results()))]

    def results(self) -> dict[str, Any]:
        """The report's `results`: an entry for each part that was asked for. `serving` is the plan's first point, of a
        sweep its last; the others are in `sweep` and `contenders`."""
        found: dict[str, Any] = {"interrupted": self.interrupted}
        if self.plan.prompt_len:
            found["prefill"] = {"prompt_tokens": self.plan.prompt_len, "tokens_per_second": repetitions(self.prefill)}
        if self.plan.gen_len:
            found["decode"] = {"tokens": self.plan.gen_len, "tokens_per_second": repetitions(self.decode)}
        if self.plan.load is not None:
            found |= self._serving(self.plan.load)
        if self.ceilings is not None:
            found["ceilings"] = {
                "read_bytes_per_second": self.ceilings.read,
                "matmul_flops_per_second": self.ceilings.matmul,
                "matmul_dtype": self.ceilings.dtype,
            } | {part: one.figures() for part, one in self._limits(found).items()}
        return found

    def _serving(self, load: Load) -> dict[str, Any]:
        points = list(load.points)
        each = {point: self._point(load, point) for point in points}
        main = points[-1] if load.is_sweep else points[0]
        found: dict[str, Any] = {"serving": each[main]}
        if len(points) > 1:
            group = "sweep" if load.is_sweep else "contenders"
            others = {point.label(load.is_sweep): each[point] for point in points if point != main}
            found[group] = others
            if not load.is_sweep:
                found["comparison"] = {label: compared(each[main], other) for label, other in others.items()}
        return found

    def detailed(self) -> dict[str, Any]:
        """Of each request of the last round of `serving`, under vLLM's names."""
        assert self.plan.load is not None
        points = self.plan.load.points
        main = points[-1] if self.plan.load.is_sweep else points[0]
        return detailed(next((run.records for run in reversed(self.runs) if run.point == main), []))

    def _point(self, load: Load, point: Point) -> dict[str, Any]:
        """Means over the rounds of a point, and their deviations where there are several."""
        runs = [run.figures(load) for run in self.runs if run.point == point] or [Run(point).figures(load)]
        means, deviations = spread(runs)
        means["errors"] = sorted({error for run in runs for error in run["errors"]})
        means["client"]["client_bound"] = any(run["client"]["client_bound"] for run in runs)
        if len(runs) > 1:
            means["sd"] = deviations
            means["unsteady"] = _unsteady(means, deviations)
            means["repeats"] = [
                {key: value for key, value in run.items() if isinstance(value, int | float)} for run in runs
            ]  # fmt: skip
        return means

    def limits(self) -> dict[str, Limit]:
        """What the machine would allow, for each part that has a figure."""
        return self._limits(self.results())

    def _limits(self, results: Mapping[str, Any]) -> dict[str, Limit]:
        if self.ceilings is None or self.info is None:
            return {}
        weight_bytes, parameters = weights_as_computed(self.info)
        parts = {"prefill": (self.plan.prompt_len, self.prefill), "decode": (1, self.decode)}
        found = {
            part: limit(self.ceilings, weight_bytes, parameters, tokens, statistics.fmean(samples))
            for part, (tokens, samples) in parts.items()
            if samples
        }
        serving = results.get("serving", {})
        if serving.get("steps") and serving["output_throughput"]:
            found["serving"] = serving_limit(
                self.ceilings, weight_bytes, parameters, serving["steps"], serving["computed_tokens"],
                serving["total_output_tokens"], serving["output_throughput"],
            )  # fmt: skip
        return found


def _unsteady(means: Mapping[str, Any], deviations: Mapping[str, Any]) -> list[str]:
    keys = [key for key in deviations if key.endswith(POINTED_OUT) and not key.startswith("adj_")]
    return [key for key in keys if means[key] and deviations[key] > UNSTEADY * abs(means[key])]


def by_short_paths(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results as gates name them: a figure of `serving` also without that word."""
    return {**results.get("serving", {}), **results}


def compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The first contender against another: medians over the rounds, which took turns."""
    rounds = list(zip(ours.get("repeats", [ours]), theirs.get("repeats", [theirs]), strict=False))

    def median(key: str) -> float | None:
        ratios = [a[key] / b[key] for a, b in rounds if a.get(key) is not None and b.get(key)]
        return statistics.median(ratios) if ratios else None

    tail = median("p99_e2el_ms")
    return {
        "p99_e2el_lower_by": None if tail is None else 1 - tail,
        "output_throughput_ratio": median("output_throughput"),
        "rounds": len(rounds),
    }
