"""From a listening socket to an exit code: uvicorn, signals, draining, and a watch over the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from llmx.errors import LlmxError
from llmx.server.app import build_app
from llmx.server.banner import start_lines
from llmx.server.service import Service
from llmx.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmx.llm import LLM

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WATCH_SECONDS = 0.25  # how soon a dead engine is seen
GRACE_SECONDS = 5  # for streams that were told to end to say so


class Server(uvicorn.Server):
    """uvicorn's server with our signals: the first lets running requests finish, the second stops at once.

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
            logging.disable()  # what follows cuts every request off; uvicorn would log each as a failure
            raise KeyboardInterrupt
        self.stopped_by = sig
        self.should_exit = True

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
        while not (reason := self.service.failed):
            await asyncio.sleep(WATCH_SECONDS)
        self.engine_failed = reason
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        seconds = 0.0 if self.engine_failed else self.service.settings.drain_seconds
        if running := len(self.service.live):
            say(f"Stopping: up to {seconds:g} s for {running} running request(s); Ctrl-C again stops at once.")
        deadline = loop.call_later(seconds, self.service.fail_all, self.engine_failed or "The server is shutting down.")
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def say(line: str) -> None:
    """Talk goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def make_server(llm: LLM, settings: ServerSettings, listener: socket.socket) -> Server:
    """The server for `llm` on `listener`; `.run(sockets=[listener])` serves until it is told to stop."""
    app = build_app(llm, settings)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        lifespan="off",
        ws="none",
        log_config=_logging(settings),
        access_log=settings.log_requests,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + GRACE_SECONDS,
    )
    return Server(app.state.service, config, listener)


def serve(llm: LLM, settings: ServerSettings, listener: socket.socket) -> int:
    """Serves until a signal; the exit code: 0 after SIGTERM, 130 after SIGINT. Raises LlmxError if the engine ended."""
    server = make_server(llm, settings, listener)
    server.run(sockets=[listener])
    if server.engine_failed:
        raise LlmxError(server.engine_failed)
    return 130 if server.stopped_by == signal.SIGINT else 0


def _logging(settings: ServerSettings) -> dict[str, Any]:
    """Everything to stderr; requests only where asked for. uvicorn's own news (started, stopping) is ours to tell."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "talk": {"format": "%(levelname)s: %(message)s"},
            "access": {
                "()": "uvicorn.logging.AccessFormatter",
                "fmt": '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s',
                "use_colors": False,
            },
        },
        "handlers": {
            "talk": {"class": "logging.StreamHandler", "formatter": "talk", "stream": "ext://sys.stderr"},
            "access": {"class": "logging.StreamHandler", "formatter": "access", "stream": "ext://sys.stderr"},
        },
        "loggers": {
            "llmx.server": {"handlers": ["talk"], "level": "WARNING", "propagate": False},
            "uvicorn": {"handlers": ["talk"], "level": "WARNING", "propagate": False},
            "uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        },
    }
