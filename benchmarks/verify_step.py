"""What checking k tokens of one text costs against computing one: T(k) / T(1), which speculative decoding lives on.

A step is the whole model, from token ids to the logits of all k rows, recorded as the engine records its small steps
and replayed; the text has `--context` tokens in the cache. The sizes take turns; medians over the rounds.

    python benchmarks/verify_step.py --model demo --json verify.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import publish, say

from llmx.batch import Batch
from llmx.core import SamplingParams
from llmx.kernels import cpu
from llmx.llm import LLM
from llmx.report import Report

DEFINITIONS = {
    "step_ms": "Median wall time of a step of so many rows, in milliseconds.",
    "ratio": "That against a step of one row.",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def rows_of_one_text(start: int, count: int, groups: int, size: int) -> Batch:
    """Tokens start … start + count - 1 of a text that lies in the blocks from 1 on."""
    positions = torch.arange(start, start + count)
    table = torch.arange(1, 2 + (start + count) // size)[None]
    slots = table[0, positions // size] * size + positions % size
    zero, ends = torch.zeros_like(positions), torch.tensor([start + count])
    return Batch(
        1 + positions % 1000, positions, zero, zero - 1, positions + 1, [slots] * groups, [table] * groups, ends,
        torch.tensor([start]), torch.arange(count), size, (count,), (count,), (start,), (start + count,),
    )  # fmt: skip


@torch.inference_mode()
def measure(llm: LLM, flags: argparse.Namespace) -> list[dict[str, Any]]:
    client: Any = llm._client
    graphs = client.core.engine.graphs
    model, cache = graphs.model, graphs.cache
    llm.generate([[1 + i % 1000 for i in range(flags.context)]], SamplingParams(max_tokens=max(flags.rows)))  # its keys
    steps = {}
    for count in sorted({1, *flags.rows}):
        batch = rows_of_one_text(flags.context, count, len(cache.windows), cache.size)
        plans: dict[int, Any] = {}

        def run(batch: Batch = batch, plans: dict[int, Any] = plans) -> Any:
            return batch, plans, model.head(model.forward(batch, cache, plans=plans)[0])

        kept, recorded = graphs.recorder.record(run)
        if recorded is None:
            raise SystemExit(f"this model's steps can't be recorded: {graphs.recorder.refused}")
        steps[count] = (recorded, kept)
    taken: dict[int, list[float]] = {count: [] for count in steps}
    for turn in range(flags.rounds + 3):
        for count, (recorded, _) in steps.items():
            began = time.perf_counter()
            recorded.replay()
            if turn >= 3:
                taken[count].append(time.perf_counter() - began)
    alone = statistics.median(taken[1])
    return [
        {"rows": count, "step_ms": 1e3 * statistics.median(times), "ratio": statistics.median(times) / alone}
        for count, times in taken.items()
    ]


def main() -> int:
    flags = arguments()
    if cpu.native() is None:
        say("this install has no C++ kernels")
        return 1
    options = {} if flags.threads is None else {"threads": flags.threads}
    with LLM(flags.model, max_model_len=max(1024, 2 * flags.context), max_num_seqs=1, **options) as llm:
        rows = measure(llm, flags)
        for row in rows:
            say(f"{row['rows']:3} rows: {row['step_ms']:7.3f} ms, {row['ratio']:.2f} times one row's")
        model = {"name": flags.model, "path": llm.info.path}
        report = Report("verify_step", {"rows": rows}, model, definitions=DEFINITIONS, kernels=dict(llm.info.kernels))
        publish(report, flags.json, ("torch",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
