"""GGUF files of `llmx convert-gguf` beside those that llama.cpp's llama-quantize makes from the same weights.

    python benchmarks/gguf_peers.py --llama-cpp BIN --source MODEL --types q4_k_m,q5_k_m,q3_k_m [--imatrix FILE]

MODEL is a Hugging Face folder or a GGUF file of f32, f16 or bf16. Equal bytes are equal quality; of tensors that differ
the error in the weights is compared, by importance where that was given. With --text both files are also scored
against MODEL by llama-perplexity and by `llmx eval` (their KL divergences). Times are of whole processes, taken in
turns, and what each program says its own work took. Exits 3 where ours is worse.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import torch
from _common import publish, say
from _llama_cpp import LLMX, kl_divergence, run, save_logits, tool
from torch import Tensor

from llmx.convert.gguf_importance import read_importance
from llmx.formats.gguf import Gguf, open_gguf, stored_pairs
from llmx.report import Report

CTX = 512
ROWS = 4096  # of a tensor at a time


def llmx(*arguments: str) -> tuple[float, dict[str, Any]]:
    """Seconds, and the report's results."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        seconds, _ = run([*LLMX, *arguments, "--json", str(report)])
        found: dict[str, Any] = json.loads(report.read_text())["results"]
    return seconds, found


def ours(options: argparse.Namespace, kind: str, out: Path) -> dict[str, float]:
    weighted = ["--imatrix", str(options.imatrix)] if options.imatrix else []
    arguments = ["--type", kind, "--threads", str(options.threads), "--force", *weighted]
    seconds, results = llmx("convert-gguf", str(options.source), "-o", str(out), *arguments)
    return {"process": seconds, "work": results["seconds"]}


def theirs(options: argparse.Namespace, source: Path, kind: str, out: Path) -> dict[str, float]:
    weighted = ["--imatrix", str(options.imatrix)] if options.imatrix else []
    command = [
        tool(options.llama_cpp, "llama-quantize"),
        *weighted,
        str(source),
        str(out),
        kind.upper(),
        str(options.threads),
    ]
    seconds, said = run(command)
    work = re.search(r"quantize time = *([\d.]+) ms", said)
    return {"process": seconds, "work": float(work[1]) / 1000 if work else seconds}


def squared_error(file: Gguf, exact: Gguf, name: str, importance: Tensor | None) -> float:
    """Mean of the squared differences, weighted by the inputs' importance."""
    total = 0.0
    kinds = [gguf.GGMLQuantizationType[one.stored(name).kind] for one in (file, exact)]
    read = [one.read(name) for one in (file, exact)]
    for parts in zip(*(one.split(ROWS) for one in read), strict=True):
        made, true = (
            gguf.dequantize(part.contiguous().view(torch.uint8).numpy(), kind)
            for part, kind in zip(parts, kinds, strict=True)
        )
        square = torch.from_numpy(made - true).double() ** 2
        total += float((square if importance is None else square * importance).sum())
    return total / prod(file.stored(name).shape)


def differences(options: argparse.Namespace, source: Path, pair: tuple[Path, Path]) -> dict[str, Any]:
    """Tensors and metadata of (ours, theirs)."""
    mine, other, exact = (open_gguf(path) for path in (*pair, source))
    if missing := [name for name in other.names() if name not in mine]:
        raise SystemExit(f"our file has no tensor {missing[0]}")
    weights = read_importance(options.imatrix) if options.imatrix else {}
    differ, worse = [], []
    for name in other.names():
        kinds = [one.stored(name).kind for one in (mine, other)]
        same = (mine.read(name) == other.read(name)).double().mean() if kinds[0] == kinds[1] else None
        if same == 1:
            continue
        importance = torch.from_numpy(weights[name]) if len(weights.get(name, ())) == 1 else None
        errors = [squared_error(one, exact, name, importance) ** 0.5 for one in (mine, other)]
        share = None if same is None else float(same)
        differ.append({"name": name, "types": kinds, "rms_error": errors, "equal_bytes": share})
        larger = mine.stored(name).nbytes > other.stored(name).nbytes
        if larger or errors[0] > errors[1] * (1 + options.tolerance):
            worse.append(name)
    pairs = [stored_pairs(path) for path in pair]
    keys = sorted(key for key in {*pairs[0], *pairs[1]} if pairs[0].get(key) != pairs[1].get(key))
    return {
        "tensors": len(other.names()),
        "identical": len(other.names()) - len(differ),
        "only_ours": sorted({*mine.names()} - {*other.names()}),
        "differing": differ,
        "worse": worse,
        "order_equal": list(mine.names()) == list(other.names()),
        "metadata": {key: [str(one.metadata.get(key))[:80] for one in (mine, other)] for key in keys},
    }


