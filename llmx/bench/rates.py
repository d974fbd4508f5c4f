"""Prefill and decode rates of one request alone, as llama-bench measures them: a warm-up, then repetitions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmx.bench.workload import forced, random_prompt
from llmx.errors import LlmxError

if TYPE_CHECKING:
    from llmx.llm import LLM


def arrivals(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[float, list[tuple[float, int]]]:
    """(submission, [(clock, tokens)]) of one greedy request that gives exactly `tokens` tokens."""
    sent = time.perf_counter()
    seen = [(time.perf_counter(), len(delta.token_ids)) for delta in llm.open(list(prompt), forced(tokens))]
    seen = [(clock, count) for clock, count in seen if count]
    given = sum(count for _, count in seen)
    if given != tokens:
        raise LlmxError(f"The engine gave {given} tokens where {tokens} were asked for.")
    return sent, seen


def prefill_rates(llm: LLM, ids: Sequence[int], length: int, repeat: int, seed: int) -> Iterator[float]:
    """Prompt tokens per second to the first token; every prompt is new, so no prefix is cached."""
    for i in range(repeat + 1):
        sent, seen = arrivals(llm, random_prompt(ids, length, f"prefill/{seed}/{i}"), 1)
        if i:
            yield length / (seen[0][0] - sent)


def decode_rates(llm: LLM, ids: Sequence[int], tokens: int, repeat: int, seed: int) -> Iterator[float]:
    """Tokens per second over `tokens` steps of one sequence that begins with one token."""
    for i in range(repeat + 1):
        _, seen = arrivals(llm, random_prompt(ids, 1, f"decode/{seed}/{i}"), tokens + 1)
        first, last = seen[0], seen[-1]
        if i:
            yield (tokens + 1 - first[1]) / (last[0] - first[0])
