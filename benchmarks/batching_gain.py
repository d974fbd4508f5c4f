"""What continuous batching gains over static batches of the same engine: p99 of E2E at 70 % of the measured capacity.

For each of five seeds (its own lengths, prompts and Poisson arrivals), first the capacity: a closed loop with twice as
many requests as the engine runs at once; its output tokens per second while all places were taken, over the mean length
of the outputs that are then served. There the engine must be busy at least 85 % of the time (median). Then both serve
the same requests one after the other; the median of 1 - continuous / static of their p99 must be at least 40 %. Exit
code 3 if one of the two doesn't hold. Needs a quiet machine: whatever slows one of the runs down is in the ratio.

How much it is depends on what a step costs whatever is in it (reading the weights, starting the kernels) beside what
each token adds: a larger batch shares the first. Where tokens cost nearly all, as large matrix products do on a few
cores, no batching gains much. And on the lengths: a static batch runs as long as its longest output, so outputs as
people ask for them, many short ones and a few long ones (lognormal), cost it more than evenly mixed ones. A p99 wants
hundreds of requests.

    python benchmarks/batching_gain.py --json gain.json         # the demo model, lengths as in chats: about ten minutes
    python benchmarks/batching_gain.py --model SmolLM2-F32.gguf
    python benchmarks/batching_gain.py --input-len 8:32 --output-len 4:128     # evenly mixed: not where it gains
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.bench.datasets import RANDOM, Dataset, make_jobs
from llmx.bench.definitions import DEFINITIONS
from llmx.bench.findings import Run
from llmx.bench.plan import CONTINUOUS, STATIC, Load, Point
from llmx.bench.run import prompt_ids, serve_point
from llmx.bench.workload import parse_span
from llmx.errors import LlmxError
from llmx.report import Report

LEAST_GAIN, LEAST_BUSY, LOAD = 0.40, 0.85, 0.70


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=600, help="of each seed")
    parser.add_argument(
        "--input-len", default="4:16", help="as bench takes it: a range, or lognormal:MEDIAN:SIGMA:MOST"
    )
    parser.add_argument("--output-len", default="lognormal:12:1.2:384")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="most at once, of both")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


class Bench:
    """One engine that serves rounds of requests."""

    def __init__(self, llm: Any, flags: argparse.Namespace) -> None:
        self.llm, self.flags, self.ids = llm, flags, prompt_ids(llm)
        spans = parse_span(flags.input_len, "--input-len"), parse_span(flags.output_len, "--output-len")
        self.dataset = Dataset(RANDOM, *spans)

    def round(self, contender: str, requests: int, seed: int, rate: float | None, most: int | None) -> dict[str, Any]:
        """The figures of one run. The nonce is the contender, so that neither finds the other's prompts cached."""
        point = Point(contender, most)
        load = Load(self.dataset, requests, (point,), rate, static_batch=self.flags.batch)
        run = Run(point)
        jobs = make_jobs(self.dataset, self.ids, requests, seed, f"{contender}/{rate is None}")
        serve_point(self.llm, load, run, jobs, seed, lambda _: None)
        figures = run.figures(load)
        if figures["completed"] != requests:
            raise LlmxError(f"{contender}: {figures['failed']} requests failed: {'; '.join(figures['errors'])}")
        return figures

    def capacity(self, seed: int) -> tuple[float, dict[str, Any]]:
        """(output tokens per second, the figures of the run that showed it). Many: at first all begin at once."""
        count = max(3 * self.flags.batch, self.flags.requests // 2)
        figures = self.round(CONTINUOUS, count, 10_000 + seed, None, 2 * self.flags.batch)
        return figures["steady"]["output_throughput"] or figures["output_throughput"], figures

    def output_len(self, seed: int) -> float:
        """Mean length of the outputs that a seed's requests are to have."""
        lengths = [job.output_len for job in make_jobs(self.dataset, self.ids, self.flags.requests, seed, "")]
        return statistics.mean(lengths)

    def seed(self, seed: int) -> dict[str, Any]:
        """The capacity just now, then both contenders."""
        tokens, saturated = self.capacity(seed)
        capacity = tokens / self.output_len(seed)
        both = {
            name: self.round(name, self.flags.requests, seed, LOAD * capacity, None) for name in (CONTINUOUS, STATIC)
        }
        tails = {name: figures["p99_e2el_ms"] for name, figures in both.items()}
        gain = 1 - tails[CONTINUOUS] / tails[STATIC]
        busy = saturated["busy_share"]
        say(f"seed {seed}: capacity {capacity:.2f} requests/s, busy {100 * busy:.1f} %; at {LOAD:.0%} p99 E2E "
            f"{tails[CONTINUOUS]:.0f} ms against {tails[STATIC]:.0f} ms: {100 * gain:.1f} % lower")  # fmt: skip
        found = {"seed": seed, "capacity_requests_per_second": capacity, "busy_share_at_saturation": busy}
        return found | {"request_rate": LOAD * capacity, "p99_e2el_lower_by": gain, "saturated": saturated, **both}


def main() -> None:
    flags = arguments()
    from llmx.llm import LLM

    began = time.perf_counter()
    engine = {name: getattr(flags, name) for name in ("device", "dtype", "threads")}
    with LLM(flags.model, max_num_seqs=flags.batch, **engine) as llm:
        bench = Bench(llm, flags)
        bench.round(CONTINUOUS, 4, 20_000, None, 4)  # a warm-up
        seeds = [bench.seed(seed) for seed in range(flags.seeds)]
        info = llm.info
    busy = statistics.median(one["busy_share_at_saturation"] for one in seeds)
    gain = statistics.median(one["p99_e2el_lower_by"] for one in seeds)
    holds = gain >= LEAST_GAIN and busy >= LEAST_BUSY
    say(f"median {100 * gain:.1f} % lower (at least {100 * LEAST_GAIN:g} %), busy {100 * busy:.1f} % at saturation "
        f"(at least {100 * LEAST_BUSY:g} %): {'holds' if holds else 'does NOT hold'}; "
        f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    results = {
        "busy_share_at_saturation": busy,
        "median_p99_e2el_lower_by": gain,
        "holds": holds,
        "seeds": seeds,
    }
    model = {"name": info.model, "parameters": info.parameters, "schemes": info.schemes, "threads": info.threads}
    report = Report("batching_gain", results, model=model, definitions=DEFINITIONS, kernels=dict(info.kernels))
    publish(report, flags.json, ("torch",))
    sys.exit(0 if holds else 3)


if __name__ == "__main__":
    main()
