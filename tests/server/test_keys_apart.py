"""Holders of different keys can't tell from the prefix cache what others have asked."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from server.running import Running, running

from llmx.llm import LLM
from llmx.server import keys

ONE, TWO = ("sk-one", "sk-two")


def cached(server: Running, key: str | None, prompt: list[int], **fields: Any) -> int:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    body = {"prompt": prompt, "max_tokens": 1} | fields
    status, answer = server.call("POST", "/v1/completions", body, headers)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt(seed: int) -> list[int]:
    """64 tokens that no other test has sent."""
    return [10 + (seed * 64 + at * (seed + 1)) % 300 for at in range(64)]


def test_different_keys_share_nothing_and_each_keeps_its_own(llm: LLM) -> None:
    with running(llm, keys=keys.read([ONE, TWO], None)) as server:
        asked = prompt(1)
        assert cached(server, ONE, asked) == 0
        assert cached(server, ONE, asked) > 0
        assert cached(server, TWO, asked) == 0
        assert cached(server, TWO, asked) > 0
        assert cached(server, ONE, asked) > 0


def test_unless_they_are_told_to(llm: LLM) -> None:
    with running(llm, keys=keys.read([ONE, TWO], None), share_cache=True) as server:
        asked = prompt(2)
        assert cached(server, ONE, asked) == 0
        assert cached(server, TWO, asked) > 0


@pytest.mark.parametrize("given", [[], [ONE], [ONE, ONE]], ids=["no key", "one key", "one key twice"])
def test_where_there_is_one_holder_or_none_everything_is_shared(llm: LLM, given: list[str]) -> None:
    with running(llm) as server:
        asked = prompt(3 + len(given))
        assert cached(server, None, asked) == 0
    with running(llm, keys=keys.read(given, None)) as server:
        assert cached(server, given[0] if given else None, asked) > 0


def test_a_requests_own_salt_comes_on_top(llm: LLM) -> None:
    with running(llm, keys=keys.read([ONE, TWO], None)) as server:
        asked = prompt(7)
        assert cached(server, ONE, asked) == 0
        assert cached(server, ONE, asked, cache_salt="mine") == 0
        assert cached(server, ONE, asked, cache_salt="mine") > 0
        assert cached(server, TWO, asked, cache_salt="mine") == 0


def test_neither_a_key_nor_what_opens_the_server_goes_to_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[bytes] = []
    real = llm.open

    def spying(*args: Any, salt: bytes, **kwargs: Any) -> Any:
        salts.append(salt)
        return real(*args, salt=salt, **kwargs)

    monkeypatch.setattr(llm, "open", spying)
    with running(llm, keys=keys.read([ONE, TWO], None)) as server:
        cached(server, ONE, prompt(8), cache_salt="mine")
        cached(server, TWO, prompt(8))
    assert len(salts) == len(set(salts)) == 2
    for salt in salts:
        for key in (ONE, TWO):
            assert key.encode() not in salt
            assert hashlib.sha256(key.encode()).digest() not in salt
