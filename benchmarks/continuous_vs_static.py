"""Output tokens per second of mixed requests: llmx's continuous batching against static batches of transformers.

Both run the same weights in the same dtype with the same threads, in turns; each round gives a ratio against the
better of transformers' batch sizes, and the median counts. Both generate exactly the tokens asked for, greedily. A
static batch is padded on the left and runs until its longest request is done; only the tokens that were asked for are
counted. A GGUF is read by transformers' own reader, which needs the packages gguf and accelerate.

    python benchmarks/continuous_vs_static.py                    # the demo model (llmx pull demo), bf16
    python benchmarks/continuous_vs_static.py --model DIR_OR_GGUF --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.bench.run import prompt_ids
from llmx.bench.workload import Job, forced, mixed_lengths, parse_span, random_prompt

DEFINITIONS = {
    "tokens_per_second": "output tokens asked for / seconds from the first submission to the last token, all requests",
    "ratio": "llmx / the better of transformers' batch sizes, of the same round",
    "median_ratio": "median over rounds; each round runs every contender once",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, a .gguf file, or demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", default="32:512")
    parser.add_argument("--output-len", default="16:256")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8], help="transformers' batch sizes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def load_transformers(model: str, dtype: str, device: str) -> Any:
    """The same weights in transformers; a GGUF through its own reader."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmx.formats.hub import locate

    located = locate(model)
    place = {"gguf_file": located.path.name} if located.kind == "gguf" else {}
    folder = located.path.parent if place else located.path
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **place)
    return loaded.to(device).eval()


def static_rate(model: Any, jobs: Sequence[Job], batch: int) -> float:
    """Batches of `batch` requests one after the other, in order; each until its longest output is done."""
    import torch

    began = time.perf_counter()
    for at in range(0, len(jobs), batch):
        part = jobs[at : at + batch]
        width, steps = max(len(job.prompt) for job in part), max(job.output_len for job in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(part):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        with torch.inference_mode():
            made = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=False,
                max_new_tokens=steps,
                min_new_tokens=steps,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert made.shape == (len(part), width + steps), "a static batch must give every token that was asked for"
    return sum(job.output_len for job in jobs) / (time.perf_counter() - began)


def continuous_rate(llm: Any, jobs: Sequence[Job]) -> float:
    """All requests at once."""
    began = time.perf_counter()
    outputs = llm.generate([list(job.prompt) for job in jobs], [forced(job.output_len) for job in jobs])
    seconds = time.perf_counter() - began
    given = [len(output.outputs[0].token_ids) for output in outputs]
    assert given == [job.output_len for job in jobs], "every token that was asked for, and no more"
    return sum(given) / seconds


def rounds(llm: Any, static: Any, flags: argparse.Namespace) -> dict[str, list[float]]:
    """Rates by contender. Prompts differ from round to round, so that no prefix is cached; lengths are the same."""
    spans = parse_span(flags.input_len, "--input-len"), parse_span(flags.output_len, "--output-len")
    ids = prompt_ids(llm)
    warm_up = [Job(random_prompt(ids, 16, f"warm-up/{i}"), 2) for i in range(4)]
    continuous_rate(llm, warm_up)
    static_rate(static, warm_up, 4)
    rates: dict[str, list[float]] = {"llmx": [], **{f"static_{batch}": [] for batch in flags.batches}}
    lengths = mixed_lengths(flags.requests, *spans, flags.seed)
    for turn in range(flags.rounds):
        jobs = [
            Job(random_prompt(ids, n_in, f"{flags.seed}/{turn}/{i}"), n_out) for i, (n_in, n_out) in enumerate(lengths)
        ]
        rates["llmx"].append(continuous_rate(llm, jobs))
        for batch in flags.batches:
            rates[f"static_{batch}"].append(static_rate(static, jobs, batch))
        figures = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        say(f"round {turn + 1} of {flags.rounds}: {figures} output tokens/s")
    return rates


def main() -> None:
    flags = arguments()
    from llmx.bench.stats import repetitions
    from llmx.llm import LLM
    from llmx.report import Report

    with LLM(flags.model, dtype=flags.dtype, device=flags.device, threads=flags.threads) as llm:
        static = load_transformers(flags.model, flags.dtype, flags.device)
        rates = rounds(llm, static, flags)
        info, metrics = llm.info, llm.metrics()
    best = [max(values) for values in zip(*(rates[f"static_{batch}"] for batch in flags.batches), strict=True)]
    ratios = [ours / theirs for ours, theirs in zip(rates["llmx"], best, strict=True)]
    median = statistics.median(ratios)
    say(f"llmx gives {median:.2f} times the output tokens/s of the better static batch (rounds: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)})")  # fmt: skip
    results: dict[str, Any] = {
        "median_ratio": median,
        "ratios": ratios,
        "tokens_per_second": {name: repetitions(values) for name, values in rates.items()},
        "most_running": metrics.most_running,
        "cached_tokens": metrics.cached_tokens,
        "requests": flags.requests,
        "input_len": flags.input_len,
        "output_len": flags.output_len,
        "dtype": flags.dtype,
        "threads": info.threads,
    }
    report = Report(
        "continuous_vs_static",
        results,
        model={"name": info.model, "parameters": info.parameters, "schemes": info.schemes},
        definitions=DEFINITIONS,
        kernels=dict(info.kernels),
        seeds={"workload": flags.seed},
    )
    publish(report, flags.json, ("torch", "transformers", "gguf"))


if __name__ == "__main__":
    main()
