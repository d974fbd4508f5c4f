"""What a request may hold: forms that are taken, and what is refused with one sentence, before anything runs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from server.model import SAYING
from server.running import Running

from llmx.llm import LLM

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
LONGEST_ERROR = 2000  # bytes of a body: an error never gives a request back


def refused(server: Running, path: str, body: Any) -> dict[str, Any]:
    """The error of a request that must be refused with 400; the server still answers afterwards."""
    status, raw, _ = server.raw("POST", f"/v1/{path}", body)
    answer = json.loads(raw)
    assert status == 400, answer
    assert len(raw) < LONGEST_ERROR
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"prompt"',
        b"\x00",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} y',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(server: Running, raw: bytes) -> None:
    for path in ("completions", "chat/completions"):
        refused(server, path, raw)


@pytest.mark.parametrize("inside", [b"a\\u0000b", b"\\ud800", b"\\udc00\\ud800", b"\xed\xa0\x80", b"\xff", b"a\x00b"])
def test_a_text_with_what_is_no_character_is_a_text_or_refused(server: Running, inside: bytes) -> None:
    """A NUL as JSON writes it is one; half a surrogate pair, bytes that are no UTF-8, and a bare NUL aren't."""
    template = json.dumps({"messages": [USER | {"content": "#"}], "max_tokens": 1}).encode()
    status = 200 if inside == b"a\\u0000b" else 400
    for path, fields in (
        ("chat/completions", template),
        ("chat/completions", template.replace(b'"hi"', b'"#"').replace(b'"user"', b'"user", "name": "#"')),
        ("completions", b'{"prompt": "#", "max_tokens": 1}'),
        ("completions", b'{"prompt": ["x", "#"], "max_tokens": 1}'),
        ("completions", b'{"prompt": "x", "stop": "#", "max_tokens": 1}'),
        ("completions", b'{"prompt": "x", "cache_salt": "#", "max_tokens": 1}'),
        ("completions", b'{"prompt": "x", "guided_choice": ["#"], "max_tokens": 1}'),
    ):
        got, raw, _ = server.raw("POST", f"/v1/{path}", fields.replace(b"#", inside))
        assert got == status, (fields, raw)
        assert len(raw) < LONGEST_ERROR
    assert server.raw("POST", "/v1/completions", b'{"prompt": "x", "model": "' + inside + b'"}')[0] in (400, 404)
    assert server.post("completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_body_that_does_not_say_it_is_json_is_refused(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, raw, _ = server.raw("POST", "/v1/completions", body, {"Content-Type": kind})
        assert (status, json.loads(raw)["error"]["code"]) == (415, "not_json")
    status, _, _ = server.raw("POST", "/v1/completions", body, {"Content-Type": "application/json; charset=utf-8"})
    assert status == 200


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    limit = server.server.service.settings.max_body_bytes
    status, answer = server.post("completions", b" " * (limit + 1))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x", 5]}, "stop"),
        ({"stop": ["x"] * 500_000}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": [10**6], "min_tokens": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids.0"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"fox": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": 5}, "model"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 3}, "best_of"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    assert refused(server, "completions", {"prompt": "x"} | fields)["param"] == param
    assert refused(server, "chat/completions", {"messages": [USER]} | fields)["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [None, [], 5, {}, [[]], [1, "x"], ["x", 1], [True], [1.0], [None], [[1], []], "", [-1], [10**9], [[1], [-1]]],
)
def test_a_prompt_that_is_none_of_the_four_forms_is_refused(server: Running, llm: LLM, prompt: Any) -> None:
    assert not llm.tokenizer.add_bos, "an empty prompt has no token at all here"
    assert refused(server, "completions", {"prompt": prompt})["param"] == "prompt"
    assert refused(server, "completions", {"prompt": prompt, "stream": True, "echo": True})["param"] == "prompt"


def test_a_missing_prompt_or_missing_messages_are_named(server: Running) -> None:
    assert refused(server, "completions", {})["param"] == "prompt"
    assert refused(server, "chat/completions", {})["param"] == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {},
        ["hi"],
        [{}],
        [{"role": 5, "content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        [{"role": "assistant"}],
        [{"role": "user", "content": {"nested": ["x" * 100] * 100}}] * 1000,
        [{"role": "robot", "content": [{"type": "text", "text": "x" * 100}] * 50}] * 1000,
        [USER] * 2049,
    ],
)
def test_messages_that_make_no_conversation_are_refused(server: Running, messages: Any) -> None:
    assert str(refused(server, "chat/completions", {"messages": messages})["param"]).startswith("messages")


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": ""}, USER],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "5", "tool_call_id": "1"}],
        [{"role": "system", "content": "Be brief."}, USER | {"name": "Ann"}],
        [{"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}],
    ],
)
def test_conversations_that_clients_send_are_taken(server: Running, messages: Any) -> None:
    status, answer = server.post("chat/completions", {"messages": messages, "max_tokens": 1})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["refusal"] is None


def test_a_content_of_text_parts_is_the_joined_text(server: Running) -> None:
    body = {"max_tokens": 8, "seed": 1}
    parts = [{"type": "text", "text": "the lazy"}, {"type": "text", "text": " dog"}]
    answers = [
        server.post("chat/completions", body | {"messages": [{"role": "user", "content": content}]})[1]
        for content in ("the lazy dog", parts)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_all_four_forms_of_a_prompt_give_the_same_text(server: Running, llm: LLM) -> None:
    ids = llm.tokenizer.encode("the lazy dog")
    texts = []
    for prompt in ("the lazy dog", ["the lazy dog"], ids, [ids]):
        status, answer = server.post("completions", {"prompt": prompt, "seed": 1})
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == len(ids)
        texts.append(answer["choices"][0]["text"])
    assert len(set(texts)) == 1


def test_prompts_times_n_choices_come_in_order(server: Running) -> None:
    body = {"prompt": ["the", "a", "hello"], "n": 2, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    answer = server.post("completions", body)[1]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert answer["usage"]["completion_tokens"] == 36


def test_completions_default_to_16_tokens_and_chats_to_what_fits(server: Running, llm: LLM) -> None:
    completion = server.post("completions", {"prompt": "the", "ignore_eos": True, "max_tokens": None})[1]
    assert completion["usage"]["completion_tokens"] == 16
    chat = server.post("chat/completions", {"messages": [USER], "ignore_eos": True})[1]
    assert chat["usage"]["total_tokens"] == llm.info.max_model_len
    assert chat["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins_over_max_tokens(server: Running) -> None:
    body = {"messages": [USER], "max_tokens": 9, "max_completion_tokens": 4, "ignore_eos": True}
    assert server.post("chat/completions", body)[1]["usage"]["completion_tokens"] == 4


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: Running) -> None:
    error = refused(server, "completions", {"prompt": [1] * 300})
    assert error["code"] == "context_length_exceeded"
    assert "300" in error["message"]
    assert "256" in error["message"]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(server: Running) -> None:
    def text(**fields: Any) -> str:
        return server.post("completions", {"prompt": "the", "ignore_eos": True} | fields)[1]["choices"][0]["text"]

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text(seed=-5) == text(seed=-5)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0, top_p=0.1, seed=9)


def test_logit_bias_forces_and_bans_tokens(server: Running, llm: LLM) -> None:
    token = llm.tokenizer.encode("the")[0]
    body = {"prompt": "a", "max_tokens": 6, "temperature": 0}
    forced = server.post("completions", body | {"logit_bias": {str(token): 100}})[1]
    assert forced["choices"][0]["text"] == "the" * 6
    first = server.post("completions", body | {"logprobs": 0})[1]["choices"][0]["logprobs"]["tokens"]
    ids = {str(i): -100 for i in range(llm.info.vocab_size) if llm.tokenizer.token(i) == first[0]}
    other = server.post("completions", body | {"logprobs": 0, "logit_bias": ids})[1]["choices"][0]["logprobs"]["tokens"]
    assert first[0] not in other


def test_penalties_change_what_is_said(parrot: Running) -> None:
    body = {"prompt": SAYING, "max_tokens": 18, "temperature": 0}
    plain = parrot.post("completions", body)[1]["choices"][0]["text"]
    assert plain == SAYING * 2
    for penalty in ({"repetition_penalty": 90.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        bias = {"logit_bias": {str(token): 79.0 for token in parrot.server.service.tokenizer.encode("the")}}
        assert parrot.post("completions", body | bias)[1]["choices"][0]["text"] == plain
        assert parrot.post("completions", body | bias | penalty)[1]["choices"][0]["text"] != plain


def test_top_k_1_is_greedy(server: Running) -> None:
    body = {"prompt": "the", "ignore_eos": True}
    greedy = server.post("completions", body | {"temperature": 0})[1]["choices"][0]["text"]
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert server.post("completions", body | narrow)[1]["choices"][0]["text"] == greedy
    assert server.post("completions", body | {"top_k": -1, "seed": 1})[1] != greedy


def test_cached_tokens_are_counted_and_a_salt_keeps_caches_apart(server: Running, llm: LLM) -> None:
    body = {"prompt": "a stitch in time saves nine and the quick brown fox jumps over it", "temperature": 0}

    def cached(**more: Any) -> tuple[int, str]:
        answer = server.post("completions", body | more)[1]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    salt = {"cache_salt": "mine"}
    count, text = cached(**salt)
    assert count == 0
    again, same = cached(**salt)
    whole = (len(llm.tokenizer.encode(body["prompt"])) - 1) // llm.info.block_size * llm.info.block_size
    assert again == whole > 0
    assert same == text
    assert cached(cache_salt="yours") == (0, text)


def test_a_final_message_is_continued(server: Running, llm: LLM) -> None:
    messages = [USER, {"role": "assistant", "content": "the quick"}]
    continued = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    ids = llm.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert llm.tokenizer.decode(ids, skip_special=False).endswith("<|assistant|>the quick")
    assert server.post("chat/completions", continued)[1]["usage"]["prompt_tokens"] == len(ids)
    open_ended = continued | {"continue_final_message": False, "add_generation_prompt": False}
    assert server.post("chat/completions", open_ended)[1]["usage"]["prompt_tokens"] == len(ids) + 1
    error = refused(server, "chat/completions", continued | {"add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "x"},
        {"tokenize": False},
        {"add_generation_prompt": True},
        {"a": [[[[[[1]]]]]]},
        {"a": list(range(200))},
        {"a": "x" * 20_000},
    ],
)
def test_template_arguments_are_bounded(server: Running, kwargs: dict[str, Any]) -> None:
    body = {"messages": [USER], "chat_template_kwargs": kwargs}
    assert refused(server, "chat/completions", body)["param"] == "chat_template_kwargs"


def test_an_unknown_model_is_404(server: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert server.call("GET", "/v1/models/gpt-9")[1]["error"]["code"] == "model_not_found"


def test_unknown_routes_are_404_and_wrong_methods_405(server: Running) -> None:
    for method, path, status in (("GET", "/v2", 404), ("POST", "/", 404), ("GET", "/v1/completions", 405)):
        got, answer = server.call(method, path)
        assert got == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_models_are_listed(client: OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "llmx")
    assert model.model_dump()["max_model_len"] == llm.info.max_model_len
    assert client.models.retrieve("tiny") == model


def test_after_a_refusal_the_next_answer_is_as_before(server: Running) -> None:
    body = {"prompt": "the lazy", "temperature": 0, "logprobs": 2}
    before = server.post("completions", body)[1]["choices"]
    wrong: list[tuple[int, str, str, Any]] = [
        (400, "POST", "/v1/completions", body | {"logit_bias": {"999999": 1}}),
        (400, "POST", "/v1/completions", body | {"prompt": ["the lazy", "fox " * 400], "n": 2}),
        (400, "POST", "/v1/completions", body | {"prompt": [[1, 2], [-1]], "stream": True}),
        (400, "POST", "/v1/completions", body | {"regex": "("}),
        (400, "POST", "/v1/chat/completions", {"messages": [USER], "tools": [{}]}),
        (400, "POST", "/v1/completions", b"{"),
        (404, "POST", "/v1/completions", body | {"model": "gpt-9"}),
        (405, "GET", "/v1/completions", None),
        (413, "POST", "/v1/completions", b" " * (server.server.service.settings.max_body_bytes + 1)),
    ]
    for status, method, path, sent in wrong:
        assert server.call(method, path, sent)[0] == status
        assert server.post("completions", body)[1]["choices"] == before


def test_the_api_describes_itself(server: Running) -> None:
    status, document = server.call("GET", "/openapi.json")
    assert status == 200
    schemas = document["components"]["schemas"]
    for path, name in (("completions", "CompletionRequest"), ("chat/completions", "ChatRequest")):
        body = document["paths"][f"/v1/{path}"]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert "max_tokens" in schemas[name]["properties"]
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert reference.removeprefix("#/components/schemas/") in schemas
