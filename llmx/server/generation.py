"""The engine's streams behind one HTTP request: opened together, read as one, counted, and aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
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
    """A context manager: when it is left, whatever still runs is aborted. `live` holds those that are inside."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        salt: bytes,
        live: set[Generation],
        id: str,
    ) -> None:
        self.id = id
        self.n = params.n
        self.completion_tokens = 0
        self.error: LlmxError | None = None
        self.streams: list[Stream] = []
        self._live = live
        try:
            for at, prompt in enumerate(prompts):
                self.streams.append(llm.open(prompt, params, id=f"{id}-{at}", salt=salt))
        except BaseException:
            self._abort()
            raise
        live.add(self)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.discard(self)
        self._abort()

    def fail(self, error: LlmxError) -> None:
        """Ends it from outside: whoever reads it gets `error`."""
        self.error = error
        self._abort()

    def _abort(self) -> None:
        for stream in self.streams:
            stream.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) as they come; the choices of prompt p are p * n … p * n + n - 1. Raises LlmxError."""
        async with aclosing(_merged(self.streams)) as merged:
            async for at, delta in merged:
                if self.error:
                    break
                self.completion_tokens += len(delta.token_ids)
                yield at * self.n + delta.index, delta
        if self.error:
            raise self.error

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


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream, delta) of all streams, each in its own order."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(at: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                await queue.put((at, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
