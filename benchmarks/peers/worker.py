"""One engine in a process of its own, run by whichever Python has it, asked through lines of JSON.

usage: PYTHON worker.py ENGINE OPTIONS   (a JSON object: model, threads, and the engine's own)

It first says what it is: {"about": {...}} or {"error": ...}. A line {"prompts": [[ids], ...], "tokens": n} is then
answered by {"first": seconds or null, "seconds": of all, "tokens": [[ids], ...]}: greedy, exactly n tokens for each
prompt whatever they are, nothing remembered of earlier prompts. `first` is known where one prompt's tokens can be seen
as they come; `early` of them came with the first (one where it isn't said). Only the standard library is used outside
the engines' classes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import metadata
from typing import Any

Answer = dict[str, Any]
LONGEST = 1024  # tokens of the longest sequence that is asked for
MOST = 32  # sequences at once
KV_BYTES = 1 << 30


class Llmx:
    """Through `LLM`: engine, sampler and detokenising. Options: any of EngineConfig's."""

    def __init__(self, options: dict[str, Any]) -> None:
        from dataclasses import fields

        from llmx import LLM
        from llmx.config import EngineConfig

        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(options) - known):
            raise SystemExit(f"this llmx has no {', '.join(unknown)}")
        sizes = {"max_model_len": LONGEST, "max_num_seqs": MOST, "kv_cache_bytes": KV_BYTES}
        self.llm = LLM(config=EngineConfig(**(sizes | options)))

    def about(self) -> Answer:
        info = self.llm.info
        names = ("parameters", "pass_bytes", "schemes", "dtype", "kv_cache_dtype", "threads", "load_seconds")
        return {name: getattr(info, name) for name in names} | {"kernels": dict(info.kernels)}

    def run(self, prompts: list[list[int]], tokens: int) -> Answer:
        from llmx.bench.workload import forced

        began = time.perf_counter()
        if len(prompts) == 1:
            deltas = [(time.perf_counter(), delta.token_ids) for delta in self.llm.open(prompts[0], forced(tokens))]
            seen = [(clock - began, list(ids)) for clock, ids in deltas if ids]
            times = {"first": seen[0][0], "early": len(seen[0][1]), "seconds": seen[-1][0]}
            return times | {"tokens": [[token for _, ids in seen for token in ids]]}
        found = self.llm.generate(prompts, forced(tokens))
        seconds = time.perf_counter() - began
        return {"first": None, "seconds": seconds, "tokens": [list(one.outputs[0].token_ids) for one in found]}

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text)

    def vocabulary(self) -> list[int]:
        from llmx.bench.run import prompt_ids

        return prompt_ids(self.llm)

    def ranked(self, prompt: list[int], tokens: int) -> list[dict[int, float]]:
        """Log-probabilities of the likeliest tokens at each of the next positions; the first is what is taken."""
        from llmx import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=20)
        output = self.llm.generate([prompt], params)[0].outputs[0]
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return [{token: scored.value} | dict(scored.top) for token, scored in pairs]


class OpenVino:
    """OpenVINO GenAI's pipeline with paged attention, which reads a GGUF itself. Its defaults, but for the threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size = MOST, 1
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = options.pop("max_num_batched_tokens", 4096)
        self.genai, properties = genai, {"INFERENCE_NUM_THREADS": options["threads"]}
        self.pipe = genai.LLMPipeline(options["model"], "CPU", scheduler_config=scheduler, **properties)

    def about(self) -> Answer:
        return {"versions": versions("openvino", "openvino-genai")}

    def run(self, prompts: list[list[int]], tokens: int) -> Answer:
        import numpy as np
        import openvino as ov

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        config.apply_chat_template = False
        ids = np.array(prompts, np.int64)
        inputs = self.genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        found = self.pipe.generate(inputs, config)
        seconds = time.perf_counter() - began
        first = found.perf_metrics.get_ttft().mean / 1e3 if len(prompts) == 1 else None
        return {"first": first, "seconds": seconds, "tokens": [list(map(int, one)) for one in found.tokens]}


class Vllm:
    """vLLM without a server, from a folder of dense weights."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        sizes = {"max_model_len": LONGEST, "max_num_seqs": MOST, "enable_prefix_caching": False}
        self.llm = LLM(options["model"], dtype=options["dtype"], disable_log_stats=True, **sizes)
        self.dtype = options["dtype"]

    def about(self) -> Answer:
        return {"dtype": self.dtype, "versions": versions("vllm", "torch", "transformers")}

    def run(self, prompts: list[list[int]], tokens: int) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        found = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"first": None, "seconds": seconds, "tokens": [list(one.outputs[0].token_ids) for one in found]}


class Transformers:
    """generate() of transformers over one static batch, from a folder of dense weights."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options["threads"])
        self.dtype = options["dtype"]
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, self.dtype)).eval()

    def about(self) -> Answer:
        return {"dtype": self.dtype, "versions": versions("torch", "transformers")}

    def run(self, prompts: list[list[int]], tokens: int) -> Answer:
        import torch

        ids = torch.tensor(prompts)
        rules = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
        began = time.perf_counter()
        with torch.inference_mode():
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **rules)
        seconds = time.perf_counter() - began
        return {"first": None, "seconds": seconds, "tokens": found[:, ids.shape[1] :].tolist()}


ENGINES: dict[str, Any] = {"llmx": Llmx, "openvino": OpenVino, "vllm": Vllm, "transformers": Transformers}


def versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


def answer(engine: Any, asked: dict[str, Any]) -> Answer:
    if "encode" in asked:
        return {"ids": [engine.encode(text) for text in asked["encode"]]}
    if "vocabulary" in asked:
        return {"ids": engine.vocabulary()}
    if "ranked" in asked:
        return {"ranked": [list(one.items()) for one in engine.ranked(asked["ranked"], asked["tokens"])]}
    found: Answer = engine.run(asked["prompts"], asked["tokens"])
    if (counts := [len(one) for one in found["tokens"]]) != [asked["tokens"]] * len(asked["prompts"]):
        raise RuntimeError(f"{asked['tokens']} tokens were asked for each prompt; it gave {counts}")
    return found


def main() -> None:
    # What libraries print goes to the log, not between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        engine = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
        said = {"about": engine.about()}
    except (Exception, SystemExit) as error:  # whatever it is, who asked is told
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return
    print(json.dumps(said), file=out, flush=True)
    for line in sys.stdin:
        try:
            said = answer(engine, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=out, flush=True)


if __name__ == "__main__":
    main()
