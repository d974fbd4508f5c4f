"""Text, scores and hidden states are the same alone, batched, chunked, preempted, on a prefix hit and overlapped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine.common import (
    KINDS,
    SIZE,
    STOPS,
    Truth,
    Watched,
    engine,
    expect,
    few,
    key_of,
    requests,
    truth,
)

from llmx.core import Request
from llmx.core import Sequence as Text

each_model = pytest.mark.parametrize(("windows", "dtype"), KINDS, ids=[f"{n}-{str(d)[6:]}" for n, d in KINDS])


def check(run: Watched, wanted: Sequence[Request], want: Truth) -> list[Text]:
    sequences = run.run(wanted)
    compared = expect(run, sequences, want)
    computed = sum(len(s.tokens) - 1 - s.cached for s in sequences if s.sibling == 0)
    assert compared >= computed, "some hidden states were not compared"
    return sequences


@each_model
def test_the_texts_that_others_are_compared_with_are_varied(windows: str, dtype: torch.dtype) -> None:
    found = truth(windows, dtype, requests()).said
    assert len({s.tokens for s in found.values() if len(s.tokens) == 16}) >= 12
    assert len(set(found["greedy", 0].tokens) | set(found["long_greedy", 0].tokens)) > 8
    assert found["stop", 0].finish == "stop"
    assert found["stop", 0].stopped_by in STOPS
    assert len(found["stop", 0].tokens) < 16
    assert len(found["min_tokens", 0].tokens) > 6
    assert not set(found["min_tokens", 0].tokens[:6]) & set(STOPS)
    assert 5 not in found["bias", 0].tokens
    assert len({found["choices", i].tokens for i in range(3)}) == 3
    assert len(found["logprobs", 0].logprobs) == 16
    assert all(len(found[f"max_{n}", 0].tokens) == n for n in range(1, 12))


@each_model
def test_batched_and_again_on_a_prefix_hit(windows: str, dtype: torch.dtype) -> None:
    want, run = truth(windows, dtype, requests()), engine(windows, dtype)
    sequences = check(run, requests(), want)
    assert max(run.rows) > 8
    assert max(run.tokens) > 300
    assert not any(s.cached for s in sequences)
    cached = {key_of(s): s.cached for s in check(run, requests(), want)}
    assert cached["long_seeded", 0] == 304
    assert cached["logprobs", 0] == 0, "a request for prompt logprobs takes no hit"
    assert sum(n > 0 for n in cached.values()) > 5
    assert all(n % SIZE == 0 for n in cached.values())


@each_model
@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked(windows: str, dtype: torch.dtype, chunk: int) -> None:
    run = engine(windows, dtype, budget=chunk, running=min(chunk, 12))
    check(run, requests(), truth(windows, dtype, requests()))
    assert run.chunks["long_seeded", 0] > 310 // chunk - 1
    assert max(run.tokens) <= chunk


@each_model
def test_chunks_of_one_token(windows: str, dtype: torch.dtype) -> None:
    run = engine(windows, dtype, budget=1, running=1)
    check(run, few(), truth(windows, dtype, requests()))
    assert run.chunks["long_greedy", 0] == 130


@each_model
@pytest.mark.parametrize(("overlap", "chunk"), [(False, 800), (True, 33)])
def test_preempted(windows: str, dtype: torch.dtype, overlap: bool, chunk: int) -> None:
    blocks = 10 if windows == "window" else 46
    run = engine(windows, dtype, blocks=blocks, budget=chunk, overlap=overlap, watermark=False)
    sequences = check(run, requests(), truth(windows, dtype, requests()))
    assert run.scheduler.preemptions == sum(s.preemptions for s in sequences) > 0
    assert run.recomputed > 0


@each_model
@pytest.mark.parametrize("limits", [{}, {"budget": 24, "running": 8}], ids=["wide", "narrow"])
def test_overlapped(windows: str, dtype: torch.dtype, limits: dict[str, int]) -> None:
    run = engine(windows, dtype, overlap=True, **limits)
    check(run, requests(), truth(windows, dtype, requests()))
    assert max(run.rows) >= 8


def test_overlapped_on_a_prefix_hit() -> None:
    run = engine("mixed", overlap=True)
    want = truth("mixed", torch.float32, requests())
    check(run, requests(), want)
    assert sum(s.cached for s in check(run, requests(), want)) > 300
