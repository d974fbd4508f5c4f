"""How long quantizers take for the same work: the first blocks of a model, the same calibration tokens, turn by turn.

Each run is a process of its own, from its start to the files written. The model is cut to `--layers` blocks, so that
also a slow peer ends; what a process takes besides blocks (imports, loading, writing) counts in full for everybody.
Exit code 3 where the median of a round's ratios, a peer's seconds to llmx's, is under its bound.

    python benchmarks/quantize_time.py --source DIR --calib TEXT --work DIR --autoawq PYTHON --llm-compressor PYTHON
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from _common import publish, say, timed

from llmx.formats.hub import locate
from llmx.formats.safetensors import open_safetensors, write_shard
from llmx.quantize.calibration import read
from llmx.report import Report

PEERS = Path(__file__).resolve().parent / "peers" / "quantizers.py"
# method -> the peer's tool, and how many times as long as llmx it is expected to take
LEAST = {"autoawq-awq": ("--awq", 10.0), "llm-compressor-gptq": ("--gptq", 1.3)}
DEFINITIONS = {"ratio": "the peer's seconds to llmx's in the same round; cpu_ratio: of CPU seconds, of all threads"}


def cut(source: Path, folder: Path, layers: int) -> None:
    """A copy with the first `layers` blocks alone, in float32, in which the peers compute."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype", None)
    config |= {"num_hidden_layers": layers, "torch_dtype": "float32"}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_safetensors(source)
    kept = [
        name
        for name in checkpoint.names()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
    ]
    write_shard(folder / "model.safetensors", {name: checkpoint.read(name).float() for name in kept})


def commands(flags: argparse.Namespace, model: Path, tokens: Path) -> dict[str, list[str]]:
    """tool -> its command without the folder to write, which comes last."""
    found = {}
    for tool, python in (("autoawq-awq", flags.autoawq), ("llm-compressor-gptq", flags.llm_compressor)):
        if python:
            found[tool] = [python, str(PEERS), tool, str(model), str(tokens)]
            ours = [
                sys.executable,
                "-m",
                "llmx.cli",
                "quantize",
                str(model),
                LEAST[tool][0],
                "--calib",
                str(flags.calib),
            ]
            found[f"llmx {LEAST[tool][0]}"] = [
                *ours, "--samples", str(flags.samples), "--seq-len", str(flags.length), "--group-size",
                str(flags.group), "-o",
            ]  # fmt: skip
    return found


def turn(name: str, command: list[str], flags: argparse.Namespace) -> dict[str, Any]:
    out = flags.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    more = [] if name.startswith("llmx") else [str(flags.group)]
    found = timed([*command, str(out), *more], flags.work / f"{name.replace(' ', '')}.log")
    say(f"  {name}: {found['seconds']:.1f} s, {found['cpu_seconds']:.1f} CPU s, {found['peak_rss_bytes'] / 1e9:.2f} GB")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--calib", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--autoawq", help="a Python that has it")
    parser.add_argument("--llm-compressor", help="a Python that has it")
    parser.add_argument("--json", type=Path, default=None)
    flags = parser.parse_args()
    model, tokens = flags.work / "model", flags.work / "tokens.json"
    cut(flags.source, model, flags.layers)
    texts = read(str(flags.calib), locate(str(model)), flags.samples, flags.length, say).texts
    tokens.write_text(json.dumps([list(text) for text in texts]))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands(flags, model, tokens)}
    for number in range(flags.rounds):
        say(f"round {number + 1} of {flags.rounds}")
        for name, command in commands(flags, model, tokens).items():
            runs[name].append(turn(name, command, flags))
    ratios, wrong = {}, []
    for tool, (method, least) in LEAST.items():
        if tool not in runs:
            continue
        pairs = list(zip(runs[tool], runs[f"llmx {method}"], strict=True))
        ratios[tool] = {
            key: statistics.median(peer[of] / ours[of] for peer, ours in pairs)
            for key, of in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds"))
        }
        times, cpu = ratios[tool]["ratio"], ratios[tool]["cpu_ratio"]
        line = f"{tool} took {times:.2f} times as long as llmx {method} ({cpu:.2f} times the CPU seconds)"
        say(f"{line}; at least {least:g} expected")
        if times < least:
            wrong.append(line)
    results = {"layers": flags.layers, "calibration_tokens": sum(map(len, texts)), "ratios": ratios, "runs": runs}
    publish(Report("quantize_time", results, definitions=DEFINITIONS, seeds={}), flags.json)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
