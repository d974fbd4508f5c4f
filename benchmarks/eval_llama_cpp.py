"""Perplexity and KL divergence of `llmx eval` and of llama-perplexity, on the same chunks of a text.

usage: python benchmarks/eval_llama_cpp.py --perplexity PATH/llama-perplexity --text wikitext.raw MODEL.gguf [...]

For each model, with the text's first --chunks windows of 512 tokens:

  as stored  perplexity of the file in both tools, in llmx with exact activations (bf16) and with those that its kernels
             round to 8 bits (int8), as llama.cpp's do, each in its own way: they may differ, within the standard error
  exact      KL divergence of the same weights rounded to Q4_0, both sets written as F32, F32 cache: the measure with
             both tools' own logits, on the logits file that llama-perplexity wrote
  ours       the logits file that llmx wrote for the F32 weights, read by llama-perplexity --kl-divergence

Exit code 3 where perplexities differ by more than the standard error, or KL divergences by more than --tolerance.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import publish, say
from _llama_cpp import EXACT, as_f32

from llmx.config import EngineConfig
from llmx.evals.logits_file import LogitsFile
from llmx.evals.protocol import LLAMA, Protocol
from llmx.evals.run import Findings, Model, Plan, evaluate, open_tokenizer
from llmx.evals.text import read_file
from llmx.formats.hub import locate
from llmx.report import Report

_FIGURES = {
    "perplexity": r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)",
    "perplexity_kld": r"Mean PPL\(Q\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "kld": r"Mean    KLD:\s*([\d.e-]+) ±\s*([\d.e-]+)",
    "kld_median": r"Median  KLD:\s*(-?[\d.]+)",
    "kld_p99": r"99\.0%   KLD:\s*([\d.]+)",
    "kld_p99_9": r"99\.9%   KLD:\s*([\d.]+)",
    "kld_max": r"Maximum KLD:\s*([\d.]+)",
    "same_top": r"Same top p:\s*([\d.]+) ±\s*([\d.]+)",
    "delta_p_mean": r"Mean    Δp:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "delta_p_rms": r"RMS Δp    :\s*([\d.]+) ±\s*([\d.]+)",
    "ln_ppl_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "ppl_ratio": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "correlation": r"Cor\(ln\(PPL\(Q\)\), ln\(PPL\(base\)\)\):\s*([\d.]+)%",
}


def llama(options: argparse.Namespace, model: str, *flags: str) -> dict[str, list[float]]:
    """What llama-perplexity prints, by name: the value, and its error where it gives one."""
    command = [options.perplexity, "-m", model, "-c", "512", "-t", str(options.threads), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"{options.perplexity} ended with exit code {done.returncode}:\n{text[-2000:]}")
    found = {name: re.search(pattern, text) for name, pattern in _FIGURES.items()}
    return {name: [float(value) for value in match.groups()] for name, match in found.items() if match}


def llmx(options: argparse.Namespace, model: str, activations: str = "bf16", **plan: Any) -> dict[str, Any]:
    """The results of `llmx eval MODEL --chunks N`, F32 throughout, unless `activations` are to be rounded to 8 bits."""
    located = locate(model)
    found = Findings(Plan(Protocol(LLAMA, 512), options.chunks, **plan))
    config = EngineConfig(model=model, dtype="float32", activations=activations, threads=options.threads)
    evaluate(Model(config, located, open_tokenizer(located)), None, found, say)
    return found.results()


def kld_of(results: dict[str, Any]) -> dict[str, list[float]]:
    """Ours under the names of `_FIGURES`, in its units."""
    kld, delta, same = results["kld"], results["delta_p"], results["same_top"]
    found = {
        "kld": [kld["mean"], kld["se"]],
        "kld_median": [kld["median"]],
        "kld_p99": [kld["p99"]],
        "kld_p99_9": [kld["p99.9"]],
        "kld_max": [kld["max"]],
        "same_top": [100 * same["share"], 100 * same["se"]],
        "delta_p_mean": [100 * delta["mean"], 100 * delta["se"]],
        "delta_p_rms": [100 * delta["rms"], 100 * delta["rms_se"]],
        "ln_ppl_ratio": [results["ln_ppl_ratio"]["mean"], results["ln_ppl_ratio"]["se"]],
        "ppl_ratio": [results["ppl_ratio"]["mean"], results["ppl_ratio"]["se"]],
        "correlation": [100 * results["nll_correlation"]],
    }
    if "perplexity" in results:
        found["perplexity_kld"] = [results["perplexity"]["mean"], results["perplexity"]["se"]]
    return found


def compare(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    chunks, text = ("--chunks", str(options.chunks)), ("-f", options.text)
    paths = {name: folder / name for name in ("f32.logits", "ours.logits")}
    full = as_f32(model, folder / "f32.gguf")
    rounded = as_f32(model, folder / "rounded.gguf", rounded=True)

    say(f"{model}: as stored")
    theirs = llama(options, model, *text, *chunks)
    written = read_file(Path(options.text))
    found: dict[str, Any] = {"as_stored": {"llama.cpp": theirs["perplexity"], "agrees": True}}
    value, error = theirs["perplexity"]
    for activations in ("bf16", "int8"):
        mine = llmx(options, model, activations, written=written)["perplexity"]
        found["as_stored"][f"llmx, {activations}"] = [mine["mean"], mine["se"]]
        found["as_stored"]["agrees"] &= abs(mine["mean"] - value) <= min(error, mine["se"])

    say(f"{model}: KL divergence of weights rounded to Q4_0")
    exact = llama(options, full, *text, *chunks, *EXACT, "--save-all-logits", str(paths["f32.logits"]))
    base = ("--kl-divergence", "--kl-divergence-base")
    theirs = llama(options, rounded, *base, str(paths["f32.logits"]), *EXACT)
    ours = llmx(options, rounded, logits=LogitsFile(paths["f32.logits"]))
    found["exact"] = _both(theirs, kld_of(ours), options.tolerance)

    say(f"{model}: llama-perplexity reads our logits file")
    ours = llmx(options, full, written=written, save_logits=paths["ours.logits"])
    found["exact"]["perplexity_of_base"] = {
        "llama.cpp": exact["perplexity"],
        "llmx": [ours["perplexity"]["mean"], ours["perplexity"]["se"]],
    }
    read = llama(options, rounded, *base, str(paths["ours.logits"]), *EXACT)
    found["ours"] = _both(theirs, read, options.tolerance)
    return found


def _both(theirs: dict[str, list[float]], ours: dict[str, list[float]], tolerance: float) -> dict[str, Any]:
    gap = abs(ours["kld"][0] / theirs["kld"][0] - 1)
    rows = {name: {"llama.cpp": theirs[name], "llmx": ours[name]} for name in theirs if name in ours}
    return {"kld_gap": gap, "agrees": gap <= tolerance} | rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--perplexity", required=True, help="the llama-perplexity binary")
    parser.add_argument("--text", required=True, help="a UTF-8 file, such as WikiText-2's test split")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.01, help="share by which KL divergences may differ")
    parser.add_argument("--json", type=Path, help="default: stdout")
    options = parser.parse_args()
    found = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found[Path(model).name] = compare(options, model, Path(folder))
    publish(Report("eval_llama_cpp", found), options.json, ("torch", "gguf"))
    sys.exit(0 if all(part["agrees"] for one in found.values() for part in one.values()) else 3)


if __name__ == "__main__":
    main()
