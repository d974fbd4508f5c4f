"""/metrics: Prometheus' format, vLLM's names, and sums that are those of `usage`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server.fake import FakeLLM, forever, says
from server.running import Running, eventually, running
from server.scraping import scraped

from llmx.config import Metrics
from llmx.llm import LLM

FINISHED = "llmx:request_success_total"


def one_request(client: OpenAI, seed: int) -> tuple[Any, int]:
    """A request drawn by `seed`: its usage, and how many texts it asked for."""
    draw = random.Random(seed)
    n, prompts = draw.choice([1, 1, 1, 2, 3]), draw.choice([1, 1, 2])
    words = "A prompt that begins like all others. "
    words += " ".join(draw.choices(["the", "quick", "fox", "saves", "nine", "Hello"], k=draw.randint(1, 30)))
    sampling: dict[str, Any] = {
        "model": "tiny",
        "n": n,
        "seed": seed,
        "max_tokens": draw.randint(1, 12),
        "stop": draw.choice([None, ["e"], ["qu", "ox"]]),
        "extra_body": {"ignore_eos": draw.random() < 0.5},
    }
    stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    kind = draw.randrange(5)
    if kind == 0:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": words}], **sampling)
        return answer.usage, n
    if kind == 1:
        chunks = client.chat.completions.create(messages=[{"role": "user", "content": words}], **sampling, **stream)
        return list(chunks)[-1].usage, n
    prompt = [f"{words} {at}" for at in range(prompts)]
    if kind == 2:
        return list(client.completions.create(prompt=prompt, **sampling, **stream))[-1].usage, n * prompts
    if kind == 3:
        sampling |= {"echo": True, "max_tokens": 0, "logprobs": 1}
    return client.completions.create(prompt=prompt, **sampling).usage, n * prompts


def test_the_sums_of_200_random_requests_are_those_of_their_usage(server: Running, client: OpenAI) -> None:
    before = scraped(server)
    with ThreadPoolExecutor(8) as pool:
        usages = list(pool.map(lambda seed: one_request(client, seed), range(200)))
    after = scraped(server)

    def grew(name: str) -> float:
        return after[name] - before[name]

    prompts = sum(usage.prompt_tokens for usage, _ in usages)
    generated = sum(usage.completion_tokens for usage, _ in usages)
    texts = sum(count for _, count in usages)
    assert grew("llmx:prompt_tokens_total") == prompts == grew("llmx:request_prompt_tokens_sum")
    assert grew("llmx:generation_tokens_total") == generated == grew("llmx:request_generation_tokens_sum")
    assert grew("llmx:prefix_cache_queries_total") == prompts
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage, _ in usages)
    assert grew("llmx:prefix_cache_hits_total") == cached > 0
    assert grew(f"{FINISHED} finished_reason=stop") + grew(f"{FINISHED} finished_reason=length") == texts
    assert grew(f"{FINISHED} finished_reason=abort") == grew(f"{FINISHED} finished_reason=error") == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time", "request_prefill_time"):
        assert grew(f"llmx:{name}_seconds_count") == texts
    assert grew("llmx:request_queue_time_seconds_count") == grew("llmx:request_prompt_tokens_count")
    assert 0 < grew("llmx:inter_token_latency_seconds_count") <= generated
    assert grew("llmx:e2e_request_latency_seconds_sum") >= grew("llmx:time_to_first_token_seconds_sum") > 0
    assert grew("llmx:request_params_n_sum") == texts
    assert grew("llmx:request_prefill_kv_computed_tokens_sum") == prompts - cached
    assert grew("llmx:request_inference_time_seconds_count") == texts
    assert grew("llmx:request_inference_time_seconds_sum") >= grew("llmx:request_decode_time_seconds_sum")
    for name in ("params_n", "params_max_tokens", "max_num_generation_tokens", "prefill_kv_computed_tokens"):
        assert grew(f"llmx:request_{name}_count") == grew("llmx:request_prompt_tokens_count")
    assert 0 < grew("llmx:request_max_num_generation_tokens_sum") <= generated
    assert (after["llmx:num_requests_running"], after["llmx:num_requests_waiting"]) == (0, 0)
    assert after["llmx:kv_cache_usage_perc"] == 0


def test_a_histograms_buckets_add_up(server: Running) -> None:
    server.post("completions", {"prompt": "the", "max_tokens": 5, "ignore_eos": True})
    found = scraped(server)
    for name in {key.split("_bucket ")[0] for key in found if "_bucket " in key}:
        counts = [value for key, value in found.items() if key.startswith(f"{name}_bucket ")]
        assert counts == sorted(counts)
        assert counts[-1] == found[f"{name}_count"]


def test_steps_and_their_tokens_are_counted(tiny: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 2**20}
    with LLM(str(tiny), max_num_seqs=4, max_num_batched_tokens=16, **options) as llm, running(llm) as server:
        body = {"prompt": list(range(10, 50)), "max_tokens": 5, "ignore_eos": True}
        assert server.post("completions", body)[0] == 200
        found = scraped(server)
    # A prompt of 40 tokens in steps of 16, 16 and 8, the last of which gives a token; then one step for each of four.
    steps = "llmx:iteration_tokens_total"
    at_most = {"1.0": 4.0, "8.0": 5.0, "16.0": 7.0, "+Inf": 7.0}
    assert {bound: found[f"{steps}_bucket le={bound}"] for bound in at_most} == at_most
    assert (found[f"{steps}_count"], found[f"{steps}_sum"]) == (7.0, 44.0)
    assert found["llmx:spec_decode_num_draft_tokens_total"] == 0


def test_drafts_are_told() -> None:
    llm = FakeLLM(says("hi"))
    llm.metrics = lambda _: Metrics(drafted_tokens=7, accepted_tokens=4)  # type: ignore[method-assign]
    with running(llm) as server:
        found = scraped(server)
    assert found["llmx:spec_decode_num_draft_tokens_total"] == 7
    assert found["llmx:spec_decode_num_accepted_tokens_total"] == 4


# vLLM's names (v1/metrics/loggers.py and v1/spec_decode/metrics.py) that its dashboards ask for, but for those of
# features that are not built: LoRA, multi-modal and external caches, sleeping, data-parallel engines.
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total
num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total request_prompt_tokens_count
request_generation_tokens_count iteration_tokens_total_count request_max_num_generation_tokens_count
request_params_n_count request_params_max_tokens_count time_to_first_token_seconds_count
inter_token_latency_seconds_count request_time_per_output_token_seconds_count e2e_request_latency_seconds_count
request_queue_time_seconds_count request_inference_time_seconds_count request_prefill_time_seconds_count
request_decode_time_seconds_count request_prefill_kv_computed_tokens_count spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total"""


