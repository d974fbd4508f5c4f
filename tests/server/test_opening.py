"""While the model loads: the port answers, and signals, failures and a taken port are as quick as before."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server.running import PATIENCE, eventually
from server.served import Served, alive, children, command

from llmx.server.listen import bind
from llmx.server.opening import opening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def assert_loading(port: int, method: str, path: str) -> None:
    status, headers, raw = ask(port, method, path)
    assert status == 503
    assert int(headers["retry-after"]) > 0
    error = json.loads(raw)["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "loading", None)


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@contextmanager
def loading(model: Path) -> Iterator[tuple[Served, int, int]]:
    """A server that is stuck in loading its model: it, its port, and its engine's process, which is stopped."""
    port = free_port()
    with command(str(model), "--port", str(port), "--device", "cpu", "--threads", "1") as process:
        served = Served(process)
        engines: list[int] = []
        try:
            assert eventually(lambda: bool(children(process.pid)))
            engines.append(served.engine)
            # Not before it is a program of its own: until then the server waits for it in the kernel.
            assert eventually(lambda: b"llmx.engine.worker" in Path(f"/proc/{engines[0]}/cmdline").read_bytes())
            os.kill(engines[0], signal.SIGSTOP)
            yield served, port, engines[0]
        finally:
            process.kill()
            for engine in engines:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            served.ended()


def test_every_route_says_503_until_the_model_is_there(tiny: Path) -> None:
    with loading(tiny) as (served, port, engine):
        for method, path in [("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"), ("GET", "/nowhere")]:
            assert_loading(port, method, path)
        assert_loading(port, "POST", "/v1/completions")
        assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()
        os.kill(engine, signal.SIGCONT)
        assert eventually(lambda: "Try: curl" in served.said)
        assert [ask(port, "GET", path)[0] for path in ("/health", "/ready", "/v1/models")] == [200] * 3
        assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_loading_at_once_even_of_a_stuck_engine(tiny: Path, number: int, code: int) -> None:
    with loading(tiny) as (served, port, engine):
        assert_loading(port, "GET", "/health")
        served.process.send_signal(number)
        assert served.ended() == code
        assert eventually(lambda: not alive(engine))
        assert not connects(port)
        assert "Traceback" not in served.said


def test_an_engine_that_dies_while_it_loads_is_one_sentence(tiny: Path) -> None:
    with loading(tiny) as (served, port, engine):
        assert_loading(port, "GET", "/health")
        os.kill(engine, signal.SIGKILL)
        assert served.ended() == 1
        assert "error: The engine process ended by signal 9.\n" in served.said
        assert "Traceback" not in served.said


def test_no_connection_is_refused_when_the_next_server_takes_over() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        for _ in range(2):  # it leaves the port open
            with opening(listener):
                assert_loading(port, "GET", "/health")
            assert connects(port)


def test_leaving_before_it_has_begun_is_fine() -> None:
    with bind("127.0.0.1", 0) as listener:
        for _ in range(20):
            with opening(listener):
                pass
        assert connects(listener.getsockname()[1])
