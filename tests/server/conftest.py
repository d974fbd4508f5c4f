"""A tiny model, and a server over it that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from server.model import build
from server.running import Running, running

from llmx.llm import LLM


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "tiny")


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