def scored(options: argparse.Namespace, model: Path, logits: Path, source: Path) -> dict[str, float]:
    """Mean KL divergence from the source, by either program."""
    program = tool(options.llama_cpp, "llama-perplexity")
    flags = ["--text", str(options.text), "--chunks", str(options.chunks), "--dtype", "float32"]
    _, results = llmx("eval", str(model), "--reference", str(source), *flags, "--threads", str(options.threads))
    return {
        "llama-perplexity": kl_divergence(program, model, logits, CTX, options.threads),
        "llmx eval": results["kld"]["mean"],
    }


def compare(options: argparse.Namespace, source: Path, kind: str, work: Path) -> dict[str, Any]:
    pair = (work / f"ours-{kind}.gguf", work / f"theirs-{kind}.gguf")
    times: dict[str, list[dict[str, float]]] = {"llmx": [], "llama-quantize": []}
    for _ in range(options.runs):
        times["llmx"].append(ours(options, kind, pair[0]))
        times["llama-quantize"].append(theirs(options, source, kind, pair[1]))
    found = differences(options, source, pair)
    found["bytes"] = [path.stat().st_size for path in pair]
    found["seconds"] = {
        name: {what: median(one[what] for one in taken) for what in ("process", "work")}
        for name, taken in times.items()
    }
    found["ok"] = not found["worse"] and not found["only_ours"]
    if options.text and (kind in options.score or found["differing"]):
        found["kld"] = {
            name: scored(options, path, work / "source.logits", source)
            for name, path in zip(("llmx", "llama-quantize"), pair, strict=True)
            if name == "llmx" or found["differing"]
        }
        if found["differing"]:
            mine, other = (found["kld"][name] for name in ("llmx", "llama-quantize"))
            found["ok"] &= all(mine[scorer] <= other[scorer] * (1 + options.tolerance) for scorer in mine)
    if not options.keep:
        for path in pair:
            path.unlink()
    return found


def line(kind: str, found: dict[str, Any]) -> str:
    times = found["seconds"]
    said = f"{kind:7} {found['identical']} of {found['tensors']} tensors identical, "
    said += f"{found['bytes'][0] / 1e6:,.1f} MB (llama-quantize {found['bytes'][1] / 1e6:,.1f}), "
    said += f"{times['llmx']['work']:.2f} s (llama-quantize {times['llama-quantize']['work']:.2f}; "
    said += f"processes {times['llmx']['process']:.2f}, {times['llama-quantize']['process']:.2f})"
    for one in found["differing"]:
        said += f"\n    {one['name']}: {one['types']}, RMS errors {one['rms_error']}, equal bytes {one['equal_bytes']}"
    for key, (mine, other) in found["metadata"].items():
        said += f"\n    {key}: {mine} | {other}"
    return said + (f"\n    KL divergence {found['kld']}" if "kld" in found else "")


def prepare(options: argparse.Namespace, work: Path) -> Path:
    """The source as one GGUF file, and its logits."""
    source: Path = options.source
    if source.is_dir():
        source = work / "source.gguf"
        if not source.exists():
            llmx("convert-gguf", str(options.source), "-o", str(source), "--type", options.source_type)
    logits = work / "source.logits"
    if options.text and not logits.exists():
        program = tool(options.llama_cpp, "llama-perplexity")
        save_logits(program, source, options.text, logits, CTX, options.chunks, options.threads)
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="BIN", help="the folder of llama-quantize")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--source-type", default="f32", help="of the GGUF made of a folder: f32, or what loses nothing")
    parser.add_argument("--imatrix", type=Path, help="given to both")
    parser.add_argument("--types", default="q4_k_m,q5_k_m,q3_k_m")
    parser.add_argument("--runs", type=int, default=1, help="of each, in turns; medians are given")
    parser.add_argument("--text", type=Path, help="score on it: a UTF-8 file")
    parser.add_argument("--score", default="q4_k_m", help="types to score though all is identical; others if it is not")
    parser.add_argument("--chunks", type=int, default=2, help="of --text, of 512 tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="share by which an error may be larger")
    parser.add_argument("--work", type=Path, help="a folder for files")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--json", type=Path, help="default: stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        source, found = prepare(options, work), {}
        for kind in options.types.split(","):
            found[kind] = compare(options, source, kind, work)
            say(line(kind, found[kind]))
    publish(Report("gguf_peers", found), options.json, ("torch", "gguf"))
    sys.exit(0 if all(one["ok"] for one in found.values()) else 3)


if __name__ == "__main__":
    main()
