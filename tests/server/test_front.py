"""What a request passes before any route: keys, ids, origins, sizes, and a queue with an end."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError, RateLimitError
from server.fake import FakeLLM, forever, says
from server.running import PATIENCE, Running, eventually, running

from llmx.errors import UsageError
from llmx.server import keys
from llmx.server.admission import Admission, Overloaded
from llmx.server.settings import ServerSettings

PROMPT = {"prompt": "hi"}
KEYS = keys.read(["sk-one", "sk-two"], None)
EVERY = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", "/health/../v1/models"),
    ("GET", "//health"),
    ("OPTIONS", "/v1/models"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def assert_error(answer: Any, code: str) -> None:
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code


# ---- keys --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(FakeLLM(says("x")), keys=KEYS, allowed_hosts=("*",)) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), EVERY)
@pytest.mark.parametrize(
    "headers",
    [
        *({}, bearer("sk-on"), bearer("sk-one1"), bearer(""), bearer("schlüssel"), {"Authorization": "sk-one"}),
        *({"Authorization": "Basic sk-one"}, {"X-Api-Key": "sk-on"}),
        *({"Host": "127.0.0.1/health?"}, {"X-Forwarded-Path": "/health"}),
    ],
    ids=str,
)
def test_no_route_opens_without_a_key(locked: Running, method: str, path: str, headers: dict[str, str]) -> None:
    status, raw, answered = locked.raw(method, path, b"{}" if method == "POST" else None, {"X-A": "b"} | headers)
    assert status == 401
    assert_error(json.loads(raw), "invalid_api_key")
    assert answered["www-authenticate"] == "Bearer"
    assert b"sk-o" not in raw


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_needs_no_key(locked: Running, path: str) -> None:
    assert locked.call("GET", path)[0] == 200


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
def test_each_key_opens(locked: Running, key: str) -> None:
    assert locked.raw("GET", "/v1/models", headers={"X-Api-Key": key})[0] == 200
    with OpenAI(base_url=locked.url, api_key=key, max_retries=0) as client:
        assert client.completions.create(model="fake", prompt="hi").choices[0].text == "x"
        assert [model.id for model in client.models.list()] == ["fake"]
    with (
        OpenAI(base_url=locked.url, api_key=key + "x", max_retries=0) as client,
        pytest.raises(AuthenticationError, match="Incorrect API key"),
    ):
        client.models.list()


def test_a_key_may_be_good_for_some_paths_only(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nsk-all\n\n  sk-watch /metrics /v1/models/\n")
    with running(FakeLLM(says("x")), keys=keys.read((), file)) as server:
        with OpenAI(base_url=server.url, api_key="sk-watch", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["fake"]
            with pytest.raises(PermissionDeniedError):
                client.completions.create(model="fake", prompt="hi")
        assert server.raw("GET", "/metrics", headers=bearer("sk-watch"))[0] == 200
        assert server.raw("GET", "/metricsmore", headers=bearer("sk-watch"))[0] == 403
        assert server.raw("GET", "/version", headers=bearer("sk-all"))[0] == 200


@pytest.mark.parametrize("text", ["", "# none\n", "sk-a v1/models\n", "schlüssel\n", "x" * 513])
def test_a_key_file_that_says_nothing_usable_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="key"):
        keys.read((), file)


@pytest.mark.parametrize("given", ["", "two words", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        keys.read([given], None)


def test_keys_are_not_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x")), keys=KEYS, log_requests=True) as server:
        server.raw("GET", "/v1/models", headers=bearer("sk-one"))
        assert "sk-one" not in repr(vars(server.server.service)) + repr(server.server.service.settings)
    said = capfd.readouterr().err
    assert "sk-one" not in said
    assert '-H "Authorization: Bearer $LLMX_API_KEY"' in said


# ---- ids ---------------------------------------------------------------------------------------------------


def test_a_request_id_comes_back_and_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x")), log_requests=True) as server, OpenAI(base_url=server.url, api_key="x") as client:
        answer = client.completions.create(model="fake", prompt="hi", extra_headers={"X-Request-Id": "mine-17"})
        assert answer._request_id == "mine-17"
        status, _, headers = server.raw("GET", "/nowhere")
        assert status == 404
        made = headers["x-request-id"]
        assert len(made) == 32
        assert server.raw("GET", "/version", headers={"X-Request-Id": "two words"})[2]["x-request-id"] != "two words"
        with client.completions.create(model="fake", prompt="hi", stream=True) as stream:
            assert stream.response.headers["x-request-id"]
            list(stream)
    said = capfd.readouterr().err
    assert "mine-17\n" in said
    assert f"{made}\n" in said


# ---- origins -----------------------------------------------------------------------------------------------


def asked(server: Running, origin: str, method: str = "OPTIONS") -> http.client.HTTPMessage:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers |= {"Access-Control-Request-Headers": "authorization,content-type"}
    return server.raw(method, "/v1/models", headers=headers)[2]


def test_pages_of_other_origins_get_nothing_by_default() -> None:
    with running(FakeLLM(says("x"))) as server:
        for method in ("OPTIONS", "GET"):
            assert asked(server, "http://localhost:3000", method)["access-control-allow-origin"] is None


def test_allowed_origins_may_ask_also_for_what_needs_a_key() -> None:
    with running(FakeLLM(says("x")), origins=("http://localhost:3000", "https://a.org"), keys=KEYS) as server:
        for origin in ("http://localhost:3000", "https://a.org"):
            headers = asked(server, origin)
            assert headers["access-control-allow-origin"] == origin
            assert "authorization" in headers["access-control-allow-headers"]
            assert asked(server, origin, "GET")["access-control-allow-origin"] == origin  # a 401 too: pages see why
        evil = ("http://localhost.evil.com", "http://localhost:3000.evil.com", "https://a.org.evil.com")
        for origin in (*evil, "http://localhost.evil.com:3000", "http://localhost", "null"):
            assert asked(server, origin)["access-control-allow-origin"] is None


@pytest.mark.parametrize("origin", ["localhost", "http://", "https://a.org/path", "file:///x", "http://a.org evil"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(UsageError, match="--allowed-origins"):
        ServerSettings(origins=(origin,))


# ---- sizes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running(FakeLLM(says("x"))) as server:
        yield server


def test_too_many_or_too_large_headers_are_431(plain: Running) -> None:
    status, answer = plain.call("GET", "/version", headers={f"X-{at}": "x" for at in range(200)})
    assert status == 431
    assert_error(answer, "headers_too_large")
    status, answer = plain.call("GET", "/version", headers={"X-Long": "x" * 100_000})
    assert status == 431
    assert_error(answer, "headers_too_large")


def test_a_url_that_is_too_long_is_414(plain: Running) -> None:
    status, answer = plain.call("GET", "/version?" + "x" * 9000)
    assert status == 414
    assert_error(answer, "url_too_long")


def test_what_is_no_http_gets_the_error_object(plain: Running) -> None:
    with socket.create_connection(("127.0.0.1", plain.port), PATIENCE) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nbroken header\r\n\r\n")
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert_error(json.loads(body), "invalid_http")


def test_a_head_or_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.protocol.HEAD_SECONDS", 0.2)
    monkeypatch.setattr("llmx.server.parsing.BODY_SECONDS", 0.2)
    with running(FakeLLM(says("x"))) as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(b"GET /version HT")
            assert connection.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 50\r\n\r\n{")
            raw = b"".join(iter(lambda: connection.recv(65536), b""))
        assert raw.startswith(b"HTTP/1.1 408 ")
        assert_error(json.loads(raw.partition(b"\r\n\r\n")[2]), "body_too_slow")
        assert server.server.service.admission.texts == 0


# ---- the queue ---------------------------------------------------------------------------------------------


@contextmanager
def held(server: Running, body: dict[str, Any], count: int) -> Iterator[list[http.client.HTTPConnection]]:
    """`count` requests that do not end."""
    connections = []
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        connections.append(connection)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def test_a_full_queue_is_429_with_retry_after_and_empties_again() -> None:
    llm = FakeLLM(forever, pause=0.01)  # runs 4 at once
    with running(llm, queued_requests=2) as server:
        admission = server.server.service.admission
        with held(server, PROMPT, 6) as connections:
            assert eventually(lambda: admission.texts == 6)
            status, raw, headers = server.raw("POST", "/v1/completions", PROMPT)
            assert status == 429
            assert_error(json.loads(raw), "queue_full")
            assert json.loads(raw)["error"]["type"] == "rate_limit_error"
            assert 1 <= int(headers["retry-after"]) <= 60
            assert server.call("GET", "/ready")[0] == 429
            assert server.call("GET", "/health")[0] == 200
            assert server.call("GET", "/v1/models")[0] == 200
            with OpenAI(base_url=server.url, api_key="x", max_retries=0) as client, pytest.raises(RateLimitError):
                client.completions.create(model="fake", prompt="hi", stream=True)
            assert (
                b'llmx:request_rejected_total{model_name="fake",engine="0",code="queue_full"} 2'
                in (server.raw("GET", "/metrics")[1])
            )
            connections[0].close()
            assert eventually(lambda: admission.texts == 5)
            llm.script = says("x")
            assert server.post("completions", PROMPT)[0] == 200
        assert eventually(lambda: admission.texts == admission.tokens == 0)


def test_openais_client_comes_back_after_a_429() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with (
        running(llm, queued_requests=0) as server,
        OpenAI(base_url=server.url, api_key="x", max_retries=5) as client,
        held(server, PROMPT, 4) as connections,
    ):
        assert eventually(lambda: len(llm.opened) == 4)
        answers = []
        real = server.server.service.admission.full

        def full(why: str) -> Overloaded:
            answers.append(why)
            for connection in connections:
                connection.close()
            return real(why)

        server.server.service.admission.full = full  # type: ignore[method-assign]
        llm.script = says("x")
        assert client.completions.create(model="fake", prompt="hi").choices[0].text == "x"
        assert answers


def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    with running(FakeLLM(forever, pause=0.01), queued_tokens=100) as server:
        admission = server.server.service.admission
        with admission.enter() as place:
            place.grow(1, 90)
            status, answer = server.post("completions", {"prompt": "x" * 11})
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            place.begun(50)
            with held(server, {"prompt": "x" * 60}, 1):
                assert eventually(lambda: len(server.server.service.live) == 1)
                assert eventually(lambda: admission.tokens == 40), "the other prompt has been computed"


def test_a_large_request_runs_if_nobody_waits_and_a_request_of_any_kind_leaves_its_place() -> None:
    admission = Admission(seats=4, waiting=2, tokens=100)
    with admission.enter() as place:
        place.grow(1000, 1000)
        assert (admission.texts, admission.tokens) == (1000, 1000)
        with pytest.raises(Overloaded):
            admission.enter()
        place.begun(1000)
        for _ in range(999):
            place.ended()
        with admission.enter() as other:
            other.grow(5, 5)
            with pytest.raises(Overloaded):
                admission.enter()
        with admission.enter() as other, admission.enter(), admission.enter(), admission.enter(), admission.enter():
            with pytest.raises(Overloaded):
                other.grow(2, 5)
            other.grow(1, 5)
    assert (admission.texts, admission.tokens) == (0, 0)


def test_retry_after_follows_the_pace() -> None:
    admission = Admission(seats=1, waiting=1000, tokens=100)
    place = admission.enter()
    place.grow(201, 1)
    began = time.monotonic()
    admission._ends.extend([began - 10.0, *[began] * 50])  # five a second: 200 take 40 s
    assert 35 <= admission.retry_after() <= 45


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"{", b"{}", b'{"prompt": [], "messages": []}'])
def test_a_refused_request_leaves_no_trace(plain: Running, path: str, body: bytes) -> None:
    assert plain.raw("POST", path, body)[0] == 400
    service = plain.server.service
    admission = service.admission
    assert eventually(lambda: (admission.texts, admission.tokens, len(service.live)) == (0, 0, 0))
