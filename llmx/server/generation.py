"""The engine's streams behind one HTTP request: opened together, read as one, counted, and aborted together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from llmx.core import Delta, SamplingParams
from llmx.errors import LlmxError
from llmx.server.admission import Place
from llmx.server.traffic import Traffic, Watch

if TYPE_CHECKING:
    from llmx.llm import LLM, Stream

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody waits for the answer."""


class Generation:
    """A context manager: from `begin` on it is in `live`; when it is left, whatever still runs is aborted."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        id: str,
        salt: bytes,
        prompt_only: bool,
        place: Place,
        traffic: Traffic,
        live: set[Generation],
    ) -> None:
        """Opens the streams: all of them, or none and a RequestError. prompt_only: what is generated isn't wanted."""
        self.id = id
        self.n = params.n
        self.prompt_only = prompt_only
        self.completion_tokens = 0
        self.streams: list[Stream] = []
        self._place, self._live = place, live
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        self._moved = asyncio.Event()  # it has left the engine's queue, or failed
        self._failure: Exception | None = None
        self.opened = time.monotonic()
        try:
            for at, prompt in enumerate(prompts):
                self.streams.append(llm.open(prompt, params, id=f"{id}-{at}", salt=salt))
        except BaseException:
            for stream in self.streams:
                stream.abort()
            raise
        self._watches = [Watch(traffic, stream, self.opened, not prompt_only) for stream in self.streams]

    def begin(self) -> None:
        """Lets what the engine says come in. From the event loop."""
        self._live.add(self)
        for at, stream in enumerate(self.streams):
            stream.follow(partial(self._hear, at))

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.discard(self)
        self._end("abort")

    @property
    def waiting(self) -> bool:
        """Whether the engine has not begun with any of it."""
        if not self._moved.is_set() and any(stream.started for stream in self.streams):
            self._moved.set()
        return not self._moved.is_set()

    async def left_queue(self) -> None:
        """Until the engine has begun with it. Raises LlmxError if it failed before that."""
        await self._moved.wait()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: LlmxError) -> None:
        """Ends it from outside: whoever reads it gets `error`."""
        self._end("error")
        self._broke(error)

    def _broke(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._queue.put_nowait(error)
        self._moved.set()

    def _end(self, reason: str) -> None:
        for stream, watch in zip(self.streams, self._watches, strict=True):
            stream.abort()
            watch.close(reason)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) as they come; the choices of prompt p are p * n … p * n + n - 1. Raises LlmxError."""
        running = len(self.streams)
        while running:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                at, delta = item
                self.completion_tokens += 0 if self.prompt_only else len(delta.token_ids)
                yield at * self.n + delta.index, delta

    def _hear(self, at: int, said: Delta | Exception | None) -> None:
        """As fast as the engine goes, however slowly the client reads: what has ended makes room for others."""
        watch = self._watches[at]
        match said:
            case Delta():
                if not watch.began:
                    self._place.begun(len(self.streams[at].prompt_token_ids))
                    self._moved.set()
                watch.saw(said)
                if said.finish_reason:
                    self._place.ended()
                self._queue.put_nowait((at, said))
            case None:
                self._queue.put_nowait(None)
            case _:
                watch.close("error")
                self._broke(said)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; each prompt counts once, however many choices it has."""
        prompt = sum(len(stream.prompt_token_ids) for stream in self.streams)
        cached = sum(stream.cached_tokens for stream in self.streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, cancels it when the client disconnects and then raises ClientGone. The body must have been read."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        unfinished = [task for task in (working, gone) if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
