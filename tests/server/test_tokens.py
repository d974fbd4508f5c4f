"""/tokenize, /detokenize, /version and /ready."""

from __future__ import annotations

from typing import Any

import pytest
from server.running import Running

from llmx import __version__
from llmx.llm import LLM

CHAT = [{"role": "user", "content": "Hello, world!"}]


def test_the_version_is_the_packages(server: Running) -> None:
    assert server.call("GET", "/version") == (200, {"version": __version__})
    assert server.call("GET", "/ready") == (200, {"status": "ready"})


@pytest.mark.parametrize("text", ["the quick brown fox", " two  spaces\n", "🫠 ďábel 客", "<|end|> as text"])
def test_a_text_comes_back_from_its_tokens(server: Running, llm: LLM, text: str) -> None:
    status, answer = server.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200
    assert answer["tokens"] == llm.tokenizer.encode(text, add_special=False)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert answer["token_strs"] is None
    assert server.call("POST", "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})


def test_special_tokens_are_added_unless_not_wanted_and_strings_come_where_asked_for(server: Running, llm: LLM) -> None:
    whole = server.call("POST", "/tokenize", {"prompt": "the", "return_token_strs": True})[1]
    bare = server.call("POST", "/tokenize", {"prompt": "the", "add_special_tokens": False})[1]
    assert whole["tokens"] == llm.tokenizer.encode("the")
    assert whole["tokens"][len(whole["tokens"]) - bare["count"] :] == bare["tokens"]
    assert whole["token_strs"] == [llm.tokenizer.token(token) for token in whole["tokens"]]


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}], ids=str)
def test_the_count_is_the_usage(server: Running, more: dict[str, Any]) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Well"}] if "continue_final_message" in more else CHAT
    counted = server.call("POST", "/tokenize", {"messages": messages, **more})[1]["count"]
    usage = server.post("chat/completions", {"messages": messages, "max_tokens": 1, **more})[1]["usage"]
    assert usage["prompt_tokens"] == counted
    counted = server.call("POST", "/tokenize", {"prompt": "the quick"})[1]["count"]
    assert server.post("completions", {"prompt": "the quick", "max_tokens": 1})[1]["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": CHAT}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
def test_what_makes_no_sense_is_400(server: Running, path: str, body: dict[str, Any]) -> None:
    status, answer = server.call("POST", path, body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_another_model_is_404(server: Running) -> None:
    assert server.call("POST", "/tokenize", {"prompt": "a", "model": "other"})[0] == 404
