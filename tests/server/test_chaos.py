"""Clients that dawdle, stop halfway, or never read: each costs itself only."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server.fake import FakeLLM, forever, says
from server.running import PATIENCE, Running, eventually, running

from llmx.core import Delta

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PROMPT = {"prompt": "hi"}


def connect(server: Running, receive: int | None = None) -> socket.socket:
    """receive: bytes that the client's side holds unread."""
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    return connection


def drips(connection: socket.socket, piece: bytes) -> bytes:
    """Sends `piece` again and again until the server has enough; what it said."""
    said, deadline = b"", time.monotonic() + PATIENCE
    connection.settimeout(0.02)
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            try:
                connection.sendall(piece)
                got = connection.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                return said
            if not got:
                return said
            said += got
    raise AssertionError("the server puts up with it for ever")


def sent(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)


@contextmanager
def many(server: Running, count: int, begin: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent `begin`."""
    connections = [connect(server) for _ in range(count)]
    try:
        for connection in connections:
            connection.sendall(begin)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def test_a_head_that_comes_in_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.protocol.HEAD_SECONDS", 0.3)
    with running(FakeLLM(says("x"))) as server, connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert drips(connection, b"a") == b""


def test_a_body_that_comes_in_drips_gets_408_and_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.parsing.BODY_SECONDS", 0.3)
    with running(FakeLLM(says("x"))) as server, connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n{")
        said = drips(connection, b" ")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert eventually(lambda: not server.server.service.busy)


@pytest.mark.parametrize("begin", [b"GET /version HT", HEAD + b"Content-Length: 100\r\n\r\n{"], ids=["head", "body"])
def test_many_that_dawdle_hold_up_nobody(begin: bytes) -> None:
    with running(FakeLLM(says("fine"))) as server, many(server, 60, begin):
        for _ in range(5):
            assert server.post("completions", PROMPT)[1]["choices"][0]["text"] == "fine"
            assert server.call("GET", "/health")[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_who_closes_its_half_after_asking_is_taken_for_gone(stream: bool) -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm) as server, connect(server) as connection:
        connection.sendall(sent(PROMPT | {"stream": stream}))
        assert eventually(lambda: bool(llm.opened))
        connection.shutdown(socket.SHUT_WR)
        assert eventually(lambda: llm.opened[0].aborted and not server.server.service.busy)
        llm.script = says("fine")
        assert server.post("completions", PROMPT)[0] == 200


def test_half_a_body_and_then_the_end_leaves_nothing() -> None:
    with running(FakeLLM(says("x"))) as server, connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert eventually(lambda: server.server.service.busy)
        connection.shutdown(socket.SHUT_WR)
        assert eventually(lambda: not server.server.service.busy)


def large(count: int) -> Callable[[int], Delta | None]:
    """More text than the buffers between server and client hold."""
    return lambda at: Delta(0, "x" * 50_000, (120,), "length" if at == count - 1 else None) if at < count else None


def test_a_reader_that_stops_is_cut_off_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.protocol.WRITE_SECONDS", 0.5)
    llm = FakeLLM(large(400))  # 20 MB
    with running(llm) as server, connect(server, receive=4096) as connection:
        connection.sendall(sent(PROMPT | {"stream": True}))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        llm.script = says("fine")
        assert server.post("completions", PROMPT)[1]["choices"][0]["text"] == "fine"
        assert eventually(lambda: not server.server.service.busy)
        assert eventually(lambda: not server.server.server_state.connections)
        rest = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        assert b"[DONE]" not in rest
        assert len(rest) < 400 * 50_000


def test_a_reader_that_stops_while_the_engine_goes_on_for_ever_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.protocol.WRITE_SECONDS", 0.5)
    llm = FakeLLM(lambda _: Delta(0, "x" * 50_000, (120,)), pause=0.002)
    with running(llm) as server, connect(server, receive=4096) as connection:
        connection.sendall(sent(PROMPT | {"stream": True}))
        assert eventually(lambda: bool(llm.opened) and llm.opened[0].aborted)
        assert eventually(lambda: not server.server.service.busy)


def test_a_slow_reader_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes far longer than the time in which it must take something."""
    monkeypatch.setattr("llmx.server.protocol.WRITE_SECONDS", 1.0)
    llm = FakeLLM(large(200))  # 10 MB
    with running(llm) as server, connect(server, receive=65536) as connection:
        connection.sendall(sent(PROMPT | {"stream": True}))
        got, began = b"", time.monotonic()
        while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = connection.recv(1 << 16)
            assert piece, "it was cut off"
            got = got[-100:] + piece
            time.sleep(max(0.0, 0.02 - (time.monotonic() - began) / 1000))
        assert not llm.opened[0].aborted


def test_a_full_server_refuses_before_the_body_comes() -> None:
    with running(FakeLLM(forever, pause=0.01), queued_requests=0) as server:
        admission = server.server.service.admission
        places = [admission.enter() for _ in range(admission.seats)]
        with connect(server) as connection:
            connection.sendall(HEAD + b"Content-Length: 9000000\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
        for place in places:
            place.__exit__()


def test_pipelined_requests_are_answered_in_order() -> None:
    with running(FakeLLM(says("x"))) as server, connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 + b"GET /health HTTP/1.1\r\n"
                           b"Host: localhost\r\nConnection: close\r\n\r\n")  # fmt: skip
        said = b"".join(iter(lambda: connection.recv(65536), b""))
        assert said.count(b"HTTP/1.1 200 OK") == 3
        assert said.rstrip().endswith(b'{"status":"ok"}')
