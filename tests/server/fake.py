"""An engine that does what a test tells it to, behind the interface of `llmx.llm.LLM`: it can fail, and never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from llmx.config import EngineConfig, EngineInfo, Metrics
from llmx.core import Delta, SamplingParams
from llmx.errors import LlmxError

Script = Callable[[int], Delta | LlmxError | None]  # by step: what comes, what fails, or the end

INFO = EngineInfo(
    model="models/fake",
    path="/models/fake",
    architecture="FakeForCausalLM",
    parameters=1_000_000,
    weight_bytes=4_000_000,
    pass_bytes=4_000_000,
    schemes=("dense",),
    dtype="float32",
    kv_cache_dtype="float32",
    activations="bf16",
    device="cpu",
    threads=1,
    kernels=(("linear", "reference"), ("attention", "reference")),
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=16,
    num_blocks=20,
    kv_cache_bytes=2**20,
    vocab_size=256,
    tensor_parallel_size=1,
    load_seconds=0.1,
)


class FakeTokenizer:
    """A token is a byte."""

    special_ids: frozenset[int] = frozenset()
    template = object()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token(self, token: int) -> str:
        return chr(token)

    def piece(self, token: int) -> bytes:
        return bytes([token])


@dataclass(eq=False)
class FakeStream:
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    script: Script
    pause: float
    cached_tokens: int = 0
    started: float = 0.0
    prompt_logprobs: None = None
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    following: asyncio.Task[None] | None = None

    def abort(self) -> None:
        self.aborted = not self.ended.is_set() or self.aborted
        self.ended.set()
        if self.following is not None:
            self.following.cancel()

    def follow(self, hear: Callable[[Delta | Exception | None], None]) -> None:
        async def pass_on() -> None:
            try:
                async for delta in self:
                    hear(delta)
            except LlmxError as error:
                hear(error)
            else:
                hear(None)

        self.following = asyncio.create_task(pass_on())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        step = 0
        while not self.ended.is_set():
            item = self.script(step)
            if isinstance(item, LlmxError):
                raise item
            if item is None:
                self.ended.set()
                return
            yield item
            step += 1
            await asyncio.sleep(self.pause)


class FakeLLM:
    config = EngineConfig(model="models/fake")

    def __init__(self, script: Script, pause: float = 0.0) -> None:
        self.info = INFO
        self.tokenizer = FakeTokenizer()
        self.failed: str | None = None
        self.script = script
        self.pause = pause
        self.opened: list[FakeStream] = []

    def metrics(self, timeout: float) -> Metrics:
        if self.failed:
            raise LlmxError(self.failed)
        return Metrics(running=sum(not one.ended.is_set() for one in self.opened), total_blocks=20, free_blocks=20)

    def alive(self) -> bool:
        return self.failed is None

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.tokenizer.encode("".join(message["content"] for message in messages))

    def open(self, prompt: list[int], params: SamplingParams, *, id: str, salt: bytes) -> FakeStream:
        stream = FakeStream(tuple(prompt), params, self.script, self.pause)
        self.opened.append(stream)
        return stream


def says(text: str) -> Script:
    """A character at a time, then the end."""

    def step(at: int) -> Delta | None:
        if at >= len(text):
            return None
        return Delta(0, text[at], (ord(text[at]),), "length" if at == len(text) - 1 else None)

    return step


def forever(at: int) -> Delta:
    return Delta(0, "x", (120,))
