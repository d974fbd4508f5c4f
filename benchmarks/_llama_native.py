"""llama-server's own requests (/completion, /tokenize, …) and answers, as far as ours can be asked the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

HINTS = ("cache_prompt", "id_slot", "return_tokens")  # how to do it; what is answered is the same
SAME = ("prompt", "stream", "stop", "seed", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "logit_bias")
NAMES = {"n_predict": "max_tokens", **dict.fromkeys(HINTS), **{name: name for name in SAME}}
COMPLETIONS = ("/completion", "/completions")
Answer = Any  # theirs: status_code and body
Ask = Callable[[str, Any], Answer]  # path, body: one request to us


class Native(dict[str, Any]):
    """An answer of llama-server's shape; a test that looks for more than ours says is left out."""

    def __missing__(self, key: str) -> None:
        pytest.skip(f"the field {key} of llama-server's own answers")


def complete(ask: Ask, data: dict[str, Any]) -> Answer:
    answer = ask("/v1/completions", completion(data))
    if answer.status_code == 200:
        found = [Native(content=choice["text"], stop=True) for choice in answer.body["choices"]]
        answer.body = found if len(found) > 1 else found[0]
    return answer


def completion(data: dict[str, Any]) -> dict[str, Any]:
    """The body of a /completion for our /v1/completions."""
    if unknown := [name for name in data if name not in NAMES]:
        pytest.skip(f"the request field {unknown[0]}")
    made = {name: data[old] for old, name in NAMES.items() if name and old in data}
    if isinstance(biases := made.get("logit_bias"), list):
        made["logit_bias"] = {str(token): bias for token, bias in biases}
    if any(not str(token).isdigit() for token in made.get("logit_bias", ())):
        pytest.skip("biases of texts, not tokens")
    prompt = made["prompt"]
    if isinstance(prompt, dict) or (isinstance(prompt, list) and len({type(one) for one in prompt}) > 1):
        pytest.skip("prompts as objects, or of several kinds at once")
    return made


def stream(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        yield from (Native(content=choice["text"], stop=False) for choice in chunk["choices"])


def tokenize(ask: Ask, data: dict[str, Any]) -> Answer:
    special = data.get("add_special", False)
    answer = ask("/tokenize", {"prompt": data["content"], "add_special_tokens": special, "return_token_strs": True})
    if answer.status_code == 200 and data.get("with_pieces"):
        pairs = zip(answer.body["tokens"], answer.body["token_strs"], strict=True)
        answer.body["tokens"] = [{"id": token, "piece": piece} for token, piece in pairs]
    return answer


def detokenize(ask: Ask, data: dict[str, Any]) -> Answer:
    answer = ask("/detokenize", data)
    if answer.status_code == 200:
        answer.body["content"] = answer.body.pop("prompt")
    return answer


def apply_template(ask: Ask, data: dict[str, Any]) -> Answer:
    """A chat's prompt: its tokens, as a text again (each byte of a text is in some token)."""
    wanted = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    answer = ask("/tokenize", {name: data[name] for name in wanted if name in data})
    return answer if answer.status_code != 200 else ask("/detokenize", {"tokens": answer.body["tokens"]})


def count_tokens(ask: Ask, data: dict[str, Any]) -> Answer:
    answer = ask("/tokenize", data)
    if answer.status_code == 200:
        answer.body["input_tokens"] = answer.body["count"]
    return answer


ROUTES: dict[str, Callable[[Ask, Any], Answer]] = {
    **dict.fromkeys(COMPLETIONS, complete),
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/chat/completions/input_tokens": count_tokens,
}
