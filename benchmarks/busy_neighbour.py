"""What another process that burns a core costs: the same engine and prompts, with and without it, in turns.

Three rounds alternate: quiet, a burner that the system places, and a burner pinned to the last core. Each measures the
prefill of a prompt and a decode. Outputs must be equal in all: threads change, bits don't. Exit code 3 if a ratio is
below the goal.

    python benchmarks/busy_neighbour.py --model demo
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from _common import publish, say

from llmx.device import yield_while_waiting

GOAL = 0.45
BURN = "while True: pass"
DEFINITIONS = {
    "prefill": "prompt tokens / time from the request to its first token, median over the rounds",
    "decode": "(output tokens - 1) / time from the first token to the last, median over the rounds",
    "ratio": "median over the rounds of the rate with the burner / the rate of the same round's quiet run",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


@contextmanager
def burner(pinned: bool) -> Iterator[None]:
    """Another process that never waits."""
    process = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        if pinned and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        time.sleep(0.3)  # its interpreter has started, and the system has placed it
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    flags = arguments()
    yield_while_waiting()
    from llmx.config import EngineConfig
    from llmx.core import SamplingParams
    from llmx.llm import LLM
    from llmx.report import Report

    config = EngineConfig(flags.model, device="cpu", threads=flags.threads, prefix_caching=False)
    with LLM(config=config) as llm:
        vocabulary = range(min(1000, llm.info.vocab_size))
        prompt = [(7 * i + 3) % len(vocabulary) for i in range(flags.input_len)]
        params = SamplingParams(max_tokens=flags.output_len, temperature=0.0, ignore_eos=True)

        def measure() -> tuple[dict[str, float], list[int]]:
            began, times, tokens = time.perf_counter(), [], []
            for delta in llm.open(prompt, params):
                times += [time.perf_counter()] * len(delta.token_ids)
                tokens += delta.token_ids
            decode = (len(times) - 1) / (times[-1] - times[0])
            return {"prefill": flags.input_len / (times[0] - began), "decode": decode}, tokens

        _, wanted = measure()
        rates: dict[str, dict[str, list[float]]] = {
            kind: {"prefill": [], "decode": []} for kind in ("quiet", "busy", "pinned")
        }
        for number in range(flags.rounds):
            for kind, found in rates.items():
                if kind == "quiet":
                    rate, tokens = measure()
                else:
                    with burner(kind == "pinned"):
                        rate, tokens = measure()
                assert tokens == wanted, "a busy neighbour changed the output"
                for what, value in rate.items():
                    found[what].append(value)
                say(f"round {number + 1}, {kind}: {rate['prefill']:.0f} and {rate['decode']:.1f} tokens/s")
        results = {kind: {what: median(values) for what, values in found.items()} for kind, found in rates.items()}
        ratios = {
            f"{what}_{kind}": median(b / q for b, q in zip(rates[kind][what], rates["quiet"][what], strict=True))
            for kind in ("busy", "pinned")
            for what in ("prefill", "decode")
        }
        report = Report(
            "busy_neighbour",
            {
                "tokens_per_second": results,
                "ratios": ratios,
                "rounds": rates,
                "goal": GOAL,
                "threads": llm.info.threads,
            },
            model={"name": flags.model},
            definitions=DEFINITIONS,
            kernels=dict(llm.info.kernels),
        )
    for name, value in ratios.items():
        say(f"{name}: {value:.2f} of quiet (goal: {GOAL})")
    publish(report, flags.json, ("torch",))
    return 0 if min(ratios.values()) >= GOAL else 3


if __name__ == "__main__":
    sys.exit(main())
