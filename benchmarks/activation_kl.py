"""What activations and KV in 8 bits cost: KL divergence to float32 with the same weights, and llama.cpp's.

usage: python benchmarks/activation_kl.py --text wikitext.raw [--perplexity PATH/llama-perplexity] MODEL.gguf [...]

The reference are llmx's own logits of each file with float32 activations and KV by the reference kernels, over the
text's first --chunks windows of 512 tokens (the second half of each is scored), kept in llama-perplexity's format in a
temporary folder: 0.5 GB for 20 windows of 49152 tokens. llama-perplexity reads the same file, so its figures are
against the same numbers; it multiplies with activations in 8 bits, and keeps KV in 16. Perplexities are divided by that
of the float32 run itself: the file's is lower, as it holds nothing more than 16 nats below the likeliest token.

Exit code 3 where llmx's mean KL divergence, share of equal likeliest tokens or perplexity is beyond LIMITS, or its KL
with KV in 16 bits is above llama.cpp's by more than the standard error of their difference.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from _common import publish, say
from eval_llama_cpp import kld_of, llama

from llmx.config import EngineConfig
from llmx.errors import UsageError
from llmx.evals.logits_file import LogitsFile
from llmx.evals.protocol import LLAMA, Protocol
from llmx.evals.run import Findings, Model, Plan, evaluate, open_tokenizer
from llmx.evals.text import read_file
from llmx.formats.hub import locate
from llmx.report import Report

CTX = 512
LLAMA_CPP = "llama.cpp"
REFERENCE = {"dtype": "float32", "kv_cache_dtype": "float32", "activations": "bf16"}  # bf16: not quantised
BF16, INT8 = "int8 activations, bf16 KV", "int8 activations, int8 KV"
CONFIGURATIONS = {
    "bf16 activations, bf16 KV": {"activations": "bf16", "kv_cache_dtype": "bfloat16"},
    BF16: {"activations": "int8", "kv_cache_dtype": "bfloat16"},
    INT8: {"activations": "int8", "kv_cache_dtype": "int8"},
    "int8-pow2 activations, bf16 KV": {"activations": "int8-pow2", "kv_cache_dtype": "bfloat16"},
    "int8-pow2 activations, int8 KV": {"activations": "int8-pow2", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class Limit:
    """Most mean KL divergence (nats), least share of positions with the same likeliest token, most |ppl ratio - 1|."""

    kld: float
    same_top: float | None
    ppl: float


LIMITS = {BF16: Limit(4.5e-3, 0.955, 0.005), INT8: Limit(6e-3, None, 0.005)}


def llmx(flags: argparse.Namespace, model: str, options: dict[str, str], **plan: Any) -> dict[str, Any]:
    """The results of one evaluation. UsageError where this llmx has no such option."""
    # A configuration that this version can't have is one of the figures, not the end of the others.
    if unknown := sorted(set(options) - {field.name for field in fields(EngineConfig)}):
        raise UsageError(f"this llmx has no {', '.join(unknown)}")
    located = locate(model)
    config = EngineConfig(model=model, threads=flags.threads, **options)
    found = Findings(Plan(Protocol(LLAMA, CTX), flags.chunks, **plan))
    evaluate(Model(config, located, open_tokenizer(located)), None, found, say)
    assert found.info is not None
    about = {
        "dtype": found.info.dtype,
        "kv_cache_dtype": found.info.kv_cache_dtype,
        "kernels": dict(found.info.kernels),
    }
    return found.results() | {"about": about}


def reference(flags: argparse.Namespace, model: str, path: Path) -> tuple[LogitsFile, float]:
    """The model's logits in float32 by the reference kernels, and their perplexity."""
    before = os.environ.get("LLMX_KERNELS")
    os.environ["LLMX_KERNELS"] = "reference"
    try:
        results = llmx(flags, model, REFERENCE, written=read_file(flags.text), save_logits=path)
    finally:
        os.environ.pop("LLMX_KERNELS")
        if before is not None:
            os.environ["LLMX_KERNELS"] = before
    return LogitsFile(path), results["perplexity"]["mean"]


def compare(flags: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    path, found = folder / "reference.logits", dict[str, Any]()
    say(f"{model}: float32")
    logits, perplexity = reference(flags, model, path)
    for name, options in CONFIGURATIONS.items():
        say(f"{model}: {name}")
        began = time.monotonic()
        try:
            results = llmx(flags, model, options, logits=logits)
        except UsageError as error:
            found[name] = {"missing": str(error)}
            say(f"  {error}")
            continue
        found[name] = kld_of(results) | {"about": results["about"], "seconds": time.monotonic() - began}
    if flags.perplexity:
        say(f"{model}: {LLAMA_CPP}")
        began = time.monotonic()
        theirs = llama(flags, model, "--kl-divergence", "--kl-divergence-base", str(path))
        found[LLAMA_CPP] = theirs | {"seconds": time.monotonic() - began}
    for one in found.values():
        if "missing" not in one:
            one["ppl_to_float32"] = one["perplexity_kld"][0] / perplexity
    return found


def verdicts(found: dict[str, Any]) -> list[str]:
    """What is beyond its limit."""
    wrong = []
    for name, limit in LIMITS.items():
        if name not in found or "missing" in found[name]:
            continue
        kld, same, ratio = found[name]["kld"][0], found[name]["same_top"][0], found[name]["ppl_to_float32"]
        if kld > limit.kld:
            wrong.append(f"{name}: mean KL {kld:.5f} > {limit.kld}")
        if limit.same_top is not None and same < 100 * limit.same_top:
            wrong.append(f"{name}: same top {same:.2f} % < {100 * limit.same_top} %")
        if abs(ratio - 1) > limit.ppl:
            wrong.append(f"{name}: perplexity ratio {ratio:.5f}")
    if LLAMA_CPP in found and "kld" in found.get(BF16, {}):
        (ours, error), (theirs, their_error) = found[BF16]["kld"], found[LLAMA_CPP]["kld"]
        if ours - theirs > math.hypot(error, their_error):
            wrong.append(f"{BF16}: mean KL {ours:.5f} ± {error:.5f} > llama.cpp's {theirs:.5f} ± {their_error:.5f}")
    return wrong


def table(model: str, found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"| {Path(model).name} | mean KL | same top | perplexity / float32's | 99.9 % KL |",
        "|---|---|---|---|---|",
    ]
    for name, one in found.items():
        if "missing" in one:
            lines.append(f"| {name} | {one['missing']} | | | |")
            continue
        kld, same, ratio, tail = (one[figure] for figure in ("kld", "same_top", "ppl_to_float32", "kld_p99_9"))
        lines.append(
            f"| {name} | {1e3 * kld[0]:.2f} ± {1e3 * kld[1]:.2f} e-3 | {same[0]:.1f} ± {same[1]:.1f} % | "
            f"{ratio:.4f} | {tail[0]:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--perplexity", help="the llama-perplexity binary")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 file, such as WikiText-2's test split")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="default: stdout")
    flags = parser.parse_args()
    results, wrong = {}, []
    for model in flags.models:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(flags, model, Path(folder))
        results[Path(model).name] = found
        wrong += [f"{Path(model).name}: {line}" for line in verdicts(found)]
        say(table(model, found))
    publish(Report("activation_kl", results | {"beyond_limits": wrong}), flags.json, ("torch",))
    for line in wrong:
        say(line)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
