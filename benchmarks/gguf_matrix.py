"""Every model family x every type of `llmx convert-gguf`: llama.cpp loads the file and computes what llmx does of it.

    python benchmarks/gguf_matrix.py --llama-cpp BIN

The models are the conformance tests' tiny ones (random weights, transformers builds them), once with rows of whole
blocks of 256 and, for a few types, as they are, where fallbacks take over. Each file is loaded by llama-perplexity.
llama.cpp rounds activations where weights are packed; so llmx's probabilities of the file are held against llama.cpp's
of the same weights written as F32 by the package gguf (the KL divergence must be next to nothing), and llama.cpp's own
of the file against the same (what its rounding does). Exits 3 where one does not load or is another model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from _common import ROOT, publish, say
from _llama_cpp import Failed, as_f32, save_logits, tool

from llmx.config import EngineConfig
from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_types import MIXTURES, Asked
from llmx.errors import LlmxError
from llmx.evals.logits_file import LogitsFile
from llmx.evals.protocol import LLAMA, Protocol
from llmx.evals.run import Findings, Model, Plan, evaluate, open_tokenizer
from llmx.formats.hub import Located, locate
from llmx.report import Report

sys.path[:0] = [str(ROOT / "tests")]

import tokenizer_samples as samples  # noqa: E402
from tiny_models import Tiny, every_tiny, make  # noqa: E402

CTX, CHUNKS = 256, 2  # llama.cpp gives a text no less, and chooses longrope's list by that
VOCAB = 576  # more than either tokenizer has: the rest is padding
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 8}
NARROW_TYPES = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs", "q8_0")
SENTENCEPIECE = ("Gemma", "Mistral", "Phi3")  # beginnings of architectures
DEFINITIONS = {
    "kld": "mean KL divergence of llmx, reading the file, from llama.cpp reading its weights as F32, nats",
    "kld_llama_cpp": "of llama.cpp reading the file, from the same",
}


def widened(tiny: Tiny, wide: bool) -> Tiny:
    """With the vocabulary of the tokenizers, and rows of whole blocks of 256, if wanted."""
    options = dict(tiny.options) | {"vocab_size": VOCAB}
    if wide:
        options |= WIDE
        options |= {key: 32 for key in ("head_dim", "query_pre_attn_scalar") if key in options}
    return Tiny(tiny.family, tiny.architecture, options, tiny.index)


def build(tiny: Tiny, folder: Path) -> Path:
    saved = make(tiny, folder)
    if tiny.architecture.startswith(SENTENCEPIECE):
        samples.save(samples.llama2(), saved.folder, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    else:
        ends = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        samples.save(samples.byte_level(), saved.folder, tokenizer_config=ends)
    return saved.folder


def probabilities(logits: Path) -> np.ndarray:
    """(positions, vocab) log-probabilities of a logits file, f64."""
    file = LogitsFile(logits)
    found = []
    for chunk in range(file.layout.chunks):
        codes, scale, least = file.read(chunk, 0, file.layout.rows)
        found.append(codes.astype(np.float64) * scale[:, None] + least[:, None])
    return np.concatenate(found)


def between(wanted: Path, found: Path) -> float:
    """Mean KL divergence of what one logits file holds from another's.

    llama-perplexity prints it too, but may end before all that it says is written.
    """
    p, q = probabilities(wanted), probabilities(found)
    return float((np.exp(p) * (p - q)).sum(1).mean())


def divergence(path: Path, logits: Path) -> float:
    """llmx's of the file, by its own engine and kernels."""
    located = locate(str(path))
    found = Findings(Plan(Protocol(LLAMA, CTX), CHUNKS, logits=LogitsFile(logits)))
    config = EngineConfig(model=str(path), dtype="float32", activations="bf16", threads=1)
    evaluate(Model(config, located, open_tokenizer(located)), None, found, lambda line: None)
    return float(found.results()["kld"]["mean"])


def cell(options: argparse.Namespace, folder: Path, kind: str, work: Path) -> dict[str, Any]:
    """One file. A reason why llmx does not write it, or why llama.cpp does not load it, is its result."""
    path, logits = work / "model.gguf", work / "logits"
    notes: list[str] = []
    wanted = Wanted(Asked(kind), path, force=True)
    try:
        convert(Located("hf", folder, folder.name, False), wanted, lambda done, total: None, notes.append)
    except LlmxError as error:
        return {"ok": True, "not_written": error.message}
    found: dict[str, Any] = {"types": dict(Counter(t.tensor_type.name for t in gguf.GGUFReader(path).tensors))}
    found |= {"notes": notes} if notes else {}
    program = tool(options.llama_cpp, "llama-perplexity")
    try:
        exact = Path(as_f32(path, work / "f32.gguf"))
        save_logits(program, exact, options.text, logits, CTX, CHUNKS, 1)
        save_logits(program, path, options.text, work / "packed", CTX, CHUNKS, 1)
    except Failed as error:
        return found | {"ok": False, "llama_cpp": str(error)}
    found["kld"], found["kld_llama_cpp"] = divergence(path, logits), between(logits, work / "packed")
    near = found["kld"] <= options.noise and found["kld_llama_cpp"] <= options.rounding
    found["said"] = [note for note in notes if "llama.cpp runs" in note]  # of what it does not do with such a file
    return found | {"ok": near or bool(found["said"])}


def shown(found: dict[str, Any]) -> str:
    if "not_written" in found:
        return f"not written: {found['not_written']}"
    if "llama_cpp" in found:
        return f"not loaded: {found['llama_cpp']}"
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(found["types"].items()))
    state = "known" if found["said"] else "ok" if found["ok"] else "DIFFERS"
    said = f"{state}, {found['kld']:.1e} ({found['kld_llama_cpp']:.1e}), {types}"
    return said + "".join(f"; {note}" for note in found["said"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="BIN", help="the folder of llama-perplexity")
    parser.add_argument("--types", default=",".join(MIXTURES))
    parser.add_argument("--models", default="", help="only those with this in their name")
    parser.add_argument("--noise", type=float, default=1e-5, help="nats: a mean KL divergence that is rounding in F32")
    parser.add_argument("--rounding", type=float, default=0.05, help="nats: what llama.cpp's rounding may do")
    parser.add_argument("--json", type=Path, help="default: stdout")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        options.text = work / "text.txt"
        options.text.write_text("\n".join(t for t in samples.TORTURE.values() if "\x00" not in t) * 8, "utf-8")
        for tiny in (tiny for tiny in every_tiny() if options.models in tiny.name):
            for wide in (True, False):
                name = f"{tiny.name}{'' if wide else ', narrow'}"
                folder = build(widened(tiny, wide), work / name)
                results[name] = {}
                for kind in options.types.split(","):
                    if wide or kind in NARROW_TYPES:
                        results[name][kind] = cell(options, folder, kind, work)
                        say(f"{name:18} {kind:7} {shown(results[name][kind])}")
    publish(Report("gguf_matrix", results, definitions=DEFINITIONS), options.json, ("torch", "transformers", "gguf"))
    sys.exit(0 if all(one["ok"] for row in results.values() for one in row.values()) else 3)


if __name__ == "__main__":
    main()
