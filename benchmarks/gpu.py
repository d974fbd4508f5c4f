"""Random models of a tiny and of an 8B shape on a CUDA device: what they load, prefill, decode and serve.

Runs from the tree, without an install:

    PYTHONPATH=. python benchmarks/gpu.py                        # both shapes, bf16
    PYTHONPATH=. python benchmarks/gpu.py --device cpu --tiny    # the tiny one on a CPU, to try the script
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.bench.datasets import RANDOM, Dataset
from llmx.bench.definitions import DEFINITIONS
from llmx.bench.findings import Findings
from llmx.bench.plan import CONTINUOUS, Load, Plan, Point
from llmx.bench.run import measure
from llmx.bench.table import bound_line, serving_lines
from llmx.bench.workload import Span
from llmx.report import Report

TINY, LARGE = "random:tiny", "random:llama-8b"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="the tiny model alone")
    parser.add_argument("-p", dest="prompt_len", type=int, default=512)
    parser.add_argument("-n", dest="gen_len", type=int, default=64)
    parser.add_argument("-r", dest="repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def run(model: str, plan: Plan, flags: argparse.Namespace) -> dict[str, Any]:
    """One model from load to serving. Lengths fit the tiny shape's context of 1024 tokens."""
    import torch

    from llmx.llm import LLM

    cuda = flags.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with LLM(model, device=flags.device, dtype=flags.dtype) as llm:
        loaded = time.perf_counter() - began
        say(f"{model}: {llm.info.parameters / 1e9:.3g} G parameters, loaded in {loaded:.1f} s")
        plan.check(llm.info.max_model_len)
        found = Findings(plan, llm.info)
        measure(llm, found, lambda line: say(f"{model}: {line}"))
    results = found.results()
    lines = [bound_line(part, limit) for part, limit in found.limits().items()]
    if plan.load is not None:
        lines += serving_lines(results["serving"])
    for line in lines:
        say(f"{model}: {line}")
    return {
        "model": found.info,
        "load_seconds": loaded,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        **results,
    }


def main() -> None:
    flags = arguments()
    import torch

    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        print("This machine has no CUDA device that torch can use; --device cpu --tiny tries the script on a CPU.")
        return
    if flags.device == "cpu" and not flags.tiny:
        print("On a CPU only the tiny model is worth running: add --tiny.")
        return
    dataset = Dataset(RANDOM, Span(32, 512), Span(16, 256))
    load = Load(dataset, flags.requests, (Point(CONTINUOUS, flags.concurrency),)) if flags.requests else None
    plan = Plan(flags.prompt_len, flags.gen_len, flags.repeat, load, seed=0)
    results, interrupted = {}, False
    for model in (TINY,) if flags.tiny else (TINY, LARGE):
        results[model] = run(model, plan, flags)
        if interrupted := results[model]["interrupted"]:
            break
    report = Report("gpu", results, definitions=DEFINITIONS, seeds={"workload": 0, "weights": 0})
    publish(report, flags.json, ("torch", "triton", "transformers"))
    sys.exit(130 if interrupted else 0)


if __name__ == "__main__":
    main()
