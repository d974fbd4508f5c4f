"""The engine's streams behind one HTTP request: opened together, read as one, counted, and aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from llmx.core import Delta, SamplingParams
from llmx.errors import LlmxError

if TYPE_CHECKING:
    from llmx.llm import LLM, Stream

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody waits for the answer."""


class Generation:
    """A context manager: while it is open it is in `live`; when it is left, whatever still runs is aborted."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        salt: bytes,
        live: set[Generation],
        id: str,
    ) -> None:
        """Opens the streams: all of them, or none and a RequestError."""
        self.id = id
        self.n = params.n
        self.completion_tokens = 0
        self.streams: list[Stream] = []
        self._live = live
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        try:
            for at, prompt in enumerate(prompts):
                self.streams.append(llm.open(prompt, params, id=f"{id}-{at}", salt=salt))
        except BaseException:
            self._abort()
            raise

    def __enter__(self) -> Generation:
        self._live.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.discard(self)
        self._abort()

    def fail(self, error: LlmxError) -> None:
        """Ends it from outside: whoever reads it gets `error`."""
        self._abort()
        self._queue.put_nowait(error)

    def _abort(self) -> None:
        for stream in self.streams:
            stream.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) as they come; the choices of prompt p are p * n … p * n + n - 1. Raises LlmxError."""
        tasks = [asyncio.create_task(self._pump(at, stream)) for at, stream in enumerate(self.streams)]
        running = len(tasks)
        try:
            while running:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    at, delta = item
                    self.completion_tokens += len(delta.token_ids)
                    yield at * self.n + delta.index, delta
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, at: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                self._queue.put_nowait((at, delta))
            self._queue.put_nowait(None)
        except Exception as error:
            self._queue.put_nowait(error)

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
