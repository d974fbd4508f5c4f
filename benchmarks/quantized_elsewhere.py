"""Do other engines load and run what `llmx quantize` writes, and do they compute the same?

Each checkpoint is given to each engine in a process of its own, with the same token ids. `gap` is the mean absolute
difference of the log-probabilities that the engine and llmx give to each of those tokens, in nats; `loss` is the same
between llmx on the checkpoint and llmx on the source. An engine that reads the checkpoint rightly has a gap well below
the loss: both use the same weights, and differ in rounding alone (activations in 8 bits, where a format asks for them,
are rounded there and not here). Exit code 3 where a gap is above --most, or an engine fails.

    llmx quantize MODEL --awq -o A; llmx quantize MODEL --gptq -o B ...
    python benchmarks/quantized_elsewhere.py --source MODEL --vllm PYTHON --transformers PYTHON A B ...

Peers' own checkpoints are compared in the same way: with --source their source, and the folders that they wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

TEXT = """Gold was found in the river in the spring of 1849, and within a year the village had become a town of four
thousand people. Most of them had come by sea. They lived in tents, then in houses of wood, and the first school was
opened in a room above the bakery. When the gold was gone, the people stayed: the valley grew apples and pears."""
DEFINITIONS = {
    "gap": "mean |log-probability of the engine - of llmx| over the tokens of a text, in nats, on one checkpoint",
    "largest": "the largest of these differences",
    "shift": "the mean of these differences with their sign: weights that are read wrongly make a text less likely",
    "loss": "the same mean between llmx on the checkpoint and llmx on its source",
}


def score(engine: str, model: str, ids: list[int]) -> dict[str, Any]:
    """Log-probabilities of ids[1:] by `engine`, and its versions. Runs in whichever Python has the engine."""
    return {"llmx": of_llmx, "vllm": of_vllm, "transformers": of_transformers}[engine](model, ids)


def of_llmx(model: str, ids: list[int]) -> dict[str, Any]:
    from llmx import LLM, SamplingParams

    with LLM(model, dtype="float32", activations="bf16", kv_cache_dtype="float32", kv_cache_bytes=1 << 28) as llm:
        found = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert found is not None
    return {"scores": [one.value for one in found if one is not None], "versions": versions("llmx", "torch")}


def of_vllm(model: str, ids: list[int]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 512, "max_num_seqs": 4, "gpu_memory_utilization": 0.3}  # of all memory, also on a CPU
    llm = LLM(model, enforce_eager=True, disable_log_stats=True, **sizes)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs
    scores = [one[token].logprob for token, one in zip(ids[1:], found[1:], strict=True)]
    return {"scores": scores, "versions": versions("vllm", "torch", "transformers")}


def of_transformers(model: str, ids: list[int]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.inference_mode():
        scores = found(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    taken = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return {"scores": taken, "versions": versions("transformers", "torch", "compressed-tensors")}


def versions(*packages: str) -> dict[str, str]:
    installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    return {package: installed[package] for package in packages if package in installed}


def in_process(python: str, engine: str, model: Path, ids: list[int]) -> dict[str, Any]:
    """{"scores", "versions"}, or {"error": the last line that says something}."""
    command = [python, __file__, "--score", engine, str(model), json.dumps(ids)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        ran = subprocess.run(
            [*command, str(answer)], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if answer.exists():
            said: dict[str, Any] = json.loads(answer.read_text())
            return said
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    return {"error": lines[-1][:400] if lines else f"exit code {ran.returncode}"}


def differences(one: list[float], other: list[float]) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {"gap": sum(gaps) / len(gaps), "largest": max(gaps), "shift": (sum(one) - sum(other)) / len(one)}


def main() -> int:
    if sys.argv[1:2] == ["--score"]:
        engine, model, ids, answer = sys.argv[2:]
        Path(answer).write_text(json.dumps(score(engine, model, json.loads(ids))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--source", required=True, type=Path, help="the model that they were made from")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--transformers", help="a Python that has transformers and compressed-tensors")
    parser.add_argument("--most", type=float, default=0.1, help="largest gap that is none, in nats")
    parser.add_argument("--json", type=Path, default=None)
    flags = parser.parse_args()

    from _common import publish, say

    from llmx.formats.hub import locate
    from llmx.report import Report
    from llmx.tokenizer import load_tokenizer

    ids = load_tokenizer(locate(str(flags.source))).encode(TEXT)
    engines = [(name, python) for name in ("vllm", "transformers") if (python := getattr(flags, name))]
    source = in_process(sys.executable, "llmx", flags.source, ids)
    if "error" in source:
        raise SystemExit(f"llmx on {flags.source}: {source['error']}")
    results: dict[str, Any] = {}
    failed = False
    for checkpoint in flags.checkpoints:
        ours = in_process(sys.executable, "llmx", checkpoint, ids)
        if "error" in ours:
            say(f"{checkpoint.name}: llmx: {ours['error']}")
            results[checkpoint.name], failed = {"llmx": ours}, True
            continue
        loss = differences(ours["scores"], source["scores"])["gap"]
        say(f"{checkpoint.name}: loss {loss:.4f}")
        found: dict[str, Any] = {"loss": loss}
        for name, python in engines:
            theirs = in_process(python, name, checkpoint, ids)
            if "error" in theirs:
                found[name], failed = theirs, True
                say(f"  {name}: {theirs['error']}")
                continue
            found[name] = differences(theirs["scores"], ours["scores"]) | {"versions": theirs["versions"]}
            failed |= found[name]["gap"] > flags.most
            gap, largest, shift = (found[name][figure] for figure in ("gap", "largest", "shift"))
            say(f"  {name}: gap {gap:.4f}, largest {largest:.4f}, shift {shift:+.4f}")
        results[checkpoint.name] = found
    publish(
        Report("quantized_elsewhere", results, model={"name": str(flags.source)}, definitions=DEFINITIONS), flags.json
    )
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
