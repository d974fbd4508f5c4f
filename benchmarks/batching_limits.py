"""What continuous batching could gain over static batches at most, were its requests served in other orders.

Measures what a step costs on this machine with 1 to 32 sequences, and a prompt's tokens, then simulates what
batching_gain.py measures (p99 of E2E at 70 % of the capacity, Poisson arrivals, the same lengths) with those times, for
many seeds: first come, first served with at most 32 at once, which is what the engine does, with fewer at once, and the
shortest remainder first, which knows the lengths beforehand. Says why batching_gain.py gives what it gives; a
measurement it is not: it knows neither KV blocks nor the time between two steps.

    python benchmarks/batching_limits.py                                                  # lengths as in chats
    python benchmarks/batching_limits.py --input-len 8:32 --output-len 4:128 --requests 300           # evenly mixed
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import publish, say

from llmx import LLM, SamplingParams
from llmx.bench.datasets import RANDOM, Dataset, make_jobs
from llmx.bench.run import prompt_ids
from llmx.bench.workload import parse_span
from llmx.report import Report

LOAD, STATIC = 0.70, 32
ROWS, PROMPT = (1, 2, 4, 8, 12, 16, 24, 32), 128
ORDERS = {f"first come, at most {most}": (most, False) for most in (32, 16, 12, 8)} | {
    "shortest remainder, at most 32": (32, True)
}


class Costs:
    """Seconds of a step."""

    def __init__(self, llm: LLM, rounds: int) -> None:
        draw = random.Random(0)

        def generate(rows: int, prompt: int, outputs: int) -> float:
            texts = [[draw.choice(ids) for _ in range(prompt)] for _ in range(rows)]
            start = time.perf_counter()
            llm.generate(texts, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True))
            return time.perf_counter() - start

        ids = prompt_ids(llm)
        generate(4, 16, 8)  # a warm-up
        turns = range(rounds)
        self.decode = [statistics.median((generate(n, 16, 66) - generate(n, 16, 2)) / 64 for _ in turns) for n in ROWS]
        prompt = statistics.median(generate(1, PROMPT, 1) - generate(1, 1, 1) for _ in turns)
        self.token = max(prompt, 0.0) / PROMPT

    def __call__(self, decodes: int, prompt_tokens: int) -> float:
        step = float(np.interp(max(decodes, 1), ROWS, self.decode))
        return step + self.token * prompt_tokens


Lengths = list[tuple[int, int]]  # of prompt and output


def serve(cost: Callable[[int, int], float], arrivals: list[float], lengths: Lengths, most: int, shortest: bool,
          static: bool) -> list[float]:  # fmt: skip
    """E2E of each. `static`: nobody joins what runs."""
    left = [output for _, output in lengths]
    waiting: list[int] = []
    running: list[int] = []
    took, now, arrived, ended = [0.0] * len(left), 0.0, 0, 0
    while ended < len(left):
        while arrived < len(left) and arrivals[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        if not waiting and not running:
            now = arrivals[arrived]
            continue
        if shortest:
            waiting, running = sorted(waiting + running, key=lambda i: left[i]), []
        if not (static and running):
            taken = max(0, most - len(running))
            running, waiting = running + waiting[:taken], waiting[taken:]
        fresh = [i for i in running if left[i] == lengths[i][1]]
        now += cost(len(running), sum(lengths[i][0] for i in fresh))
        for i in running:
            left[i] -= 1
            if left[i] == 0:
                took[i], ended = now - arrivals[i], ended + 1
        running = [i for i in running if left[i]]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=600, help="of each seed")
    parser.add_argument("--input-len", default="4:16", help="as bench takes it")
    parser.add_argument("--output-len", default="lognormal:12:1.2:384")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="of each measured step")
    parser.add_argument("--json", type=Path, default=None)
    flags = parser.parse_args()
    dataset = Dataset(RANDOM, parse_span(flags.input_len, "--input-len"), parse_span(flags.output_len, "--output-len"))
    with LLM(flags.model, max_num_seqs=STATIC, prefix_caching=False) as llm:
        costs, ids, info = Costs(llm, flags.rounds), prompt_ids(llm), llm.info

    def lengths_of(seed: int, count: int) -> Lengths:
        return [(len(job.prompt), job.output_len) for job in make_jobs(dataset, ids, count, seed, "")]

    gains: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(flags.seeds):
        many = lengths_of(10_000 + seed, max(3 * STATIC, flags.requests // 2))
        tokens = sum(output for _, output in many) / max(serve(costs, [0.0] * len(many), many, STATIC, False, False))
        lengths = lengths_of(seed, flags.requests)
        rate = LOAD * tokens / statistics.mean(output for _, output in lengths)
        draw = random.Random(seed)
        arrivals = [float(at) for at in np.cumsum([draw.expovariate(rate) for _ in lengths])]
        static = np.percentile(serve(costs, arrivals, lengths, STATIC, False, True), 99)
        for name, (most, shortest) in ORDERS.items():
            tail = np.percentile(serve(costs, arrivals, lengths, most, shortest, False), 99)
            gains[name].append(float(1 - tail / static))
    steps = {str(n): 1e3 * cost for n, cost in zip(ROWS, costs.decode, strict=True)}
    say("a step takes " + ", ".join(f"{ms:.2f} ms with {n}" for n, ms in steps.items())
        + f"; a prompt's token {1e3 * costs.token:.2f} ms")  # fmt: skip
    results: dict[str, Any] = {"step_ms": steps, "prompt_token_ms": 1e3 * costs.token, "p99_e2el_lower_by": {}}
    for name, all_of in gains.items():
        quarters = [100 * q for q in statistics.quantiles(all_of, n=4)]
        say(f"{name}: p99 E2E {quarters[1]:.1f} % lower (median of {flags.seeds} seeds; the middle half "
            f"{quarters[0]:.1f} to {quarters[2]:.1f})")  # fmt: skip
        results["p99_e2el_lower_by"][name] = all_of
    model = {"name": info.model, "parameters": info.parameters, "schemes": info.schemes, "threads": info.threads}
    publish(Report("batching_limits", results, model=model, kernels=dict(info.kernels)), flags.json, ("torch",))


if __name__ == "__main__":
    main()
