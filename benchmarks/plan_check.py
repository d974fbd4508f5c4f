"""What `llmx plan --hardware cpu` predicts against what `llmx bench` then measures, on the same machine, in turns.

    python benchmarks/plan_check.py demo path/to/gemma-3-270m-q4_k_m.gguf

Each ratio is predicted / measured, of tokens per second; those of several turns are all printed. Nothing else may run
beside it: both measure. Exit code 3 if the median of a ratio is farther than --within from 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.report import Report

PROMPT, OUTPUT = 512, 128


def llmx(*arguments: str) -> dict[str, Any]:
    """The report that a command writes to stdout."""
    command = [sys.executable, "-m", "llmx.cli", *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    return results


def predicted(model: str, input_len: int, output_len: int, concurrency: int = 1) -> dict[str, float]:
    flags = ("--hardware", "cpu", "--context", str(input_len + output_len), "--concurrency", str(concurrency))
    best: dict[str, float] = llmx(
        "plan", model, *flags, "--input-len", str(input_len), "--output-len", str(output_len)
    )["best"]
    return best


def turn(model: str, concurrency: int) -> dict[str, dict[str, float]]:
    """Of each figure: predicted, measured, ratio. A request alone as `bench` runs it; then many of 256 + 64 tokens."""
    context = ("--max-model-len", "1024")
    prefill = PROMPT / predicted(model, PROMPT, 2)["ttft_ms"] * 1e3
    decode = 1e3 / predicted(model, 1, OUTPUT)["tbt_ms"]
    alone = llmx("bench", model, *context, "-p", str(PROMPT), "-n", str(OUTPUT), "-r", "3", "--requests", "0")
    pairs = {
        "prefill tokens/s": (prefill, alone["prefill"]["tokens_per_second"]["mean"]),
        "decode tokens/s": (decode, alone["decode"]["tokens_per_second"]["mean"]),
    }
    if concurrency:
        lengths = ("--input-len", "256", "--output-len", "64")
        many = predicted(model, 256, 64, concurrency)["output_throughput"]
        flags = ("--concurrency", str(concurrency), "--requests", str(3 * concurrency), *lengths)
        served = llmx("bench", model, *context, "-p", "0", "-n", "0", *flags)["serving"]
        pairs[f"output tokens/s at {concurrency}"] = (many, served["output_throughput"])
    found = {}
    for name, (said, was) in pairs.items():
        found[name] = {"predicted": said, "measured": was, "ratio": said / was}
        say(f"{model}: {name}: predicted {said:.2f}, measured {was:.2f}, ratio {said / was:.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8, help="of the requests at once; 0: leave them out")
    parser.add_argument("--within", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    far = []
    for model in asked.models:
        turns = [turn(model, asked.concurrency) for _ in range(asked.turns)]
        for name in turns[0]:
            ratio = statistics.median(one[name]["ratio"] for one in turns)
            results.setdefault(Path(model).name, {})[name] = {"ratio": ratio, "turns": [one[name] for one in turns]}
            say(f"{model}: {name}: median ratio {ratio:.2f}")
            if abs(ratio - 1) > asked.within:
                far.append(f"{model}: {name} is {ratio:.2f} of what was measured")
    publish(Report("plan_check", results), asked.json, ("torch",))
    for line in far:
        say(line)
    return 3 if far else 0


if __name__ == "__main__":
    sys.exit(main())
