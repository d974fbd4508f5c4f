"""From a listening socket to an exit code: uvicorn, signals, draining, and a watch over the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from llmx.errors import LlmxError
from llmx.server.app import build_app
from llmx.server.banner import start_lines
from llmx.server.front import Front
from llmx.server.http import configuration
from llmx.server.service import Service
from llmx.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmx.llm import LLM

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCH_SECONDS = 0.25  # how soon a dead engine is seen, a request that took too long, and that nothing runs any more
EXIT_INTERRUPTED = 130
SWITCH_SECONDS = 0.001


class Server(uvicorn.Server):
    """uvicorn's server with our signals: the first lets running requests finish, the second stops at once.

    While they finish the port stays open: probes and new requests are answered with 503, which load balancers need.
    `engine_failed` says why the engine ended, if that is what stopped the server.
    """

    def __init__(self, service: Service, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.service = service
        self.listener = listener
        self.stopped_by: int | None = None
        self.engine_failed: str | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals aren't raised again afterwards: the exit code is ours to choose."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            # Unwinding would wait for threads: one tokenizes, another waits for an engine that may never answer.
            self.service.llm.kill()
            os._exit(EXIT_INTERRUPTED)
        self.stopped_by = sig
        self.service.admission.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for line in start_lines(self.service, self.listener):
            say(line)

    async def main_loop(self) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            await super().main_loop()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Ends the server once the engine has failed, or once it was told to stop and nothing runs any more."""
        while not self.service.admission.draining:
            if self._engine_is_gone():
                return
            self.service.expire()
            await asyncio.sleep(WATCH_SECONDS)
        seconds = self.service.settings.drain_seconds
        if running := len(self.service.live):
            say(f"Stopping: up to {seconds:g} s for {running} running request(s); Ctrl-C again stops at once.")
        deadline = time.monotonic() + seconds
        while self.service.busy and time.monotonic() < deadline and not self._engine_is_gone():
            self.service.expire()
            await asyncio.sleep(WATCH_SECONDS)
        self.should_exit = True

    def _engine_is_gone(self) -> bool:
        if reason := self.service.failed:
            self.engine_failed = reason
            self.should_exit = True
        return self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.fail_all(self.engine_failed or "The server is shutting down.")
        await super().shutdown(sockets)


def say(line: str) -> None:
    """Talk goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def make_server(llm: LLM, settings: ServerSettings, listener: socket.socket) -> Server:
    """The server for `llm` on `listener`; `.run(sockets=[listener])` serves until it is told to stop."""
    app = build_app(llm, settings)
    service: Service = app.state.service
    outer: ASGIApp = Front(app, service, listener.getsockname()[0])
    if settings.origins:
        outer = CORSMiddleware(
            outer,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return Server(service, configuration(outer), listener)


def settle() -> None:
    """Keeps pauses of this process short. The vocabulary and the modules stay for good: without them a collection of
    all garbage takes well under a millisecond instead of 50. And a thread that parses or renders passes the interpreter
    on to the event loop after 1 ms instead of 5."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def serve(llm: LLM, settings: ServerSettings, listener: socket.socket) -> int:
    """Serves until a signal; the exit code: 0 after SIGTERM, 130 after SIGINT. Raises LlmxError if the engine ended."""
    server = make_server(llm, settings, listener)
    settle()
    server.run(sockets=[listener])
    if server.engine_failed:
        raise LlmxError(server.engine_failed)
    return EXIT_INTERRUPTED if server.stopped_by == signal.SIGINT else 0