def test_vllms_names_are_there() -> None:
    with running(FakeLLM(says("hi"))) as server:
        found = {key.split(" ")[0] for key in scraped(server)}
    assert not {f"llmx:{name}" for name in VLLM.split()} - found


def test_the_caches_shape_is_told(server: Running, llm: LLM) -> None:
    (key,) = [key for key in scraped(server) if key.startswith("llmx:cache_config_info")]
    assert f"block_size={llm.info.block_size}" in key
    assert f"num_gpu_blocks={llm.info.num_blocks}" in key
    assert "enable_prefix_caching=True" in key


def test_without_a_prefix_cache_nothing_is_looked_up_in_it(tiny: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 2**20}
    with LLM(str(tiny), prefix_caching=False, **options) as llm, running(llm) as server:
        server.post("completions", {"prompt": "the", "max_tokens": 2})
        assert scraped(server)["llmx:prefix_cache_queries_total"] == 0


def test_a_client_that_leaves_is_an_abort() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm) as server:
        body = {"prompt": "hi", "stream": True, "n": 2}
        server.send_and_leave("completions", body, lambda got: b"data:" in got)
        assert eventually(lambda: scraped(server)[f"{FINISHED} finished_reason=abort"] == 2)
        assert scraped(server)[f"{FINISHED} finished_reason=stop"] == 0


def test_an_engine_that_does_not_answer_leaves_the_rest_of_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.run.WATCH_SECONDS", 3600.0)  # else the server stops while we ask
    llm = FakeLLM(says("hi"))
    with running(llm) as server:
        llm.failed = "The engine is gone."
        found = scraped(server)
        assert "llmx:generation_tokens_total" in found
        assert "llmx:num_requests_running" not in found
