"""Drafts change how many steps a text takes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from engine.common import KINDS, SIZE, VOCAB, Watched, engine, expect, few, requests, truth
from engine.drafters import Replay

from llmx.core import Request, Row, SamplingParams
from llmx.core import Sequence as Text
from llmx.errors import UsageError


def with_models(*kinds: tuple[str, torch.dtype]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("windows", "dtype"), kinds, ids=[f"{n}-{str(d)[6:]}" for n, d in kinds])


F32, BF16 = torch.float32, torch.bfloat16
OFF = 40  # further from the right token than any sibling
K = 4


@cache
def right(windows: str, dtype: torch.dtype) -> Replay:
    return Replay(truth(windows, dtype, requests()).output())


DRAFTERS = {
    "chain": {},
    "tree": {"siblings": 2},
    "garbage": {"off": OFF},
    "garbage_tree": {"off": OFF, "siblings": 2},
    "dead": {"dead": True},
    "dead_tree": {"dead": True, "siblings": 1},
}


def check(run: Watched, windows: str, dtype: torch.dtype, wanted: Sequence[Request] = ()) -> list[Text]:
    sequences = run.run(wanted or requests())
    compared = expect(run, sequences, truth(windows, dtype, requests()))
    assert compared >= sum(len(s.tokens) - 1 - s.cached for s in sequences if s.sibling == 0)
    return sequences


CASES = [
    (n, d, kind)
    for n, d in KINDS
    for kind in (DRAFTERS if (n, d) in (("full", F32), ("mixed", F32)) else ("chain", "tree"))
]


@pytest.mark.parametrize(("windows", "dtype", "kind"), CASES, ids=[f"{n}-{str(d)[6:]}-{k}" for n, d, k in CASES])
def test_text_scores_and_hidden_states_are_those_without_drafts(windows: str, dtype: torch.dtype, kind: str) -> None:
    drafter = replace(right(windows, dtype), **DRAFTERS[kind])
    sequences = check(engine(windows, dtype, drafter=drafter), windows, dtype)
    accepted = sum(s.accepted for s in sequences)
    if "garbage" in kind:
        assert accepted == 0
        assert sum(s.drafted for s in sequences) > 500
    else:
        assert accepted > 0.6 * sum(len(s.output) for s in sequences)


@with_models(("full", F32), ("window", F32), ("mixed", F32), ("mixed", BF16))
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(
    "limits",
    [{"budget": 60, "running": 20}, {"blocks": 52}, {"overlap": True}, {"overlap": True, "blocks": 52, "budget": 90}],
    ids=["chunked", "preempted", "overlapped", "overlapped_preempted"],
)
def test_in_every_schedule(windows: str, dtype: torch.dtype, kind: str, limits: dict[str, int]) -> None:
    drafter = replace(right(windows, dtype), host=False, **DRAFTERS[kind])
    if "blocks" in limits and windows == "window":
        limits = limits | {"blocks": 6}
    run = engine(windows, dtype, drafter=drafter, watermark="blocks" not in limits, **limits)
    sequences = check(run, windows, dtype)
    assert sum(s.accepted for s in sequences) > 25
    assert (run.scheduler.preemptions > 0) == ("blocks" in limits)


@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_on_a_prefix_hit(windows: str) -> None:
    run = engine(windows, drafter=replace(right(windows, F32), siblings=2))
    check(run, windows, F32)
    assert sum(s.cached for s in check(run, windows, F32)) > 300


@with_models(("full", F32), ("mixed", F32), ("full", BF16))
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_replay_of_n_tokens_takes_a_fifth_of_the_steps(windows: str, dtype: torch.dtype, kind: str) -> None:
    """At most ceil(N / (K + 1)) + 1: the prompt's step gives one token, each further one K drafts and one more."""
    of_text = truth(windows, dtype, requests()).said
    for request in requests():
        if request.params.n > 1 or (
            kind == "tree" and not request.id.startswith(("greedy", "penal", "stop", "max_11"))
        ):
            continue
        run = engine(windows, dtype, drafter=replace(right(windows, dtype), **DRAFTERS[kind]))
        (s,) = run.run([request])
        count = len(of_text[request.id, 0].tokens)
        assert len(s.output) == count
        assert len(run.rows) <= -(-count // (K + 1)) + 1, request.id
        if kind == "chain" and request.id not in ("stop", "min_tokens"):
            assert s.accepted == s.drafted, request.id


def test_garbage_takes_a_step_for_every_token() -> None:
    for request in requests():
        if request.params.n == 1 and (request in few() or request.id.startswith("max_")):
            run = engine(drafter=replace(right("full", F32), off=OFF))
            (s,) = run.run([request])
            assert s.accepted == 0
            assert len(run.rows) == len(s.output)
            assert s.drafted > 0 or len(s.output) < 3


def test_drafts_stop_where_the_text_must() -> None:
    """max_tokens 1 to 11: no draft past the end is verified, and the text ends where it would without drafts."""
    run = engine(drafter=right("full", F32))
    for s in check(run, "full", F32, [r for r in requests() if r.id.startswith("max_")]):
        most = int(s.request.id[4:])
        assert (len(s.output), s.finish) == (most, "length")
        first = s.prompt_len > 1  # the prompt's own step drafts nothing, unless it is one token
        assert s.drafted == s.accepted == most - first - -(-(most - first) // (K + 1))


def test_a_tree_as_deep_as_a_window_is_refused() -> None:
    for deep in (9, 12):
        with pytest.raises(UsageError, match=f"{deep} tokens deep don't fit a sliding window of 9"):
            engine("mixed", drafter=Replay({}, deep=deep, siblings=2))
    engine("mixed", drafter=Replay({}, deep=8))
    engine("full", drafter=Replay({}, deep=12))


@pytest.mark.parametrize("windows", ["window", "mixed"])
@pytest.mark.parametrize("siblings", [0, 2])
def test_the_deepest_tree_that_a_window_allows(windows: str, siblings: int) -> None:
    drafter = replace(right(windows, F32), deep=8, siblings=siblings)
    check(engine(windows, drafter=drafter), windows, F32)


def test_forks_draft_from_their_own_blocks() -> None:
    """Three choices share the prompt's last block until each draws; each then accepts its own text to the end."""
    run = engine("mixed", drafter=right("mixed", F32))
    for s in check(run, "mixed", F32, [r for r in requests() if r.params.n > 1]):
        assert s.prompt_len % SIZE != 1, "the last block is shared"
        assert len(s.output) - s.accepted <= 5
    assert run.scheduler.preemptions == 0


def test_drafts_take_what_is_left_of_the_budget_and_of_the_pool() -> None:
    run = engine(drafter=right("full", F32), budget=34, running=32)
    check(run, "full", F32)
    assert max(run.tokens) <= 34
    tight = engine(drafter=right("full", F32), blocks=42)
    (s,) = check(tight, "full", F32, [r for r in requests() if r.id == "long_seeded"])
    assert tight.scheduler.preemptions == 0
    assert s.accepted > 0


def test_wrong_siblings_are_wrong() -> None:
    """Or the trees would not branch as the tests say."""
    text = Text(Request("x", (1, 2, 3, 4), SamplingParams(max_tokens=9)), 0, 0, [1, 2, 3, 4])
    tokens, parents = Replay({("x", 0): tuple(range(20))}, siblings=2)._tree(Row(text, 3, 1, True, 12, 4), 3)
    assert tokens[:6] == [1, 2, 0, 2, 3, 1]
    assert parents[:6] == [-1, -1, -1, 2, 2, 2]
    assert max(tokens) < VOCAB
