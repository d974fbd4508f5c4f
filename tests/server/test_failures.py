"""What only an engine that fails on purpose, or never ends, can show."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from openai import APIError, OpenAI
from server.fake import INFO, FakeLLM, FakeStream, Script, forever, says
from server.running import PATIENCE, eventually, running

from llmx.core import Delta
from llmx.errors import LlmxError, RequestError
from llmx.server.banner import start_lines
from llmx.server.service import Service
from llmx.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
BOTH = pytest.mark.parametrize(("path", "body"), [("completions", PROMPT), ("chat/completions", CHAT)])


def fails_after(count: int, error: LlmxError) -> Script:
    return lambda step: error if step == count else Delta(0, "x", (120,))


def once_running(llm: FakeLLM, act: Callable[[], None]) -> None:
    """Calls `act`, from a thread, when a request has been opened."""
    threading.Thread(target=lambda: eventually(lambda: bool(llm.opened)) and act()).start()


@BOTH
def test_an_error_in_mid_stream_is_an_event_and_then_done(path: str, body: dict[str, object]) -> None:
    with running(FakeLLM(fails_after(2, LlmxError("The engine broke.")))) as server:
        *texts, error, done = server.events(path, body)
        assert error == {
            "error": {"message": "The engine broke.", "type": "server_error", "param": None, "code": "engine_failed"}
        }
        assert done == "[DONE]"
        assert len(texts) == 2 + (path == "chat/completions")
        assert eventually(lambda: not server.server.service.live)


@BOTH
@pytest.mark.parametrize("broken", [True, False])
def test_after_an_error_in_mid_stream_the_connection_is_closed(
    path: str, body: dict[str, object], broken: bool
) -> None:
    script = fails_after(2, LlmxError("The engine broke.")) if broken else says("fine")
    with running(FakeLLM(script)) as server, socket.create_connection(("127.0.0.1", server.port), PATIENCE) as one:
        data = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        one.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):  # the answer is whole in either case
            received += one.recv(65536) or pytest.fail("cut off")
        assert b"data: [DONE]" in received
        try:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            then = one.recv(65536)
        except ConnectionError:
            then = b""
        assert then[:12] == (b"" if broken else b"HTTP/1.1 200")


def test_openais_client_raises_on_an_error_in_mid_stream() -> None:
    with (
        running(FakeLLM(fails_after(1, LlmxError("The engine broke.")))) as server,
        OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="fake", prompt="hi", stream=True)
        with pytest.raises(APIError, match="The engine broke"):
            list(stream)


@BOTH
def test_a_plain_request_whose_engine_breaks_gets_503(path: str, body: dict[str, object]) -> None:
    with running(FakeLLM(fails_after(1, LlmxError("The engine broke.")))) as server:
        status, answer = server.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "engine_failed")


def test_a_bug_in_a_handler_is_500_without_its_text() -> None:
    llm = FakeLLM(says("x"))
    llm.render = None  # type: ignore[assignment, method-assign]
    with running(llm) as server:
        status, answer = server.post("chat/completions", CHAT)
    assert status == 500
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "NoneType" not in str(answer)


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [("completions", PROMPT, 1), ("completions", {"prompt": ["hi"] * 3}, 3), ("chat/completions", CHAT, 1)],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_client_that_leaves_aborts_its_request(
    path: str, body: dict[str, object], prompts: int, stream: bool
) -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm) as server:
        server.send_and_leave(
            path, body | {"stream": stream}, lambda got: len(llm.opened) == prompts and (not stream or b"data:" in got)
        )
        assert eventually(lambda: all(one.aborted for one in llm.opened))
        assert eventually(lambda: not server.server.service.live)
        llm.script = says("fine")
        assert server.post("completions", PROMPT)[1]["choices"][0]["text"] == "fine"


def test_if_one_of_several_prompts_is_refused_the_others_are_aborted() -> None:
    llm = FakeLLM(forever, pause=0.01)
    admit = llm.open

    def two(*args: Any, **kwargs: Any) -> FakeStream:
        if len(llm.opened) == 2:
            raise RequestError("Too long.", param="prompt", code="context_length_exceeded")
        return admit(*args, **kwargs)

    llm.open = two  # type: ignore[method-assign]
    with running(llm) as server:
        status, answer = server.post("completions", {"prompt": ["a", "b", "c"], "stream": True})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert [one.aborted for one in llm.opened] == [True, True]
        assert eventually(lambda: not server.server.service.live)


def test_health_is_503_once_the_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.run.WATCH_SECONDS", 3600.0)  # else the server stops while we ask
    llm = FakeLLM(says("x"))
    with running(llm) as server:
        assert server.call("GET", "/health") == (200, {"status": "ok"})
        llm.failed = "The engine process was killed."
        status, answer = server.call("GET", "/health")
        assert (status, answer["error"]["message"]) == (503, "The engine process was killed.")
        assert server.post("completions", PROMPT)[0] == 503


def test_when_the_engine_fails_streams_end_with_its_reason_and_the_server_stops() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm, drain_seconds=600.0) as server:
        once_running(llm, lambda: setattr(llm, "failed", "The engine process was killed."))
        *_, error, done = server.events("completions", PROMPT)
        assert error["error"]["message"] == "The engine process was killed."
        assert done == "[DONE]"
        assert server.server.should_exit
        assert server.server.engine_failed == "The engine process was killed."


def test_a_server_that_is_told_to_stop_ends_streams_with_an_event_when_their_time_is_over() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm, drain_seconds=0.2) as server:
        once_running(llm, lambda: server.server.handle_exit(signal.SIGTERM, None))
        *_, error, done = server.events("completions", PROMPT)
        assert error["error"]["message"] == "The server is shutting down."
        assert done == "[DONE]"
        assert llm.opened[0].aborted


def test_a_server_that_is_told_to_stop_lets_a_running_stream_finish() -> None:
    llm = FakeLLM(says("finished"), pause=0.05)
    with running(llm, drain_seconds=60.0) as server:
        once_running(llm, lambda: server.server.handle_exit(signal.SIGTERM, None))
        events = server.events("completions", PROMPT)
        assert "".join(one["choices"][0]["text"] for one in events[:-1]) == "finished"


def test_an_unknown_field_is_ignored_and_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x"))) as server:
        for _ in range(3):
            assert server.post("completions", PROMPT | {"session_id": 5})[0] == 200
    assert capfd.readouterr().err.count("'session_id'") == 1


def test_requests_are_logged_only_where_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x"))) as server:
        server.post("completions", PROMPT)
    assert "POST /v1/completions" not in capfd.readouterr().err
    with running(FakeLLM(says("x")), log_requests=True) as server:
        server.post("completions", PROMPT)
    assert '"POST /v1/completions HTTP/1.1" 200' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("address", "url", "warned"),
    [
        (("127.0.0.1", 5), "http://127.0.0.1:5", False),
        (("::1", 5, 0, 0), "http://[::1]:5", False),
        (("0.0.0.0", 5), "http://127.0.0.1:5", True),
        (("::", 5, 0, 0), "http://[::1]:5", True),
        (("10.0.0.7", 5), "http://10.0.0.7:5", True),
    ],
)
def test_an_address_that_others_reach_gets_a_warning(address: tuple[Any, ...], url: str, warned: bool) -> None:
    llm: Any = FakeLLM(says("x"))
    lines = start_lines(Service(llm, ServerSettings()), Mock(getsockname=lambda: address))
    assert lines[0] == f"llmx serves fake at {url}/v1"
    assert any("warning" in line for line in lines) == warned


def test_the_start_line_says_where_what_how_much_and_gives_a_line_to_paste(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x")), served_names=("mine", "yours")) as server:
        assert [one["id"] for one in server.call("GET", "/v1/models")[1]["data"]] == ["mine", "yours"]
        for name in ("mine", "yours", INFO.model, None):
            assert server.post("completions", PROMPT | {"model": name})[1]["model"] == "mine"
        said = capfd.readouterr().err
        url = f"http://127.0.0.1:{server.port}/v1"
    assert f"llmx serves mine, yours at {url}\n" in said
    assert "float32 on cpu" in said
    assert "context 128 tokens × 4 sequences; KV cache 320 tokens (1 MiB, float32): 2 at full context" in said
    assert "kernels  reference\n" in said
    assert f'Try: curl {url}/chat/completions -H \'Content-Type: application/json\' -d \'{{"model": "mine"' in said


def test_a_silent_stream_says_that_it_lives_and_clients_do_not_mind() -> None:
    llm = FakeLLM(lambda at: says("hi")(at - 1) if at else Delta(0, "", ()), pause=0.3)
    with (
        running(llm, keep_alive_seconds=0.05) as server,
        OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        status, raw, _ = server.raw("POST", "/v1/completions", PROMPT | {"stream": True})
        assert status == 200
        before, _, after = raw.partition(b"data: ")
        assert before.startswith(b": keep-alive\n\n")
        assert set(before.split(b"\n\n")) == {b": keep-alive", b""}
        assert after.endswith(b"data: [DONE]\n\n")
        stream = client.completions.create(model="fake", prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hi"


def test_while_it_drains_new_requests_and_probes_are_told_so_and_what_runs_ends() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm, drain_seconds=600.0) as server:
        reader = threading.Thread(target=lambda: texts.extend(server.events("completions", PROMPT)))
        texts: list[Any] = []
        reader.start()
        assert eventually(lambda: bool(llm.opened))
        server.server.handle_exit(signal.SIGTERM, None)
        status, raw, headers = server.raw("POST", "/v1/completions", PROMPT)
        assert status == 503
        assert json.loads(raw)["error"]["code"] == "shutting_down"
        assert int(headers["retry-after"]) > 0
        assert headers["connection"] == "close"
        for path in ("/ready", "/health"):
            status, raw, headers = server.raw("GET", path)
            assert (status, json.loads(raw)["error"]["code"]) == (503, "shutting_down")
            assert int(headers["retry-after"]) > 0
        rest = iter([Delta(0, "end", (1,), "stop")])
        llm.opened[0].script = lambda _: next(rest, None)
        reader.join()
        assert texts[-2]["choices"][0]["finish_reason"] == "stop"
        assert eventually(lambda: server.server.should_exit)
