"""The engine against a model written out in the tests: full attention matrices, no cache. An oracle from outside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine.common import WINDOWS, Key, Watched, engine, key_of, model, naive
from engine.drafters import CheckTaps

from llmx.core import Request, SamplingParams
from llmx.core import Sequence as Text

each_model = pytest.mark.parametrize("windows", list(WINDOWS))
PROMPT = tuple((7 * i + i * i) % 96 for i in range(300))
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def wanted(temperature: float = 0.0, length: int = 300, **more: object) -> Request:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, logprobs=3, prompt_logprobs=2)
    return Request(f"t{temperature}", PROMPT[:length], replace(params, **more))  # type: ignore[arg-type]


def check_scores(run: Watched, sequence: Text, scores: torch.Tensor) -> None:
    """scores (T, vocab): naive log-probabilities."""
    found = run.logprobs[key_of(sequence)]
    assert len(found) == len(sequence.output)
    for at, one in enumerate(found, start=sequence.prompt_len - 1):
        assert one.token == sequence.tokens[at + 1]
        assert one.value == pytest.approx(float(scores[at, one.token]), abs=2e-4)
        best = scores[at].topk(3)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [float(scores[at, token]) for token, _ in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)
    of_prompt = run.prompt_logprobs[sequence.request.id]
    assert sorted(of_prompt) == list(range(1, sequence.prompt_len))
    for position, one in of_prompt.items():
        assert one.token == sequence.tokens[position]
        assert one.value == pytest.approx(float(scores[position - 1, one.token]), abs=2e-4)
        assert [v for _, v in one.top] == pytest.approx(scores[position - 1].topk(2).values.tolist(), abs=2e-4)


@each_model
@pytest.mark.parametrize("budget", [400, 37])
def test_hidden_states_and_scores_are_the_naive_models(windows: str, budget: int) -> None:
    of = model(windows)
    run = engine(windows, budget=budget, running=2)
    for s in run.run([wanted(), wanted(0.9, frequency_penalty=0.9)]):
        logits, taps = naive(of, s.tokens[:-1])
        check_scores(run, s, logits.log_softmax(-1))
        if not s.request.params.temperature:
            assert s.output == logits[s.prompt_len - 1 :].argmax(-1).tolist()
        hidden = torch.stack([run.hidden[key_of(s), p] for p in range(len(s.tokens) - 1)])
        torch.testing.assert_close(hidden.double(), taps[-1], **CLOSE)
        torch.testing.assert_close(of.head(hidden).double(), logits, **CLOSE)
    assert (run.chunks["t0.0", 0] > 5) == (budget == 37)


def test_the_naive_model_sees_what_a_window_hides() -> None:
    """Or the comparison would say nothing of windows."""
    full, window = (naive(model(name), PROMPT[:40])[0] for name in ("full", "window"))
    torch.testing.assert_close(full[:9], window[:9])
    assert (full[20:] - window[20:]).abs().max() > 0.1


def test_bf16_is_close_to_the_naive_model() -> None:
    of = model("mixed", torch.bfloat16)
    run = engine("mixed", torch.bfloat16)
    (s,) = run.run([wanted()])
    logits, _ = naive(of, s.tokens[:-1])
    hidden = torch.stack([run.hidden[key_of(s), p] for p in range(len(s.tokens) - 1)])
    off = (of.head(hidden).double() - logits).abs()
    assert off.mean() < 0.05 * logits.std()


SCENARIOS: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"budget": 17, "running": 4},
    "hit": {},
    "forked": {},
    "preempted": {"blocks": 30, "watermark": False},
    "overlapped": {"overlap": True},
}


@cache
def with_taps(windows: str, n: int) -> tuple[tuple[Request, ...], dict[Key, tuple[int, ...]], dict[Key, torch.Tensor]]:
    """Requests, what they give without drafts, and the naive model's taps for that."""
    params = SamplingParams(max_tokens=14, n=n)
    texts = tuple(Request(str(i), PROMPT[i : i + 9 + 29 * i], replace(params, seed=i)) for i in range(5))
    plain = engine(windows).run(texts)
    taps = {}
    for s in plain:
        _, found = naive(model(windows), s.tokens)
        taps[key_of(s)] = torch.cat([found[1], found[-1]], -1).float()
    return texts, {key_of(s): tuple(s.output) for s in plain}, taps


@pytest.mark.parametrize("windows", ["full", "window", "mixed"])
@pytest.mark.parametrize("scenario", list(SCENARIOS))
@pytest.mark.parametrize("kind", ["wrong", "right", "tree"])
def test_a_drafter_is_lent_the_true_tap(windows: str, scenario: str, kind: str) -> None:
    """That of the last token before the row, whether a chunk, a decode, a hit, a fork or a run again computed it."""
    texts, known, taps = with_taps(windows, 3 if scenario == "forked" else 1)
    off, siblings = {"wrong": (1, 0), "right": (0, 0), "tree": (0, 2)}[kind]
    limits = {"blocks": 400} | SCENARIOS[scenario]
    drafter = CheckTaps(known, off=off, siblings=siblings, host=False, truth=taps)
    run = engine(windows, drafter=drafter, **limits)  # type: ignore[arg-type]
    if scenario == "hit":
        run.run(texts)
    sequences = run.run(texts)
    assert {key_of(s): tuple(s.output) for s in sequences} == known
    assert len(drafter.checked) > (20 if kind == "wrong" else 10)
    assert len(drafter.observed) >= sum(len(s.tokens) - 1 - s.cached for s in sequences if not s.sibling)
    if scenario == "hit":
        assert sum(s.cached for s in sequences) > 100
    assert (run.scheduler.preemptions > 0) == (scenario == "preempted" and windows != "window")
