"""A tiny model, and a server over it that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server.model import SAYING, build
from server.running import Running, running
from tokenizers import pre_tokenizers

from llmx.llm import LLM


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a context long enough for `ENDLESS` texts."""
    return build(tmp_path_factory.mktemp("patient") / "tiny", context=2**16)


@pytest.fixture(scope="session")
def endless(patient: Path) -> Iterator[tuple[LLM, Running]]:
    """Two or more requests of it run as long as `ENDLESS` says: what happens to them happens while they run."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 2**27}
    with LLM(str(patient), max_num_seqs=4, **settings) as llm, running(llm) as server:
        yield llm, server


@pytest.fixture(scope="session")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), dtype="float32", device="cpu", threads=1, max_num_seqs=32, kv_cache_bytes=16 * 2**20) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm) as running_server:
        yield running_server


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves a model that says `SAYING` again and again, a byte per token."""
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(SAYING)[0][0]
    assert len(set(shown)) == len(shown) == len(SAYING.encode())
    folder = build(tmp_path_factory.mktemp("models") / "parrot", dict(zip(shown, shown[1:] + shown[0], strict=True)))
    with (
        LLM(str(folder), dtype="float32", device="cpu", threads=1, kv_cache_bytes=2**20) as llm,
        running(llm) as server,
    ):
        yield server
