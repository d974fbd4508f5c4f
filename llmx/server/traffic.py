"""What requests did and how long it took, under vLLM's metric names: its dashboards work by search and replace.

Tokens are counted here as `usage` counts them, so the sums agree; what only the engine knows comes from its `Metrics`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmx.config import STEP_BOUNDS, EngineInfo, Metrics
from llmx.core import Delta
from llmx.server.prometheus import Counter, Family, Gauge, Histogram, exposition

if TYPE_CHECKING:
    from llmx.llm import Stream

# Seconds; vLLM's bounds, which its dashboards draw.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
REASONS = ("stop", "length", "abort", "error")


class Traffic:
    """All that /metrics shows. The engine's part is `None` until it has answered once."""

    def __init__(self, model: str, info: EngineInfo, prefix_caching: bool) -> None:
        self.labels = {"model_name": model, "engine": "0"}
        self.prefix_caching = prefix_caching
        tokens = _one_two_five(info.max_model_len)
        self.deltas = 0  # pieces of text that came, of all requests
        self.prompt_tokens = Counter("llmx:prompt_tokens_total", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = Counter("llmx:generation_tokens_total", "Tokens generated for requests.")
        self.queries = Counter("llmx:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
        self.hits = Counter("llmx:prefix_cache_hits_total", "Of those, found there.")
        self.success = Counter("llmx:request_success_total", "Texts that ended, by reason; a prompt with n = 3 has 3.")
        self.rejected = Counter("llmx:request_rejected_total", "Requests turned away because of load, by code.")
        self.first = Histogram("llmx:time_to_first_token_seconds", "From the request to a text's first token.", FIRST)
        self.next = Histogram("llmx:inter_token_latency_seconds", "From each token of a text to its next.", NEXT)
        self.per_token = Histogram(
            "llmx:request_time_per_output_token_seconds", "A text's seconds per token after its first.", NEXT
        )
        self.whole = Histogram("llmx:e2e_request_latency_seconds", "From the request to a text's end.", WHOLE)
        self.queued = Histogram("llmx:request_queue_time_seconds", "From the request to its first step.", WHOLE)
        self.prefill = Histogram(
            "llmx:request_prefill_time_seconds", "From a prompt's first step to its first token.", WHOLE
        )
        self.decode = Histogram("llmx:request_decode_time_seconds", "From a text's first token to its end.", WHOLE)
        self.prompt_sizes = Histogram("llmx:request_prompt_tokens", "Tokens of a prompt.", tokens)
        self.inference = Histogram("llmx:request_inference_time_seconds", "From a text's first step to its end.", WHOLE)
        self.text_sizes = Histogram("llmx:request_generation_tokens", "Tokens of a finished text.", tokens)
        self.longest = Histogram(
            "llmx:request_max_num_generation_tokens", "Tokens of the longest text of a prompt that has ended.", tokens
        )
        self.computed = Histogram(
            "llmx:request_prefill_kv_computed_tokens", "Tokens of a prompt that were not in the prefix cache.", tokens
        )
        self.texts_asked = Histogram("llmx:request_params_n", "Texts asked for a prompt.", (1, 2, 5, 10, 20))
        self.tokens_asked = Histogram("llmx:request_params_max_tokens", "The most tokens asked for a text.", tokens)
        for counter in (self.prompt_tokens, self.generation_tokens, self.queries, self.hits):
            counter.add(0)
        for reason in REASONS:
            self.success.add(0, finished_reason=reason)
        self.cache = Gauge("llmx:cache_config_info", "The KV cache's configuration, in labels.")
        self.cache.set(
            1,
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
            cache_dtype=info.kv_cache_dtype,
            enable_prefix_caching=str(prefix_caching),
        )

    def exposition(self, engine: Metrics | None) -> str:
        """The answer to GET /metrics."""
        mine = [value for value in vars(self).values() if isinstance(value, Counter | Histogram)]
        return exposition([*_of_engine(engine), *mine], self.labels)


def _of_engine(metrics: Metrics | None) -> list[Family]:
    if metrics is None:
        return []
    running = Gauge("llmx:num_requests_running", "Sequences that the engine computes.")
    running.set(metrics.running)
    waiting = Gauge("llmx:num_requests_waiting", "Sequences that wait for a first step, or for one after preemption.")
    waiting.set(metrics.waiting)
    used = Gauge("llmx:kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all of them.")
    used.set((metrics.total_blocks - metrics.free_blocks) / max(1, metrics.total_blocks))
    preemptions = Counter("llmx:num_preemptions_total", "Sequences put back into the queue for want of KV blocks.")
    preemptions.add(metrics.preemptions)
    sizes = Histogram("llmx:iteration_tokens_total", "Tokens that a step computed.", STEP_BOUNDS)
    sizes.counts, sizes.sum = list(metrics.step_sizes), float(metrics.computed_tokens)
    drafted = Counter("llmx:spec_decode_num_draft_tokens_total", "Drafted tokens that were verified, of ended texts.")
    drafted.add(metrics.drafted_tokens)
    accepted = Counter("llmx:spec_decode_num_accepted_tokens_total", "Of those, accepted.")
    accepted.add(metrics.accepted_tokens)
    busy = Counter("llmx:engine_step_seconds_total", "Time inside engine steps.")
    busy.add(metrics.step_seconds)
    return [running, waiting, used, preemptions, sizes, drafted, accepted, busy]


class Watch:
    """The times of one prompt's texts. `counted`: False where the generated token is no part of the answer."""

    def __init__(self, traffic: Traffic, stream: Stream, opened: float, counted: bool) -> None:
        self.traffic, self.stream, self.opened, self.counted = traffic, stream, opened, counted
        self.began = False
        self.open: dict[int, tuple[float, float, int]] = {}  # text -> time of its first token, of its last, tokens
        self.ended: set[int] = set()

    def saw(self, delta: Delta) -> None:
        """The next piece of a text, as it comes."""
        now, traffic, count = time.monotonic(), self.traffic, len(delta.token_ids) * self.counted
        traffic.deltas += 1
        if not self.began:
            self._begin()
        if delta.index not in self.open:
            self.open[delta.index] = (now, now, count)
            traffic.first.observe(now - self.opened)
            traffic.prefill.observe(max(0.0, now - self.stream.started))
        elif count:
            first, last, before = self.open[delta.index]
            self.open[delta.index] = (first, now, before + count)
            traffic.next.observe((now - last) / count, count)
        traffic.generation_tokens.add(count)
        if delta.finish_reason:
            self._end(delta.index, delta.finish_reason)

    def close(self, reason: str) -> None:
        """What has not ended yet, ends here."""
        for index in set(range(self.stream.params.n)) - self.ended:
            self._end(index, reason)

    def _begin(self) -> None:
        self.began, size, traffic = True, len(self.stream.prompt_token_ids), self.traffic
        traffic.prompt_tokens.add(size)
        traffic.prompt_sizes.observe(size)
        traffic.queued.observe(max(0.0, self.stream.started - self.opened))
        traffic.computed.observe(size - self.stream.cached_tokens)
        traffic.texts_asked.observe(self.stream.params.n)
        traffic.tokens_asked.observe(self.stream.params.max_tokens or 0)
        if traffic.prefix_caching:
            traffic.queries.add(size)
            traffic.hits.add(self.stream.cached_tokens)

    def _end(self, index: int, reason: str) -> None:
        now, traffic = time.monotonic(), self.traffic
        self.ended.add(index)
        traffic.success.add(finished_reason=reason)
        if reason in ("stop", "length"):
            first, _, count = self.open[index]
            traffic.whole.observe(now - self.opened)
            traffic.decode.observe(now - first)
            traffic.inference.observe(now - self.stream.started)
            traffic.text_sizes.observe(count)
            if count > 1:
                traffic.per_token.observe((now - first) / (count - 1))
        if len(self.ended) == self.stream.params.n and self.open:
            traffic.longest.observe(max(count for _, _, count in self.open.values()))


def _one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, … up to `most`."""
    found = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
    return [value for value in found if value <= most]
