"""Before the model is there: the port is taken, so whoever asks is told to come back.

Without torch and without the application: it starts as soon as the port is bound, in a thread, while the model loads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import Receive, Scope, Send

LOADING_WAIT = 5  # seconds of Retry-After
LEAVE_SECONDS = 2.0


class Opening(threading.Thread):
    """Answers every request with 503. Its imports are done in the thread too: the model need not wait for them."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(name="llmx-opening", daemon=True)
        self.listener = listener.dup()  # a server closes its own when it ends; the port stays open
        self.server: uvicorn.Server | None = None
        self.over = False

    def run(self) -> None:
        import uvicorn

        from llmx.server.admission import Overloaded
        from llmx.server.errors import refusal
        from llmx.server.http import configuration

        async def loading(scope: Scope, receive: Receive, send: Send) -> None:
            """/health and /ready too say that the model isn't up yet."""
            await refusal(Overloaded("The model is loading.", "loading", 503, LOADING_WAIT))(scope, receive, send)

        self.server = uvicorn.Server(configuration(loading))
        if not self.over:
            self.server.run(sockets=[self.listener])
        self.listener.close()

    def leave(self) -> None:
        """From then on nobody answers; who connects waits for the next server on the port."""
        self.over = True
        if self.server is not None:
            self.server.should_exit = True
        self.join(LEAVE_SECONDS)


@contextlib.contextmanager
def opening(listener: socket.socket) -> Iterator[None]:
    """Answers on `listener` while the context is open."""
    thread = Opening(listener)
    thread.start()
    try:
        yield
    finally:
        thread.leave()
