"""What 4 bits cost by quantizer: KL divergence, perplexity and same likeliest token against the source, time, memory.

Everybody gets the same source, the same calibration tokens and the same group size. Each result is scored by `llmx
eval` (llama.cpp's protocol: windows of 512, their second halves; arithmetic float32, activations not rounded) against
the source's own logits, and each quantizer is a process of its own, whose time and largest memory are taken from the
system. Round-to-nearest is computed here, from `llmx.quantize.grids`.

Exit code 3 where llmx's KL divergence is not below that of every peer with the same method, or its gain over
round-to-nearest (same zero points) is under 50 % for GPTQ and 10 % for AWQ.

    python benchmarks/quantize_quality.py --source DIR --calib TEXT --text OTHER-TEXT --work DIR \\
        --llm-compressor PYTHON --gptqmodel PYTHON
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import publish, say, timed

from llmx.formats.hub import locate
from llmx.quantize.calibration import read
from llmx.report import Report

PEERS = Path(__file__).resolve().parent / "peers" / "quantizers.py"
LLMX = [sys.executable, "-m", "llmx.cli"]
LEAST = {"gptq": ("round-to-nearest-sym", 0.5), "awq": ("round-to-nearest-asym", 0.1)}
RIVALS = {"gptq": ("llm-compressor-gptq", "gptqmodel-gptq"), "awq": ("gptqmodel-awq",)}
DEFINITIONS = {
    "kld": "mean KL divergence from the source's next-token distribution, in nats, and its standard error",
    "same_top": "share of the tokens whose likeliest next token is the source's",
    "seconds, cpu_seconds": "of the quantizer's process, from its start to its end, files written",
    "peak_rss_bytes": "largest resident memory of that process, mapped files too",
}


@dataclass
class Entry:
    """One quantizer. make: writes the folder, and returns what its process took; None: it is there already."""

    name: str
    make: Callable[[Path], dict[str, Any]]
    found: dict[str, Any] = field(default_factory=dict)


def round_to_nearest(source: Path, out: Path, group: int, symmetric: bool) -> dict[str, Any]:
    """A float32 folder whose linears are rounded to group grids and back."""
    import torch

    from llmx.formats.safetensors import write_shard
    from llmx.quantize.driver import open_source
    from llmx.quantize.grids import Rounding
    from llmx.quantize.grids import round_to_nearest as nearest

    opened = open_source(locate(str(source)))
    mine = {unit.name for unit in opened.every}
    checkpoint, tensors = opened.opened.checkpoint, {}
    rounding = Rounding(4, group, symmetric, torch.float16)
    for name in checkpoint.names():
        tensor = checkpoint.read(name).float()
        packed = name.removesuffix(".weight") in mine and name.endswith(".weight")
        tensors[name] = nearest(tensor, rounding).weight() if packed else tensor
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".json" or path.suffix == ".jinja":
            shutil.copy(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    write_shard(out / "model.safetensors", tensors)
    return {}


def entries(flags: argparse.Namespace, tokens: Path) -> list[Entry]:
    calib = ["--calib", str(flags.calib), "--samples", str(flags.samples), "--seq-len", str(flags.length)]

    def ours(method: str) -> Callable[[Path], dict[str, Any]]:
        more = ["--group-size", str(flags.group), *calib]
        return lambda out: timed(
            [*LLMX, "quantize", str(flags.source), method, "-o", str(out), *more], out.with_suffix(".log")
        )

    def theirs(python: str, tool: str) -> Callable[[Path], dict[str, Any]]:
        command = [python, str(PEERS), tool, str(flags.source), str(tokens)]
        return lambda out: timed([*command, str(out), str(flags.group)], out.with_suffix(".log"))

    found = [
        Entry("round-to-nearest-sym", lambda out: round_to_nearest(flags.source, out, flags.group, True)),
        Entry("round-to-nearest-asym", lambda out: round_to_nearest(flags.source, out, flags.group, False)),
        Entry("llmx-gptq", ours("--gptq")),
        Entry("llmx-awq", ours("--awq")),
    ]
    if flags.llm_compressor:
        found.append(Entry("llm-compressor-gptq", theirs(flags.llm_compressor, "llm-compressor-gptq")))
    if flags.gptqmodel:
        found += [Entry(tool, theirs(flags.gptqmodel, tool)) for tool in ("gptqmodel-gptq", "gptqmodel-awq")]
    return found if flags.only is None else [one for one in found if one.name in flags.only.split(",")]


def score(model: Path, logits: Path, report: Path, *more: str) -> dict[str, Any]:
    """`llmx eval` against the kept logits; `more` to keep them."""
    options = [
        "--activations", "bf16", "--dtype", "float32", "--json", str(report), *(more or ["--logits", str(logits)]),
    ]  # fmt: skip
    timed([*LLMX, "eval", str(model), *options], report.with_suffix(".log"))
    found: dict[str, Any] = json.loads(report.read_text())["results"]
    return found


def run(entry: Entry, flags: argparse.Namespace, logits: Path) -> None:
    out: Path = flags.work / entry.name
    took = out.with_suffix(".took.json")
    if not took.exists():
        shutil.rmtree(out, ignore_errors=True)
        took.write_text(json.dumps(entry.make(out)))
    found = score(out, logits, out.with_suffix(".eval.json"))
    entry.found = json.loads(took.read_text()) | {
        "kld": found["kld"], "same_top": found["same_top"], "perplexity": found["perplexity"],
    }  # fmt: skip
    kld, took_s = found["kld"], entry.found.get("seconds")
    said = f"{entry.name}: KLD {kld['mean']:.4f} +- {kld['se']:.4f}, same top {found['same_top']['share']:.1%}, "
    say(f"{said}perplexity {found['perplexity']['mean']:.2f}" + (f", {took_s:.0f} s" if took_s else ""))


def failures(found: dict[str, Any]) -> list[str]:
    said = []
    for method, (plain, least) in LEAST.items():
        mine = found.get(f"llmx-{method}")
        if mine is None:
            continue
        if plain in found:
            gain = 1 - mine["kld"]["mean"] / found[plain]["kld"]["mean"]
            say(f"{method} gains {gain:.1%} over {plain}")
            if gain < least:
                said.append(f"{method} gains {gain:.1%} over {plain}, less than {least:.0%}")
        for rival in RIVALS[method]:
            if rival in found and not mine["kld"]["mean"] < found[rival]["kld"]["mean"]:
                said.append(f"{method} is not better than {rival}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--calib", required=True, type=Path, help="text to calibrate on")
    parser.add_argument("--text", required=True, type=Path, help="text to measure on: another")
    parser.add_argument("--work", required=True, type=Path, help="results are kept there, and not made again")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--llm-compressor", help="a Python that has it")
    parser.add_argument("--gptqmodel", help="a Python that has it")
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--json", type=Path, default=None)
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    tokens, logits = flags.work / "tokens.json", flags.work / "source.logits"
    texts = read(str(flags.calib), locate(str(flags.source)), flags.samples, flags.length, say).texts
    tokens.write_text(json.dumps([list(text) for text in texts]))
    if not logits.exists():
        score(flags.source, logits, flags.work / "source.eval.json", "--save-logits", str(logits),
              "--text", str(flags.text), "--chunks", str(flags.chunks))  # fmt: skip
    every = entries(flags, tokens)
    for entry in every:
        try:
            run(entry, flags, logits)
        except RuntimeError as error:
            say(f"{entry.name} failed: {error}")
            entry.found = {"error": str(error)[:800]}
    found = {entry.name: entry.found for entry in every if "kld" in entry.found}
    wrong = [f"{entry.name} failed" for entry in every if "error" in entry.found] + failures(found)
    results = {"group": flags.group, "calibration_tokens": sum(map(len, texts)), "chunks": flags.chunks,
               "source": json.loads((flags.work / "source.eval.json").read_text())["results"]["perplexity"],
               "quantizers": {entry.name: entry.found for entry in every}, "failures": wrong}  # fmt: skip
    publish(Report("quantize_quality", results, definitions=DEFINITIONS, seeds={}), flags.json)
    for line in wrong:
        say(line)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
