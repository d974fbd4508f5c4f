"""Makes llama_perplexity.logits and .json: what llama-perplexity says of two tiny models, whose weights are a formula.

usage: python tests/data/make_llama_perplexity.py PATH/llama-perplexity     (needs the package gguf)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CTX, CHUNKS, STRANGE = 32, 7, 0.06
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 48, 2, 4, 2
TEXT = (
    "The sea is never still: it comes and goes, and what it takes away it gives back elsewhere, ground and smoothed. "
    "Whoever lives beside it learns to count in tides; whoever leaves it goes on counting, for a while, out of habit. "
    "In winter the boats lie on the beach, upside down, and the children play house beneath them.\n"
)
FIGURES = {
    "perplexity": r"Mean PPL\(Q\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "reference_perplexity": r"Mean PPL\(base\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "ln_ppl_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "ppl_ratio": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "ppl_difference": r"Mean PPL\(Q\)-PPL\(base\)\s*:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "nll_correlation": r"Cor\(ln\(PPL\(Q\)\), ln\(PPL\(base\)\)\):\s*([\d.]+)%",
    "kld": r"Mean    KLD:\s*([\d.]+) ±\s*([\d.]+)",
    "kld.max": r"Maximum KLD:\s*([\d.]+)",
    "kld.p99.9": r"99\.9%   KLD:\s*([\d.]+)",
    "kld.p99": r"99\.0%   KLD:\s*([\d.]+)",
    "kld.median": r"Median  KLD:\s*([\d.]+)",
    "kld.p1": r" 1\.0%   KLD:\s*(-?[\d.]+)",
    "kld.min": r"Minimum KLD:\s*(-?[\d.]+)",
    "delta_p": r"Mean    Δp:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "delta_p.max": r"Maximum Δp:\s*([\d.]+)",
    "delta_p.p95": r"95\.0%   Δp:\s*([\d.]+)",
    "delta_p.p25": r"25\.0%   Δp:\s*(-?[\d.]+)",
    "delta_p.min": r"Minimum Δp:\s*(-?[\d.]+)",
    "delta_p.rms": r"RMS Δp    :\s*([\d.]+) ±\s*([\d.]+)",
    "same_top": r"Same top p:\s*([\d.]+) ±\s*([\d.]+)",
}


def tokens() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary with a few merges, <s> and </s> last; and the merges."""
    shown = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else None for b in range(256)]
    spare = iter(range(256, 512))
    bytes_ = [c if c is not None else chr(next(spare)) for c in shown]
    merges = ["t h", "th e", "Ġ t", "i n", "e r", "o u"]
    return [*bytes_, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>"], merges


def weight(name: str, shape: tuple[int, ...], strange: float) -> np.ndarray:
    """Looks random and needs no generator: sines of large steps, another phase for each tensor. `strange` bends it."""
    phase = sum(map(ord, name)) % 97
    count = np.arange(int(np.prod(shape)), dtype=np.float64)
    values = np.sin(count * 12.9898 + phase) * 43758.5453
    values = 2 * (values - np.floor(values)) - 1
    values = values + strange * np.sin(count * 0.7 + phase)
    if "norm" in name:
        return (1 + 0.2 * values).astype(np.float32)
    scale = 5.0 if name.startswith("output") else 2.2
    return (scale / np.sqrt(shape[-1]) * values).astype(np.float32).reshape(shape)


def write_model(path: Path, strange: float = 0.0) -> None:
    """A Llama of GGUF, F32."""
    import gguf

    names, merges = tokens()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([1] * (len(names) - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(names) - 2)
    writer.add_eos_token_id(len(names) - 1)
    writer.add_add_bos_token(True)
    narrow = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(names), HIDDEN), "output_norm": (HIDDEN,), "output": (len(names), HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.attn_q": (HIDDEN, HIDDEN), f"blk.{i}.attn_output": (HIDDEN, HIDDEN)}
        shapes |= {f"blk.{i}.attn_k": (narrow, HIDDEN), f"blk.{i}.attn_v": (narrow, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_gate": (INNER, HIDDEN), f"blk.{i}.ffn_up": (INNER, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_down": (HIDDEN, INNER)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", weight(name, shape, strange))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def say(binary: str, *flags: str) -> str:
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "-c", str(CTX), "-t", "1"]
    done = subprocess.run([binary, *flags, *exact], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main() -> None:
    binary, here = sys.argv[1], Path(__file__).parent
    logits = here / "llama_perplexity.logits"
    with tempfile.TemporaryDirectory() as folder:
        base, other, text = Path(folder) / "base.gguf", Path(folder) / "other.gguf", Path(folder) / "text"
        write_model(base)
        write_model(other, STRANGE)
        text.write_text(TEXT)
        plain = say(binary, "-m", str(base), "-f", str(text), "--chunks", str(CHUNKS), "--save-all-logits", str(logits))
        said = say(binary, "-m", str(other), "--kl-divergence", "--kl-divergence-base", str(logits))
    found = {name: re.search(pattern, said) for name, pattern in FIGURES.items()}
    figures = {name: [float(value) for value in match.groups()] for name, match in found.items() if match}
    assert len(figures) == len(FIGURES), set(FIGURES) - set(figures)
    final = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", plain)
    assert final
    figures["perplexity_of_base"] = [float(value) for value in final.groups()]
    logits.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
