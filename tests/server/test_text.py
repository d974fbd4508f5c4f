"""What a text may and may not hold: whole characters, nothing of a stop string, each special token once."""

from __future__ import annotations

from typing import Any

import pytest
from server.model import SAYING
from server.running import Running

from llmx.llm import LLM


def say(parrot: Running, count: int, **more: Any) -> dict[str, Any]:
    status, answer = parrot.post("completions", {"prompt": SAYING, "max_tokens": count, "temperature": 0} | more)
    assert status == 200, answer
    return answer["choices"][0] | {"usage": answer["usage"]}


def pieces(parrot: Running, count: int, **more: Any) -> list[str]:
    body = {"prompt": SAYING, "max_tokens": count, "temperature": 0} | more
    return [one["choices"][0]["text"] for one in parrot.events("completions", body)[:-1]]


def test_a_character_of_several_tokens_comes_whole(parrot: Running) -> None:
    texts = pieces(parrot, 27)
    assert "".join(texts) == SAYING * 3
    assert [text for text in texts if text] == list(SAYING * 3)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_limit_inside_a_character_ends_the_text_without_harm(parrot: Running, count: int) -> None:
    choice = say(parrot, count)
    whole = SAYING.encode()[:count].decode(errors="ignore")
    assert choice["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == count
    assert choice["text"].startswith(whole)
    assert set(choice["text"][len(whole) :]) <= {"\N{REPLACEMENT CHARACTER}"}
    assert "".join(pieces(parrot, count)) == choice["text"]


def test_the_bytes_of_logprobs_join_to_the_text(parrot: Running) -> None:
    body = {"messages": [{"role": "user", "content": SAYING}], "max_tokens": 18, "temperature": 0, "logprobs": True}
    body |= {"logit_bias": {}, "add_generation_prompt": False, "continue_final_message": True}
    choice = parrot.post("chat/completions", body)[1]["choices"][0]
    assert choice["message"]["content"] == SAYING * 2
    joined = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
    assert joined.decode() == SAYING * 2


@pytest.mark.parametrize("stop", ["ď客", "客🫠", "客🫠ď", "🫠ď客🫠", "客"])
def test_no_part_of_a_stop_string_is_in_the_text(parrot: Running, stop: str) -> None:
    full = SAYING * 3
    want = full[: full.index(stop)]
    choice = say(parrot, 27, stop=stop)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, "stop", stop)
    assert "".join(pieces(parrot, 27, stop=[stop])) == want
    kept = say(parrot, 27, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == want + stop


def test_of_several_stop_strings_the_first_in_the_text_wins(parrot: Running) -> None:
    assert say(parrot, 27, stop=["客🫠", "ď"])["text"] == "🫠"


def test_stop_may_be_an_empty_list_or_null_but_no_empty_string(parrot: Running) -> None:
    for stop in ([], None):
        assert say(parrot, 9, stop=stop)["text"] == SAYING
    for stop in ("", ["x", ""]):
        status, answer = parrot.post("completions", {"prompt": "x", "stop": stop})
        assert (status, answer["error"]["param"]) == (400, "stop")


def test_a_stop_string_before_min_tokens_does_not_stop(parrot: Running) -> None:
    choice = say(parrot, 27, stop="ď", min_tokens=9)
    assert choice["text"] == SAYING + "🫠"


def test_stop_token_ids_end_the_text_and_are_not_in_it(parrot: Running) -> None:
    first = say(parrot, 1, logprobs=0)["logprobs"]["tokens"]
    assert len(first) == 1
    token = parrot.server.service.llm.tokenizer.encode("客", add_special=False)[0]
    choice = say(parrot, 27, stop_token_ids=[token])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("🫠ď", "stop", token)
    assert choice["usage"]["completion_tokens"] == 7


def test_the_end_of_text_token_stops_unless_it_is_ignored(server: Running, llm: LLM) -> None:
    (end,) = llm.tokenizer.eos_ids
    body = {"prompt": "the", "max_tokens": 5, "logit_bias": {str(end): 100}}
    choice = server.post("completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    ignored = server.post("completions", body | {"ignore_eos": True})[1]
    assert (ignored["choices"][0]["finish_reason"], ignored["usage"]["completion_tokens"]) == ("length", 5)
    shown = server.post("completions", body | {"ignore_eos": True, "skip_special_tokens": False})[1]
    assert shown["choices"][0]["text"] == "<|end|>" * 5
    late = server.post("completions", body | {"min_tokens": 3})[1]
    assert late["usage"]["completion_tokens"] == 4


def test_the_prompts_first_token_is_added_once_in_completions_and_in_chats(server: Running, llm: LLM) -> None:
    body = {"prompt": "the fox", "max_tokens": 1}
    ids = llm.tokenizer.encode("the fox", add_special=False)
    expected = len(ids) + llm.tokenizer.add_bos
    assert server.post("completions", body)[1]["usage"]["prompt_tokens"] == expected
    message = {"role": "user", "content": "the fox"}
    rendered = llm.render([message])
    assert rendered.count(llm.tokenizer.bos_id) == 1
    chat = server.post("chat/completions", {"messages": [message], "max_tokens": 1})[1]
    assert chat["usage"]["prompt_tokens"] == len(rendered)
