"""Streams: their events, their order, and that they say what a plain answer says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from server.running import ENDLESS, Running, eventually, running

from llmx.llm import LLM

CHAT = {
    "messages": [{"role": "user", "content": "Tell me about foxes."}],
    "max_tokens": 12,
    "seed": 3,
    "ignore_eos": True,
}
PROMPT = {"prompt": "the quick brown", "max_tokens": 12, "seed": 3, "ignore_eos": True}
BOTH = pytest.mark.parametrize(("path", "body"), [("completions", PROMPT), ("chat/completions", CHAT)])


def text_of(choice: dict[str, Any]) -> str:
    """Of a chunk's choice or a plain one, of either endpoint."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message"))["content"] if choice.get("delta", True) else ""


def by_choice(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for one in events[:-1]:
        for choice in one["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@BOTH
def test_every_event_is_one_data_line_and_the_last_is_done(server: Running, path: str, body: dict[str, Any]) -> None:
    events = server.events(path, body)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1


@BOTH
def test_id_created_model_and_object_are_the_same_in_all_chunks(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    chunks = server.events(path, body)[:-1]
    heads = {(one["id"], one["created"], one["model"], one["object"]) for one in chunks}
    assert len(heads) == 1
    id, _, model, kind = heads.pop()
    assert (model, kind) == ("tiny", "text_completion" if path == "completions" else "chat.completion.chunk")
    assert id.startswith("cmpl-" if path == "completions" else "chatcmpl-")


def test_only_the_first_delta_of_each_choice_has_the_role(server: Running) -> None:
    for choices in by_choice(server.events("chat/completions", CHAT | {"n": 3})).values():
        first, *later = [choice["delta"] for choice in choices]
        assert first["role"] == "assistant"
        assert first["content"] == ""
        assert first["refusal"] is None, "strict clients fail without it"
        assert later
        assert not any("role" in delta for delta in later)


@BOTH
@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_has_one_finish_reason_on_its_last_chunk(
    server: Running, path: str, body: dict[str, Any], n: int
) -> None:
    choices = by_choice(server.events(path, body | {"n": n}))
    assert sorted(choices) == list(range(n))
    for chunks in choices.values():
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@BOTH
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "n": 3}], ids=["greedy", "seeded"])
def test_the_chunks_of_a_stream_join_to_the_plain_answer(
    server: Running, path: str, body: dict[str, Any], sampling: dict[str, Any]
) -> None:
    status, plain = server.post(path, body | sampling)
    assert status == 200
    streamed = by_choice(server.events(path, body | sampling))
    assert len(plain["choices"]) == len(streamed) == sampling.get("n", 1)
    for choice in plain["choices"]:
        assert "".join(map(text_of, streamed[choice["index"]])) == text_of(choice) != ""


@BOTH
def test_with_include_usage_a_last_chunk_has_the_usage_and_all_others_null(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    *chunks, last, _ = server.events(path, body | {"stream_options": {"include_usage": True}})
    assert chunks
    assert all(one["usage"] is None for one in chunks)
    assert last["choices"] == []
    plain = server.post(path, body)[1]["usage"]
    assert {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        key: plain[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


@BOTH
def test_without_include_usage_no_chunk_has_a_usage(server: Running, path: str, body: dict[str, Any]) -> None:
    assert not any("usage" in one for one in server.events(path, body)[:-1])


def test_continuous_usage_counts_up_in_every_chunk(server: Running) -> None:
    events = server.events("completions", PROMPT | {"stream_options": {"continuous_usage_stats": True}})
    counts = [one["usage"]["completion_tokens"] for one in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 12


@BOTH
def test_stream_options_without_stream_are_refused(server: Running, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(path, body | {"stream_options": {"include_usage": True}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


@BOTH
def test_a_request_that_cant_run_is_refused_before_the_stream_begins(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    long = (
        {"prompt": "fox " * 400} if path == "completions" else {"messages": [{"role": "user", "content": "fox " * 400}]}
    )
    for stream in (False, True):
        status, answer = server.post(path, body | long | {"stream": stream})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "256" in answer["error"]["message"]


def test_several_prompts_stream_under_indices_of_their_own(server: Running) -> None:
    body = PROMPT | {"prompt": ["the quick", "a stitch"], "n": 2}
    plain = server.post("completions", body)[1]
    choices = by_choice(server.events("completions", body))
    assert sorted(choices) == [0, 1, 2, 3]
    assert {index: "".join(map(text_of, chunks)) for index, chunks in choices.items()} == {
        choice["index"]: choice["text"] for choice in plain["choices"]
    }
    for at, prompt in enumerate(body["prompt"]):
        alone = server.post("completions", body | {"prompt": prompt})[1]
        assert [one["text"] for one in alone["choices"]] == [
            one["text"] for one in plain["choices"][2 * at : 2 * at + 2]
        ]


@pytest.fixture
def fresh(tiny: Path) -> Iterator[tuple[LLM, Running]]:
    """A server that nobody has used yet: its counters begin at nothing."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 16 * 2**20}
    with LLM(str(tiny), max_num_seqs=32, **settings) as llm, running(llm) as server:
        yield llm, server


def test_32_streams_at_once_each_say_what_they_say_alone(fresh: tuple[LLM, Running], client: OpenAI) -> None:
    llm, server = fresh
    requests: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": f"Story {at}: " + "the lazy dog " * (at % 5)}],
            "max_tokens": 24 + at,
            "temperature": 0.0 if at % 2 else 1.0,
            "seed": at,
            "extra_body": {"ignore_eos": True},
        }
        for at in range(32)
    ]
    alone = [client.chat.completions.create(model="tiny", **request).choices[0].message.content for request in requests]
    steps_before = llm.metrics().most_running
    assert steps_before < 16, "otherwise the assertion below would show nothing"

    async def one(client: AsyncOpenAI, request: dict[str, Any]) -> str:
        stream = await client.chat.completions.create(model="tiny", stream=True, **request)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, request) for request in requests))

    assert asyncio.run(all_of_them()) == alone
    assert llm.metrics().most_running >= 16


@BOTH
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_client_that_leaves_frees_its_sequences_and_blocks(
    endless: tuple[LLM, Running], path: str, body: dict[str, Any], stream: bool
) -> None:
    llm, server = endless
    before = llm.metrics()
    assert before.running == 0
    body = body | {"stream": stream, "max_tokens": ENDLESS, "n": 2}
    server.send_and_leave(path, body, lambda got: llm.metrics().running > 0 and (not stream or b"data:" in got))
    assert eventually(lambda: llm.metrics().running == 0)
    after = llm.metrics()
    assert (after.waiting, after.free_blocks) == (0, before.free_blocks)
    assert after.aborted == before.aborted + 2
