"""Texts with grammars follow them, and are the same alone, among others, preempted, overlapped and with drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine.common import VOCAB, Said, Truth, Watched, engine, expect, requests, said, truth
from engine.drafters import Replay
from letters import END, Letters

from llmx import grammar as g
from llmx.core import Request, SamplingParams
from llmx.core import Sequence as Text
from llmx.engine.messages import Add, Refused, Tokens
from llmx.engine.service import Core

pytest.importorskip("llguidance", reason="structured output needs llguidance")

LETTERS = Letters()
F32 = torch.float32
MOST = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "ab", None, 7]},
        "b": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 12}, "minItems": 1, "maxItems": 3},
        "c": {"type": "object", "properties": {"z": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    """SCHEMA, by hand."""
    value = json.loads(text)
    c = value.get("c", {})
    return (
        set(value) - {"c"} == {"a", "b"}
        and value["a"] in ("x", "ab", None, 7)
        and 1 <= len(value["b"]) <= 3
        and all(type(n) is int and 1 <= n <= 12 for n in value["b"])
        and isinstance(c, dict)
        and set(c) <= {"z"}
        and all(isinstance(z, bool) for z in c.values())
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


CHOICES = ["abc", "abcab", "xyz", "10 10", "true}"]
PATTERN = r"[abc]{3,9}: (-?[1-9][0-9]{0,3}|0)(, [xyz]+)?"
GRAMMARS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "regex": (g.regex(PATTERN), matches(PATTERN)),
    "choice": (g.choice(CHOICES), CHOICES.__contains__),
    "schema": (g.from_json_schema(SCHEMA), fits),
    "brackets": (g.from_lark('start: "(" ("a" | "10" | start){0,3} ")"'), matches(r"\([()a10]*\)")),
    "open": (g.regex("[abxy ]+"), matches("[abxy ]+")),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(),
    "hot": SamplingParams(temperature=1.8, top_p=0.9, top_k=30, min_p=0.001),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.7, logprobs=2),
    "choices": SamplingParams(temperature=1.2, n=3),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=9),
    "ignore_eos": SamplingParams(temperature=1.0, ignore_eos=True),
}


@cache
def wanted() -> tuple[Request, ...]:
    """Every grammar with every kind of parameters, and among them some texts without."""
    made = []
    for i, (grammar, (text, _)) in enumerate(GRAMMARS.items()):
        for j, (name, params) in enumerate(PARAMS.items()):
            prompt = tuple((7 * i + j * n) % VOCAB for n in range(1, 4 + 5 * (j % 3)))
            full = replace(params, grammar=text, seed=10 * i + j, max_tokens=MOST)
            made.append(Request(f"{grammar} {name}", prompt, full, LETTERS.eos_ids))
        made.append(requests()[i])
    return tuple(made)


def text_of(tokens: tuple[int, ...]) -> str:
    return LETTERS.text(tokens).decode()


@cache
def alone() -> Truth:
    return truth("full", F32, wanted())


def follows(found: Mapping[tuple[str, int], Said]) -> int:
    """Asserts that each text follows its grammar; how many are whole."""
    whole = 0
    for (name, _), one in found.items():
        grammar = name.split()[0]
        if grammar not in GRAMMARS:
            continue
        text, right = text_of(one.tokens), GRAMMARS[grammar][1]
        assert one.finish in ("stop", "length"), name
        if one.finish == "stop":
            assert right(text), (name, text)
            whole += 1
        else:
            assert len(one.tokens) == MOST
            assert END not in one.tokens
    return whole


def check(run: Watched) -> list[Text]:
    sequences = run.run(wanted())
    expect(run, sequences, alone())
    assert follows({(s.request.id, s.sibling): said(run, s) for s in sequences}) > 20
    return sequences


def test_every_text_follows_its_grammar_and_they_are_varied() -> None:
    found = alone().said
    assert follows(found) > 20
    texts = {key: text_of(one.tokens) for key, one in found.items() if key[0].split()[0] in GRAMMARS}
    assert len(set(texts.values())) > 25
    assert found["choice greedy", 0].finish == "stop"
    assert len({texts["schema choices", n] for n in range(3)}) == 3
    assert {one.stopped_by for key, one in found.items() if key in texts} == {None, END}


def test_the_texts_of_others_are_what_they_are_without_grammars_beside_them() -> None:
    for i in range(len(GRAMMARS)):
        key = requests()[i].id, 0
        assert alone().said[key] == truth("full", F32, requests()).said[key]


def test_min_tokens_holds_back_an_end_only_where_the_text_can_go_on() -> None:
    found = alone().said
    assert len(found["open min_tokens", 0].tokens) > 9, "the text could go on"
    assert found["choice min_tokens", 0].finish == "stop", "the text could not"
    assert len(found["choice min_tokens", 0].tokens) <= 9


def test_a_text_that_ignores_its_end_goes_on_as_long_as_its_grammar_does() -> None:
    found = alone().said
    assert found["open ignore_eos", 0].finish == "length"
    one = found["choice ignore_eos", 0]
    assert (one.finish, one.stopped_by) == ("stop", None)


def test_among_others_and_again_on_a_prefix_hit() -> None:
    run = engine()
    check(run)
    check(run)
    assert max(run.rows) > 20


@pytest.mark.parametrize("overlap", [False, True])
def test_chunked_preempted_and_overlapped(overlap: bool) -> None:
    run = engine(blocks=22, budget=33, running=12, overlap=overlap, watermark=False)
    sequences = check(run)
    assert run.scheduler.preemptions == sum(s.preemptions for s in sequences) > 0


def test_overlapped() -> None:
    check(engine(overlap=True))


DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"siblings": 2},
    "garbage": {"off": 40},
    "garbage_tree": {"off": 40, "siblings": 2},
    "dead_tree": {"dead": True, "siblings": 1},
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_with_drafts(kind: str, overlap: bool) -> None:
    drafter = Replay(alone().output(), host=False, **DRAFTERS[kind])
    sequences = check(engine(drafter=drafter, overlap=overlap))
    accepted = sum(s.accepted for s in sequences)
    if "garbage" in kind:
        assert accepted == 0
    else:
        assert accepted > 0.5 * sum(len(s.output) for s in sequences)


def test_with_drafts_preempted_and_overlapped() -> None:
    drafter = Replay(alone().output(), host=False, siblings=1)
    run = engine(drafter=drafter, overlap=True, blocks=26, budget=60, running=12, watermark=False)
    check(run)
    assert run.scheduler.preemptions


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_text_leaves_its_siblings_in_their_places(overlap: bool) -> None:
    request = next(r for r in wanted() if r.id == "schema choices")
    run = engine(overlap=overlap)
    sequences = run.add(request)
    for _ in range(4):
        run.step()
    run.scheduler.abort(sequences[1])
    while any(s.finish is None for s in sequences) or run.flight:
        run.step()
    for sibling in (0, 2):
        assert tuple(sequences[sibling].output) == alone().said["schema choices", sibling].tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_can_not_go_on_ends_its_request_with_an_error(overlap: bool) -> None:
    """No token spells the Q."""
    params = SamplingParams(grammar=g.regex("[ab]{2}Q"), n=2, seed=0, max_tokens=9)
    core = Core(engine(overlap=overlap), None)  # type: ignore[arg-type]
    core.handle(Add(Request("stuck", (5, 6), params, LETTERS.eos_ids)))
    core.handle(Add(Request("free", (5, 6), SamplingParams(seed=0, max_tokens=9), LETTERS.eos_ids)))
    told = []
    while core.busy:
        told += core.step()
    mine = [message for message in told if getattr(message, "id", None) == "stuck"]
    assert isinstance(mine[-1], Refused)
    assert sum(isinstance(message, Refused) for message in mine) == 1
    assert "no token of this model can follow" in mine[-1].message
    assert not any(message.finish for message in mine if isinstance(message, Tokens))
    ends = [message for message in told if isinstance(message, Tokens) and message.id == "free" and message.finish]
    assert len(ends) == 1, "others go on"
    assert not core.requests


def test_a_grammar_that_no_text_can_follow_is_refused_and_the_core_goes_on() -> None:
    core = Core(engine(), None)  # type: ignore[arg-type]
    for grammar in ("start: <|gone|>", "start: nothing", 'start: "Q"', "not a grammar"):
        (answer,) = core.handle(Add(Request("bad", (5,), SamplingParams(grammar=grammar, seed=0), LETTERS.eos_ids)))
        assert isinstance(answer, Refused)
        assert (answer.status, answer.param) == (400, "grammar")
    assert not core.busy
