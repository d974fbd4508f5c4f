"""Ids that llmx and llama.cpp's server give for the 200 texts of tests/torture.py, by the tokenizers of GGUF files.

    python benchmarks/gguf_tokens.py --llama-cpp BIN MODEL.gguf [MODEL.gguf ...]

A file may be a vocabulary only, as llama.cpp's source has them: it is put around a model of nothing. Each text is read
with control tokens found in it and not, with what is put around a text and without. Exits 3 where ids differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, publish, say
from _llama_cpp import llama_server, tool

from llmx.errors import LlmxError
from llmx.formats.gguf import open_gguf, stored_pairs
from llmx.formats.gguf_write import Entry, Value, encode, plan, write_parts
from llmx.report import Report
from llmx.tokenizer import Tokenizer, load_tokenizer

sys.path[:0] = [str(ROOT / "tests")]

from torture import TEXTS  # noqa: E402

HIDDEN, CONTROL = 32, 3
# What llama.cpp ends a text at, and therefore takes for control tokens, whatever the file says they are.
ENDS = ("</s>", "<eos>", "<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>")
DEFINITIONS = {
    "bos_once": "the text begins with BOS: llama.cpp puts another before it, llmx does not",
    "taken_for_control": "a token in the text is none by the file, and one to llama.cpp by its name",
}


def theirs(url: str, text: str, special: bool, parse: bool) -> list[int]:
    body = {"content": text, "add_special": special, "parse_special": parse}
    request = urllib.request.Request(f"{url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def write_model(path: Path, tokenizer: dict[str, bytes], vocab: int) -> None:
    """A llama of one layer whose weights are zeros, with this tokenizer.* metadata (encoded)."""
    sizes: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HIDDEN,
        "llama.vocab_size": vocab,
    }
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    entries = [Entry("token_embd.weight", "F16", (vocab, HIDDEN)), Entry("output_norm.weight", "F32", (HIDDEN,))]
    entries += [Entry(f"blk.0.{name}.weight", "F16", (HIDDEN, HIDDEN)) for name in names]
    entries += [Entry(f"blk.0.{name}_norm.weight", "F32", (HIDDEN,)) for name in ("attn", "ffn")]
    pairs = {key: encode(value) for key, value in sizes.items()} | tokenizer
    write_parts([path], plan(pairs, entries), lambda entry: iter([memoryview(np.zeros(entry.nbytes, np.uint8))]))


def whole(file: Path, folder: Path) -> Path:
    """The file, or a model around it."""
    if len(open_gguf(file).names()):
        return file
    pairs = {key: raw for key, raw in stored_pairs(file).items() if key.startswith("tokenizer.")}
    path = folder / "vocabulary.gguf"
    write_model(path, pairs, len(open_gguf(file).metadata["tokenizer.ggml.tokens"]))
    return path


def taken_for_control(file: Path) -> list[str]:
    """Tokens of the file that llama.cpp makes control tokens by their names alone."""
    metadata = open_gguf(file).metadata
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    pairs = zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False)
    return [token for token, kind in pairs if token in ENDS and kind != CONTROL]


def compare(file: Path, tokenizer: Tokenizer, url: str) -> dict[str, Any]:
    """How many readings are equal, and which differ for which reason."""
    renamed = taken_for_control(file)
    found: dict[str, Any] = {"compared": 0, "equal": 0, "bos_once": 0, "taken_for_control": 0, "differing": []}
    for text, special, parse in product(TEXTS, (True, False), (True, False)):
        wanted = theirs(url, text, special, parse)
        ids = tokenizer.encode(text, add_special=special, parse_special=parse)
        found["compared"] += 1
        if wanted == ids:
            found["equal"] += 1
        elif special and wanted == [tokenizer.bos_id, *ids] and ids[:1] == wanted[:1]:
            found["bos_once"] += 1
        elif any(token in text for token in renamed):
            found["taken_for_control"] += 1
        else:
            flags = {"add_special": special, "parse_special": parse}
            found["differing"].append({"text": text, **flags, "llama.cpp": wanted, "llmx": ids})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="BIN", help="the folder of llama-server")
    parser.add_argument("--show", type=int, default=5, help="differences to print for each file")
    parser.add_argument("--json", type=Path, help="default: stdout")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tokenizer = load_tokenizer(model)
            except LlmxError as error:
                results[model.name] = {"refused": error.message, "differing": []}
                say(f"{model.name}: refused: {error.message[:160]}")
                continue
            with llama_server(tool(options.llama_cpp, "llama-server"), str(whole(model, Path(folder))), 1) as url:
                results[model.name] = compare(model, tokenizer, url)
        found = results[model.name]
        counts = ", ".join(f"{key.replace('_', ' ')} {n}" for key, n in found.items() if isinstance(n, int))
        say(f"{model.name}: {counts}, differing {len(found['differing'])}")
        for one in found["differing"][: options.show]:
            say(f"    {one}")
    publish(Report("gguf_tokens", results, definitions=DEFINITIONS), options.json, ("tokenizers",))
    sys.exit(3 if any(one["differing"] for one in results.values()) else 0)


if __name__ == "__main__":
    main()
