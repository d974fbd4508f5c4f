"""HTTP/1.1 as uvicorn reads it with h11, with our error object and a bound on how long a request's head may take."""

from __future__ import annotations

import asyncio
import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmx.server.errors import error_object

HEAD_BYTES = 64 * 1024  # h11 bounds what it waits to see the end of; the front what came in one piece
MOST_HEADERS = 100
HEAD_TOO_LARGE = f"The request has over {MOST_HEADERS} headers, or over {HEAD_BYTES} bytes of them."
HEAD_SECONDS = 60.0
CLOSE = "llmx.close"  # in the ASGI scope of a request: close the connection after its answer
WRITE_SECONDS = 60.0  # in which a client must take something of what waits for it


class Protocol(H11Protocol):
    """One connection. Not httptools: it has no bound on the size of headers."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        if self.cycle is not None and self.cycle.scope.get(CLOSE):
            self.transport.close()  # once what was written has gone out
        self._wait_for_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head.cancel()
        self._stop_watch()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is behind by more than the buffers hold."""
        super().pause_writing()
        self._stop_watch()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watch()
        super().resume_writing()

    def _watch_writing(self, behind: int) -> None:
        self._stalled = self.loop.call_later(WRITE_SECONDS, self._check_writing, behind)

    def _check_writing(self, behind: int) -> None:
        """A client that reads nothing any more, stopped or gone without a word, would keep its request for ever."""
        now = self.transport.get_write_buffer_size()
        if now < behind:
            self._watch_writing(now)
        else:
            self.transport.abort()

    def _stop_watch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()

    def _wait_for_head(self) -> None:
        """uvicorn's own timer stops at the first byte; a client may send one a minute."""
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it where h11 refuses what came."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        message, code = "This is not an HTTP/1.1 request.", "invalid_http"
        if status == 431:
            message, code = HEAD_TOO_LARGE, "headers_too_large"
        body = json.dumps(error_object(message, status, code=code)).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
