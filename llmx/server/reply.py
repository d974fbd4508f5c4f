"""From a generation to an answer: one JSON object, or server-sent events. The endpoints give the shapes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmx.core import Delta, Logprob
from llmx.server.errors import describe
from llmx.server.generation import ClientGone, Generation, unless_gone
from llmx.server.protocol import CLOSE

log = logging.getLogger("llmx.server")
DONE = b"data: [DONE]\n\n"
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # `dumps` makes one at each call
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON has no raw line breaks, so one `data:` line does."""
    return b"data: %s\n\n" % JSON.encode(data).encode()


@dataclass
class Choice:
    """What one choice has so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Reply(ABC):
    """An endpoint's answer. `id`, `created` and `model` are fixed here, so that all chunks carry the same."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, generation: Generation, model: str, *, include_usage: bool = False, usage_so_far: bool = False
    ) -> None:
        self.generation = generation
        self.include_usage = include_usage
        self.usage_so_far = usage_so_far
        self.failed = False  # a stream of it, after it had begun
        self.head = {"id": generation.id, "created": int(time.time()), "model": model}

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished choice of a plain answer."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a stream sends ahead of the first text of choice `index`."""

    @abstractmethod
    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices that a stream sends for `delta`, one after the other, perhaps none."""

    def says(self, delta: Delta) -> bool:
        """Whether there is anything in `delta` to send."""
        return bool(delta.text or delta.logprobs or delta.finish_reason or self.usage_so_far)

    def usage(self) -> dict[str, Any]:
        return self.generation.usage()

    def hear(self, index: int, delta: Delta) -> Delta:
        """What comes of choice `index`, as the endpoint wants to see it."""
        return delta

    def extra(self) -> dict[str, Any]:
        """Fields beside `choices` in a plain answer."""
        return {}

    async def complete(self) -> dict[str, Any]:
        """The plain answer, once everything has finished. Raises LlmxError."""
        count = len(self.generation.streams) * self.generation.n
        choices = [Choice() for _ in range(count)]
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(self.hear(index, delta))
        shapes = [self.whole(index, choice) for index, choice in enumerate(choices)]
        return self._object(self.object, shapes) | {"usage": self.usage()} | self.extra()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, those of a delta in one piece. A failure becomes an event too: the status
        line has long been sent."""
        opened: set[int] = set()
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for index, delta in deltas:
                    delta = self.hear(index, delta)
                    shapes = []
                    if index not in opened:
                        opened.add(index)
                        shapes += [first] if (first := self.opening(index)) else []
                    if shapes := [*shapes, *self.pieces(index, delta)]:
                        yield b"".join(map(self._chunk, shapes))
            if self.include_usage:
                yield event(self._object(self.chunk_object, []) | {"usage": self.usage()})
        except Exception as error:
            self.failed = True
            status, shape = describe(error)
            if status == 500:
                log.exception("A stream failed.")
            yield event(shape)
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice. What all of them begin with is written once."""
        usage = ""
        if self.usage_so_far:
            usage = f',"usage":{JSON.encode(self.usage())}'
        elif self.include_usage:
            usage = ',"usage":null'
        return f"data: {self._beginning}[{JSON.encode(choice)}]{usage}}}\n\n".encode()

    @cached_property
    def _beginning(self) -> str:
        """An event's JSON up to its choices."""
        return JSON.encode(self._object(self.chunk_object, [])).removesuffix("[]}")

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": kind, "choices": choices}


class EventStream(Response):
    """Sends a reply's events. Aborts the generation when the client goes, and when anything else ends the sending.

    After `silence` seconds without one (a long prompt, a long queue) it sends a comment: proxies between cut off
    connections that say nothing, and a write is what shows that a client has vanished. After a failure the connection
    is closed, as after other answers that say 503.
    """

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, silence: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.reply = reply
        self.silence = silence
        self.said = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.reply.generation:
            try:
                await unless_gone(receive, self._send(scope, send))
            except (ClientGone, OSError):
                log.debug("The client left a stream.")

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        beat = asyncio.create_task(self._beat(send))
        try:
            async with aclosing(self.reply.events()) as events:
                async for data in events:
                    self.said = time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        scope[CLOSE] = self.reply.failed
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.silence)
            if time.monotonic() - self.said >= self.silence:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def respond(request: Request, reply: Reply, stream: bool, silence: float) -> Response:
    """The HTTP response for a reply, streamed or whole. Raises LlmxError where a plain one fails."""
    if stream:
        return EventStream(reply, silence)
    with reply.generation:
        try:
            return JSONResponse(await unless_gone(request.receive, reply.complete()))
        except ClientGone:
            return Response(status_code=499)
