"""How much of the KV cache that is held holds tokens: the paged cache beside contiguous ones, on one schedule.

The real engine runs mixed requests on a tiny random model (what is held does not depend on the weights). After each
step the engine counts the slots that its paged cache holds; a contiguous cache is worked out beside it, for the same
sequences in the same step: each holds one unbroken stretch from its admission to its end.

    python benchmarks/kv_utilisation.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from _common import publish, say

from llmx.bench.stats import share
from llmx.bench.workload import forced, mixed_jobs, parse_span
from llmx.config import EngineConfig

DEFINITIONS = {
    "paged": "sum over steps of tokens that live in the cache / sum over steps of the token slots held for them",
    "contiguous_whole_context": "tokens with final KV / a stretch of max_model_len slots for each running sequence",
    "contiguous_exact": "tokens with final KV / a stretch of prompt + output slots for each running sequence: the best"
    " that a contiguous cache could do, if it knew each output's length from the start",
}


@dataclass
class Held:
    """Token slots, summed over steps."""

    live: int = 0
    whole: int = 0
    exact: int = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", default="32:512")
    parser.add_argument("--output-len", default="16:256")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    flags = arguments()
    from llmx.core import Request
    from llmx.engine.messages import Add
    from llmx.engine.service import Core
    from llmx.report import Report

    spans = parse_span(flags.input_len, "--input-len"), parse_span(flags.output_len, "--output-len")
    length = spans[0].high + spans[1].high
    core = Core.load(
        EngineConfig(
            "random:tiny",
            device="cpu",
            max_model_len=length,
            max_num_seqs=flags.max_num_seqs,
            block_size=flags.block_size,
        )
    )
    for i, job in enumerate(mixed_jobs(range(core.info.vocab_size), flags.requests, *spans, flags.seed)):
        refused = core.handle(Add(Request(str(i), job.prompt, replace(forced(job.output_len), seed=0))))
        assert not refused, refused
    held, scheduler = Held(), core.engine.scheduler
    while core.busy:
        core.step()
        held.live += sum(sequence.computed for sequence in scheduler.running)
        held.whole += length * len(scheduler.running)
        held.exact += sum(s.prompt_len + s.request.max_tokens for s in scheduler.running)
    metrics = core.measure()
    results = {
        "paged": share(metrics.slots_live, metrics.slots_held),
        "contiguous_whole_context": share(held.live, held.whole),
        "contiguous_exact": share(held.live, held.exact),
        "steps": metrics.steps,
        "most_running": metrics.most_running,
        "preemptions": metrics.preemptions,
        "slots_held": metrics.slots_held,
        "slots_live": metrics.slots_live,
        "tokens_with_final_kv": held.live,
        "sequence_steps": held.whole // length,
        "max_model_len": length,
        "block_size": core.info.block_size,
        "requests": flags.requests,
        "input_len": flags.input_len,
        "output_len": flags.output_len,
    }
    for name in DEFINITIONS:
        say(f"{name}: {results[name]:.1%} of the slots held hold a token")
    report = Report(
        "kv_utilisation",
        results,
        definitions=DEFINITIONS,
        kernels=dict(core.info.kernels),
        seeds={"workload": flags.seed},
    )
    publish(report, flags.json, ("torch",))


if __name__ == "__main__":
    main()
