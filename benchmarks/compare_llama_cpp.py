"""Greedy text of llmx and of llama.cpp's server from the same GGUF: equal, or different first where it was a near-tie.

usage: python benchmarks/compare_llama_cpp.py --server PATH/llama-server MODEL.gguf [MODEL.gguf ...]

Both multiply packed weights with activations in 8 bits, each rounded in its own way, and llama.cpp keeps KV in 16, so
texts may part where two tokens are almost equally likely. Each prompt is therefore compared twice: with the file,
and the margin of the first difference printed (in nats, by llmx's logits), and, with --exact, with activations that are
not rounded: llmx reading the file, llama.cpp the same weights written as F32 (by the package gguf), with an F32 cache.
There texts must be equal up to ties of less than --noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from _llama_cpp import EXACT, as_f32, llama_server

from llmx import LLM, SamplingParams

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "Die drei größten Städte Deutschlands sind",
)


def greedy(url: str, prompt: list[int], count: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def compare(llm: LLM, url: str, text: str, count: int) -> dict[str, Any]:
    """How far the two agree, and how near the tie was where they part."""
    prompt = llm.tokenizer.encode(text)
    theirs = greedy(url, prompt, count)
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=5)
    ours = llm.generate([prompt], params)[0].outputs[0]
    tokens = [t for t in ours.token_ids if t not in llm.tokenizer.eos_ids]
    theirs = [t for t in theirs if t not in llm.tokenizer.eos_ids]
    shared = next((i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b), None)
    result: dict[str, Any] = {"prompt": text, "tokens": len(tokens), "equal": tokens == theirs}
    if shared is not None:
        assert ours.logprobs is not None
        ranked = dict(ours.logprobs[shared].top)
        margin = ours.logprobs[shared].value - ranked.get(theirs[shared], float("-inf"))
        result |= {"parts_at": shared, "ours": tokens[shared], "theirs": theirs[shared], "margin": margin}
    elif not result["equal"]:
        result |= {"parts_at": min(len(tokens), len(theirs)), "margin": float("inf")}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--server", required=True, help="the llama-server binary")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="compare in F32 too")
    parser.add_argument("--noise", type=float, default=1e-3, help="nats: with --exact, a margin that rounding may turn")
    options = parser.parse_args()
    failed = False
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            runs = [("as stored", model, "auto", ())]
            if options.exact:
                runs.append(("as F32", as_f32(model, Path(folder) / "f32.gguf"), "bf16", EXACT))
            for weights, path, activations, flags in runs:
                ours = LLM(model, dtype="float32", activations=activations, kv_cache_bytes=2**29)
                with ours as llm, llama_server(options.server, path, options.threads, *flags) as url:
                    for text in PROMPTS:
                        result = compare(llm, url, text, options.tokens)
                        failed |= weights == "as F32" and result.get("margin", 0.0) > options.noise
                        about = {"model": Path(model).name, "weights": weights}
                        print(json.dumps(about | result, ensure_ascii=False), flush=True)
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
