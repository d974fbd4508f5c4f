"""A real server on a free loopback port, in a thread, and plain HTTP against it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmx.server.listen import bind
from llmx.server.run import Server, make_server
from llmx.server.settings import ServerSettings

# Tokens of a request that still runs when a test gets to what it does next, however fast the engine is and however busy
# the machine: a tiny model's 200 are over in less than a tenth of a second.
ENDLESS = 60_000
PATIENCE = 60.0  # seconds until a test gives up waiting; nothing is timed


class Running:
    """The server of a test."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, decoded JSON). `body` is sent as JSON unless it is bytes."""
        status, raw, _ = self.raw(method, path, body, headers)
        return status, json.loads(raw)

    def raw(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return self.call("POST", f"/v1/{path}", body)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every event of a stream, decoded; the last is "[DONE]"."""
        status, raw, headers = self.raw("POST", f"/v1/{path}", body | {"stream": True})
        assert status == 200, raw
        assert headers["content-type"].startswith("text/event-stream")
        blocks = raw.decode().split("\n\n")
        assert blocks.pop() == "", "every event ends with an empty line"
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    def send_and_leave(self, path: str, body: dict[str, Any], until: Callable[[bytes], bool]) -> None:
        """Sends a request and closes the connection as soon as `until(what was received)`."""
        data = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + data)
            connection.settimeout(0.05)
            received = b""
            deadline = time.monotonic() + PATIENCE
            while not until(received) and time.monotonic() < deadline:
                try:
                    received += connection.recv(65536)
                except TimeoutError:
                    continue
        assert time.monotonic() < deadline


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true before our patience ends."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def running(llm: Any, **settings: Any) -> Iterator[Running]:
    """Serves `llm` while the context is open."""
    chosen = ServerSettings(port=0, **({"drain_seconds": 0.0} | settings))
    with bind(chosen.host, chosen.port) as listener:
        port = listener.getsockname()[1]
        server = make_server(llm, chosen, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert eventually(lambda: server.started)
            yield Running(server, port)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()
