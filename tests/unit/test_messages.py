"""The engine's messages survive the way between processes, and say what the schema says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from llmx.config import EngineConfig, EngineInfo, Metrics
from llmx.core import Logprob, Request, SamplingParams
from llmx.engine.messages import (
    KINDS,
    Abort,
    Add,
    Ask,
    Failed,
    Follow,
    Measured,
    Message,
    Present,
    Progress,
    Ready,
    Refused,
    Start,
    Step,
    Tokens,
    decode,
    encode,
)

PARAMS = SamplingParams(n=2, stop=("a", "ü\n"), stop_token_ids=(3,), logit_bias=((5, -1.5),), seed=2**62, logprobs=2)
REQUEST = Request("id", (1, 2, 3), PARAMS, frozenset({7, 4}), b"\x00\xff", -1)
LOGPROB = Logprob(5, -0.25, ((5, -0.25), (6, -1.5)))
INFO = EngineInfo(
    *("m", "/m", "A", 1, 2, 3, ("dense",), "float32", "float32", "bf16", "cpu", 1, (("linear", "reference"),)),
    *(128, 4, 64, 16, 20, 2**20, 256, 1, 0.1),
)
EVERY: list[Message] = [
    *(Start(EngineConfig("m", threads=3)), Follow(EngineConfig(), 1, 5000), Present(), Add(REQUEST), Abort("id", 1)),
    *(Ask(5), Progress(1, 2), Ready(INFO), Refused("id", "no", "prompt", None, 400), Failed("why", None, 2)),
    Measured(5, Metrics(running=1, step_sizes=(1,) * 14)),
    Tokens("id", 1, (4, 5), 16, "stop", 5, (LOGPROB, LOGPROB), ((1, LOGPROB),), 1.5),
    Step((Add(REQUEST), Abort("id"))),
]


def test_every_kind_is_here() -> None:
    assert {type(message).__name__ for message in EVERY} == set(KINDS)


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    if isinstance(message, Add):
        assert message.request.stops == {3, 4, 7}  # what was computed once is no part of it
    assert decode(encode([message])) == [message]


def test_messages_of_a_step_arrive_in_order() -> None:
    assert decode(encode(EVERY)) == EVERY
    assert decode(encode([])) == []


def test_tokens_that_lack_a_field_are_no_message() -> None:
    fields = json.loads(encode([Tokens("id", 0, (1,), 0)]))
    assert len(fields[0]) == len(dataclasses.fields(Tokens))
    with pytest.raises(TypeError):
        decode(json.dumps([fields[0][:-1]]).encode())


def test_nothing_is_left_out_of_a_request() -> None:
    fields: dict[str, Any] = json.loads(encode([Add(REQUEST)]))[0]["request"]
    assert set(fields) == {field.name for field in dataclasses.fields(Request)}
    assert set(fields["params"]) == {field.name for field in dataclasses.fields(SamplingParams)}
