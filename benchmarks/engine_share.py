"""The engine's own share of a decode step: its wall time minus the time inside the C++ ops.

Steps are counted from one's beginning to the next one's, in the process that also turns tokens into text:
scheduling, batches, sampling, the hand-over and whatever detokenising gets in the way are all in it. Medians over the
steps in which all requests decode. With --mixed also over the steps of many short requests, at most as many at once,
that compute prompts and decode others. With --eager forwards are run op by op (LLMX_GRAPH=0).

    python benchmarks/engine_share.py --model demo --requests 1 32 --mixed --json share.json
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.core import SamplingParams
from llmx.kernels import cpu
from llmx.llm import LLM
from llmx.report import Report

DEFINITIONS = {
    "step_ms": "Median wall time from the beginning of a step to that of the next, in milliseconds.",
    "native_ms": "Median time of a step inside C++ ops, in milliseconds.",
    "share_ms": "Median of the difference of the two: the engine's own share, in milliseconds.",
    "share_p90_ms": "The 90th percentile of that difference.",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--mixed", action="store_true", help="and steps with prompts in them")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


Mark = tuple[float, float, int, int]


def watch(engine: Any, library: Any) -> list[Mark]:
    """(wall clock, seconds in ops so far, tokens of the step, rows that landed) at the beginning of each step from now
    on."""
    marks: list[Mark] = []
    step = engine.step

    def marked() -> Any:
        before = time.perf_counter(), library.inside() * 1e-9
        landed = step()
        marks.append((*before, engine.computed_last, len(landed or ())))
        return landed

    engine.step = marked
    return marks


def measure(llm: LLM, marks: list[Mark], count: int, flags: argparse.Namespace) -> dict[str, Any]:
    vocab = llm.info.vocab_size
    prompts = [[(7 + 31 * r + 13 * i) % (vocab - 1) + 1 for i in range(flags.input_len)] for r in range(count)]
    params = SamplingParams(
        max_tokens=flags.output_len, min_tokens=flags.output_len, temperature=flags.temperature, seed=1
    )
    marks.clear()
    llm.generate(prompts, params)
    wall, native = [], []
    for this, following in pairwise(marks):
        if this[2] == following[2] == count:
            wall.append(following[0] - this[0])
            native.append(following[1] - this[1])
    return {"requests": count, **figures(wall[5:], native[5:])}  # the first ones record graphs


def measure_mixed(llm: LLM, marks: list[Mark], count: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Steps of up to 64 tokens in which prompts are computed beside at least one decode."""
    rng, vocab = random.Random(1), llm.info.vocab_size
    lengths = [(rng.randint(4, 32), rng.randint(2, 48)) for _ in range(6 * count)]
    prompts = [[rng.randrange(1, vocab) for _ in range(n_in)] for n_in, _ in lengths]
    marks.clear()
    llm.generate(prompts, [SamplingParams(max_tokens=n, min_tokens=n, temperature=flags.temperature, seed=1)
                           for _, n in lengths])  # fmt: skip
    steps = [(this, following) for this, following in pairwise(marks) if this[3] > 1 and this[3] < this[2] <= 64]
    wall = [following[0] - this[0] for this, following in steps]
    return {"requests": count, "mixed": True, **figures(wall, [after[1] - this[1] for this, after in steps])}


def figures(wall: list[float], native: list[float]) -> dict[str, Any]:
    share = sorted(w - n for w, n in zip(wall, native, strict=True))
    return {
        "steps": len(wall),
        "step_ms": 1e3 * statistics.median(wall),
        "native_ms": 1e3 * statistics.median(native),
        "share_ms": 1e3 * statistics.median(share),
        "share_p90_ms": 1e3 * share[len(share) * 9 // 10],
    }


def main() -> int:
    flags = arguments()
    if flags.eager:
        os.environ["LLMX_GRAPH"] = "0"
    library = cpu.native()
    if library is None:
        say("this install has no C++ kernels")
        return 1
    options = {} if flags.threads is None else {"threads": flags.threads}
    with LLM(flags.model, max_num_seqs=max(flags.requests), **options) as llm:
        client: Any = llm._client
        marks = watch(client.core.engine, library)
        rows = [measure(llm, marks, count, flags) for count in flags.requests]
        if flags.mixed:
            rows.append(measure_mixed(llm, marks, max(flags.requests), flags))
        say(f"{'requests':>8} {'step ms':>9} {'native ms':>9} {'share ms':>9} {'p90':>7}")
        for row in rows:
            say(
                f"{row['requests']:8} {row['step_ms']:9.3f} {row['native_ms']:9.3f} {row['share_ms']:9.3f} "
                f"{row['share_p90_ms']:7.3f}{'  (prompts and decodes)' if 'mixed' in row else ''}"
            )
        model = {"name": flags.model, "path": llm.info.path}
        report = Report("engine_share", {"rows": rows}, model, definitions=DEFINITIONS, kernels=dict(llm.info.kernels))
        publish(report, flags.json, ("torch",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
