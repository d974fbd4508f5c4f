"""Log-probabilities in both of OpenAI's shapes, and `echo`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from openai import OpenAI
from server.running import Running

from llmx.llm import LLM

TEXT = "the quick brown fox"
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
PROMPT = {"prompt": TEXT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_chat_has_as_many_alternatives_as_were_asked_for(client: OpenAI, top: int) -> None:
    choice = client.chat.completions.create(
        model="tiny", messages=CHAT["messages"], max_tokens=6, temperature=0, logprobs=True, top_logprobs=top
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == top
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        if top:
            assert one.top_logprobs[0].token == one.token, "greedy takes the likeliest"
            assert one.top_logprobs[0].logprob == one.logprob


def test_logprobs_that_make_no_sense_are_refused(server: Running) -> None:
    for path, fields, param in (
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": 2}, "logprobs"),
        ("completions", {"logprobs": 6}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
    ):
        status, answer = server.post(path, (CHAT if path.startswith("chat") else PROMPT) | fields)
        assert (status, answer["error"]["param"]) == (400, param)


def test_without_logprobs_the_field_is_null(server: Running) -> None:
    assert server.post("completions", PROMPT)[1]["choices"][0]["logprobs"] is None
    assert server.post("chat/completions", CHAT | {"logprobs": False})[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top", [0, 1, 5])
def test_a_completion_has_parallel_lists(server: Running, top: int) -> None:
    choice = server.post("completions", PROMPT | {"logprobs": top, "temperature": 1, "seed": 2})[1]["choices"][0]
    lists = choice["logprobs"]
    assert {len(one) for one in lists.values()} == {6}
    for token, value, likely in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert likely[token] == value
        assert max(top, 1) <= len(likely) <= top + 1
    assert lists["text_offset"][0] == 0
    assert all(one <= other for one, other in pairwise(lists["text_offset"]))


def test_text_offsets_point_at_the_tokens_in_the_text(server: Running, llm: LLM) -> None:
    token = llm.tokenizer.encode("the")[0]
    body = PROMPT | {"logprobs": 0, "echo": True, "logit_bias": {str(token): 100}}
    choice = server.post("completions", body)[1]["choices"][0]
    assert choice["text"] == TEXT + "the" * 6
    lists = choice["logprobs"]
    for start, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert choice["text"][start:].startswith(token)


def test_logprobs_of_a_stream_are_those_of_the_plain_answer(server: Running) -> None:
    plain = server.post("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3})[1]["choices"][0]
    events = server.events("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3})[:-1]
    streamed = [one for event in events for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == plain["logprobs"]["content"]
    assert len(streamed) == 6
    fields = {"logprobs": 2, "echo": True}
    plain = server.post("completions", PROMPT | fields)[1]["choices"][0]["logprobs"]
    chunks = [event["choices"][0]["logprobs"] for event in server.events("completions", PROMPT | fields)[:-1]]
    assert {key: [one for chunk in chunks for one in chunk[key]] for key in plain} == plain


def test_minus_infinity_is_clamped(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmx.core import Logprob
    from llmx.server.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs

    texts = TokenTexts(llm.tokenizer, skip_special=True)
    never = Logprob(5, -math.inf, ((7, -math.inf),))
    assert CompletionLogprobs(texts).add([5], [never])["token_logprobs"] == [-9999.0]
    content = chat_logprobs([never], texts)["content"][0]
    assert content["logprob"] == content["top_logprobs"][0]["logprob"] == -9999.0
    body = PROMPT | {"logprobs": 5, "logit_bias": {str(i): -100 for i in range(300)}, "top_k": 1}
    assert server.post("completions", body)[0] == 200


def reference(folder: str, ids: list[int]) -> torch.Tensor:
    """(positions, vocabulary): log-probabilities by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_an_echoed_prompt_has_the_log_probabilities_that_transformers_gives(server: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    expected = reference(llm.info.path, ids)
    for prompt in (TEXT, ids):
        for limit in (0, 1):
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": limit, "temperature": 0}
            answer = server.post("completions", body)[1]
            choice = answer["choices"][0]
            lists = choice["logprobs"]
            assert answer["usage"]["completion_tokens"] == limit
            assert choice["text"].startswith(TEXT)
            assert (choice["text"] == TEXT) == (limit == 0)
            assert len(lists["tokens"]) == len(ids) + limit
            assert lists["token_logprobs"][0] is None
            assert lists["top_logprobs"][0] is None
            want = [float(expected[at, token]) for at, token in enumerate(ids[1:])]
            assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(want, abs=1e-3)
            best = [max(likely.values()) for likely in lists["top_logprobs"][1 : len(ids)]]
            assert best == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=1e-3)


def test_no_tokens_without_echo_are_refused(server: Running) -> None:
    status, answer = server.post("completions", PROMPT | {"max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


def test_prompt_logprobs_come_by_token_id(server: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    expected = reference(llm.info.path, ids)
    found = server.post("completions", PROMPT | {"prompt_logprobs": 2})[1]["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(ids)
    for at, token in enumerate(ids[1:], 1):
        assert found[at][str(token)]["logprob"] == pytest.approx(float(expected[at - 1, token]), abs=1e-3)
        ranked: dict[int, Any] = {one["rank"]: id for id, one in found[at].items()}
        assert ranked[1] == str(int(expected[at - 1].argmax()))
    chat = server.post("chat/completions", CHAT | {"prompt_logprobs": 0})[1]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
