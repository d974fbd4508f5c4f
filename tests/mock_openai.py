"""A server of OpenAI's API without a model: answers come at the times that it was told, and it writes down when it
wrote them. Standard library alone; `python mock_openai.py --ttft-ms 50 --itl-ms 10` runs it by itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from llmx.bench.clock import FineSelector


@dataclass
class Script:
    """How it answers. Times in seconds. `chunk`: tokens in each. `usage`: "none", "last" or "running".

    `refuse`: the n-th requests (from 0) are answered 429; `break_after`: an error event after so many chunks, of the
    requests in `breaks`; `drop`: connections that are closed after that. `knows`: no field beyond OpenAI's if False.
    """

    ttft: float = 0.0
    itl: float = 0.0
    chunk: int = 1
    ids: bool = True
    usage: str = "running"
    role_first: bool = True
    comments: bool = False
    cached: int = 0
    refuse: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    drops: frozenset[int] = frozenset()
    break_after: int = 2
    knows: bool = True
    tokenizes: bool = True
    stop_after: int | None = None  # tokens, whatever was asked for
    key: str | None = None
    inflates: int = 1  # how many tokens its usage tells for each there is


@dataclass
class Seen:
    """One request as the server saw it: its body, when it was there, and when each chunk with tokens was written."""

    path: str
    body: dict[str, Any]
    received: float
    written: list[float] = field(default_factory=list)


class Mock:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.port = 0
        self.count = 0
        self.connections = 0
        self.log: TextIO | None = None  # a line for each whole answer: when it was asked and when it wrote

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 24)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        received = time.perf_counter()
        if self.script.key is not None and headers.get("authorization") != f"Bearer {self.script.key}":
            return self._json(writer, 401, {"error": {"message": "Wrong key."}})
        if method == "GET":
            listed = {"data": [{"id": "mock"}]}
            return self._json(writer, 200 if path == "/v1/models" else 404, listed)
        body = json.loads(raw)
        if path == "/tokenize" and self.script.tokenizes:
            return self._json(writer, 200, {"tokens": [ord(c) for c in body["prompt"][:400]]})
        if path == "/detokenize" and self.script.tokenizes:
            return self._json(writer, 200, {"prompt": "".join(map(chr, body["tokens"]))})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return self._json(writer, 404, {"error": {"message": "Not here."}})
        own = {"ignore_eos", "cache_salt", "return_token_ids"} & body.keys()
        if not self.script.knows and (own or "continuous_usage_stats" in body.get("stream_options", {})):
            return self._json(writer, 400, {"error": {"message": f"Unknown: {sorted(own)}."}})
        seen = Seen(path, body, received)
        self.seen.append(seen)
        return await self._stream(writer, seen)

    def _json(self, writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return True

    async def _stream(self, writer: asyncio.StreamWriter, seen: Seen) -> bool:
        number, self.count, script = self.count, self.count + 1, self.script
        if number in script.refuse:
            return self._json(writer, 429, {"error": {"message": "Too many."}})
        chat = "chat" in seen.path
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat and script.role_first:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        asked = int(seen.body["max_tokens"])
        total = min(asked, script.stop_after or asked)
        for at in range(0, total, script.chunk):
            await _until(seen.received + script.ttft + at // script.chunk * script.itl)
            if writer.is_closing():
                return False
            if script.comments:
                self._raw(writer, b": keep-alive\n\n")
            if at // script.chunk == script.break_after and number in script.breaks:
                self._event(writer, {"error": {"message": "The engine broke."}})
                self._raw(writer, b"data: [DONE]\n\n")
                self._raw(writer, b"")
                return True
            if at // script.chunk == script.break_after and number in script.drops:
                return False
            self._chunk(writer, seen, chat, at, min(script.chunk, total - at), total)
        if script.usage != "none" and "include_usage" in seen.body.get("stream_options", {}):
            self._event(writer, {"choices": [], "usage": self._usage(seen, total)})
        self._raw(writer, b"data: [DONE]\n\n")
        self._raw(writer, b"")
        if self.log is not None:
            self.log.write(json.dumps({"received": seen.received, "written": seen.written}) + "\n")
            self.log.flush()
        return True

    def _chunk(self, writer: asyncio.StreamWriter, seen: Seen, chat: bool, at: int, tokens: int, total: int) -> None:
        text = "x" * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if at + tokens == total else None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if self.script.ids and seen.body.get("return_token_ids"):
            choice["token_ids"] = [120] * tokens
        event: dict[str, Any] = {"choices": [choice]}
        if self.script.usage == "running" and "continuous_usage_stats" in seen.body.get("stream_options", {}):
            event["usage"] = self._usage(seen, at + tokens)
        seen.written.append(time.perf_counter())
        self._event(writer, event)

    def _usage(self, seen: Seen, tokens: int) -> dict[str, Any]:
        tokens *= self.script.inflates
        prompt = seen.body.get("prompt") or seen.body["messages"][0]["content"]
        details = {"cached_tokens": min(self.script.cached, len(prompt))}
        return {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": details}

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._raw(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _until(due: float) -> None:
    if (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left)


@contextmanager
def mocking(script: Script) -> Iterator[Mock]:
    """The server in a thread of this process."""
    mock, loop, ready = Mock(script), asyncio.SelectorEventLoop(FineSelector()), threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        async with await mock.start() as server:
            ready.set()
            with suppress(asyncio.CancelledError):
                await server.serve_forever()

    def thread() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:

            async def main() -> None:
                tasks.append(asyncio.create_task(run()))
                await tasks[0]

            runner.run(main())

    running = threading.Thread(target=thread)
    running.start()
    try:
        assert ready.wait(60)
        yield mock
    finally:
        loop.call_soon_threadsafe(tasks[0].cancel)
        running.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--chunk", type=int, default=1)
    parser.add_argument("--log", type=argparse.FileType("w"), default=None)
    flags = parser.parse_args()
    mock = Mock(Script(ttft=flags.ttft_ms / 1e3, itl=flags.itl_ms / 1e3, chunk=flags.chunk))
    mock.log = flags.log
    mock.port = flags.port

    async def run() -> None:
        async with await mock.start() as server:
            print(mock.url, flush=True)
            await server.serve_forever()

    with suppress(KeyboardInterrupt), asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())
    ) as runner:  # fmt: skip
        runner.run(run())


if __name__ == "__main__":
    main()
