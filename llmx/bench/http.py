"""A bare HTTP/1.1 client: the clock is read before anything else is done with what arrived, and parsing waits."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from llmx.errors import LlmxError, UsageError

HEAD_BYTES = 1 << 16
CHECK_SECONDS = 5.0  # how often it looks whether a server has gone silent
READ_BYTES = 1 << 20


class Broken(Exception):
    """The connection failed, or what came is no HTTP."""


class Framing:
    """Takes a response apart as it comes: its head, then its body by Content-Length, in chunks, or to the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.reusable = True
        self._head: bytes | None = b""
        self._chunked = False
        self._left: int | None = 0  # bytes of the body, or of the chunk; None: until the connection ends
        self._rest = b""  # an unfinished line of the framing
        self._trailer = False

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`. Raises Broken."""
        if self._head is not None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                if len(self._head) > HEAD_BYTES:
                    raise Broken("the head of the answer has no end")
                return b""
            self._begin(head)
            if self.status < 200:  # 100 Continue and the like: the answer follows
                self._head = b""
                return self.feed(data)
            self._head = None
        return self._chunks(data) if self._chunked else self._plain(data)

    def end(self) -> None:
        """The connection was closed. Raises Broken where more was to come."""
        if not self.done and (self._head is not None or self._chunked or self._left is not None):
            raise Broken("the connection was closed before the answer ended")
        self.done, self.reusable = True, False

    def _begin(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Broken("the answer is no HTTP/1.1")
        self.status = int(rest[:3])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        connection = self.headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        self.reusable = "close" not in connection
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit()):
            raise Broken("the answer's Content-Length is no number")
        self._left = 0 if self._chunked or self.status in (204, 304) else None if length is None else int(length)
        self.done = not self._chunked and self._left == 0

    def _plain(self, data: bytes) -> bytes:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.done = self._left == 0
        return data

    def _chunks(self, data: bytes) -> bytes:
        body = []
        while data and not self.done:
            if self._left:
                piece = data[: self._left]
                self._left -= len(piece)
                body.append(piece)
                data = data[len(piece) :]
                continue
            line, found, data = (self._rest + data).partition(b"\n")
            if not found:
                self._rest = line
                if len(line) > HEAD_BYTES:
                    raise Broken("a chunk of the answer has no size")
                break
            self._rest = b""
            self._line(line.strip())
        return b"".join(body) if len(body) != 1 else body[0]

    def _line(self, line: bytes) -> None:
        if self._trailer:
            self.done = not line
        elif line:  # an empty one ends the chunk before
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise Broken("a chunk of the answer has no size") from None
            self._trailer = self._left == 0


@dataclass
class Exchange:
    """One request and what came of it: `pieces` are (clock, bytes of the body) as they arrived."""

    sent: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self.last = 0.0  # when something arrived
        self._framing = Framing()
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send; the future is done when the answer has ended, well or not."""
        assert self.transport is not None
        self._framing, self._exchange = Framing(), exchange
        self._ended = asyncio.get_running_loop().create_future()
        exchange.sent = self.last = time.perf_counter()
        self.transport.write(request)
        return self._ended

    def data_received(self, data: bytes) -> None:
        now = self.last = time.perf_counter()
        exchange, framing = self._exchange, self._framing
        if exchange is None:  # nobody asked
            self.abort()
            return
        try:
            body = framing.feed(data)
        except Broken as error:
            self._finish(str(error))
            self.abort()
            return
        if body:
            exchange.pieces.append((now, body))
        if framing.done:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._exchange is not None:
            try:
                if exc is not None:
                    raise Broken(f"the connection broke: {exc}")
                self._framing.end()
                self._finish(None)
            except Broken as error:
                self._finish(str(error))

    def _finish(self, error: str | None) -> None:
        exchange, ended = self._exchange, self._ended
        assert exchange is not None
        assert ended is not None
        exchange.status, exchange.error, exchange.ended = self._framing.status, error, True
        self._exchange = None
        if not ended.done():
            ended.set_result(None)

    @property
    def free(self) -> bool:
        return not self.lost and self._exchange is None and self._framing.reusable

    def leave(self) -> None:
        """Abort; the exchange stays as it is, neither well ended nor failed."""
        self._exchange = None
        self.abort()

    def abort(self) -> None:
        self.lost = True
        if self.transport is not None:
            self.transport.abort()


def _why(error: OSError) -> str:
    """asyncio's own text on a refused connection is a tuple."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error)


class Pool:
    """Connections to one server, kept open and used again; as many as there are requests at once."""

    def __init__(self, base: str, headers: Mapping[str, str], silence: float) -> None:
        """base: scheme, host and port, with or without a path. UsageError where it is none."""
        parts = urlsplit(base)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise UsageError(f"--url {base} is no address of a server.", "Give one like http://127.0.0.1:8000.")
        self.host, self.port, self.silence = parts.hostname, port, silence
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        fields = {"Host": f"{shown}:{port}", "User-Agent": "llmx", "Accept": "*/*"} | dict(headers)
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[Connection] = []

    def encode(self, method: str, path: str, body: bytes | None) -> bytes:
        """A whole request."""
        size = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{self._fields}{size}\r\n".encode("latin-1") + (body or b"")

    async def ask(self, request: bytes, exchange: Exchange) -> None:
        """Send and wait for the end; what goes wrong is written into the exchange."""
        while True:
            used = bool(self._idle)
            try:
                connection = self._idle.pop() if used else await self._connect()
            except (OSError, ssl.SSLError) as error:
                exchange.sent = exchange.sent or time.perf_counter()
                exchange.error = f"{self.host}:{self.port} can't be reached: {_why(error)}"
                exchange.ended = True
                return
            if not connection.lost:
                try:
                    await self._wait(connection, connection.begin(request, exchange), exchange)
                except BaseException:
                    connection.leave()  # an interrupt leaves nothing running over there
                    raise
                if connection.free:
                    self._idle.append(connection)
                else:
                    connection.abort()
            stale = used and connection.lost and not exchange.pieces and not exchange.status
            if not stale:  # else the server closed an idle connection just when it was used again
                return
            exchange.ended, exchange.error = False, None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self._tls)
        return connection

    async def _wait(self, connection: Connection, ended: asyncio.Future[None], exchange: Exchange) -> None:
        while not ended.done():
            await asyncio.wait((ended,), timeout=min(CHECK_SECONDS, self.silence))
            if not ended.done() and time.perf_counter() - connection.last > self.silence:
                connection.abort()
                await ended
                exchange.error = f"nothing came for {self.silence:g} s"

    async def warm(self, count: int) -> None:
        """Open `count` connections ahead, so that no timed request waits for its own. LlmxError where that fails."""
        try:
            self._idle += await asyncio.gather(*(self._connect() for _ in range(count - len(self._idle))))
        except OSError as error:
            raise LlmxError(f"{self.host}:{self.port} can't be reached: {_why(error)}.") from error

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
