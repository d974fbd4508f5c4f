"""By which names the server lets itself be called: DNS rebinding ends here."""

from __future__ import annotations

import json
import socket

import pytest
from server.fake import FakeLLM, says
from server.running import PATIENCE, Running, running

from llmx.errors import RequestError, UsageError
from llmx.server.hosts import Hosts
from llmx.server.settings import ServerSettings

OURS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000", "localhost:"]
EVIL = [
    *("localhost.evil.com", "localhost.evil.com:8000", "evil.com", "evil.com:8000", "127.0.0.1.evil.com", "127.0.0.2"),
    *("evil.com#localhost", "localhost@evil.com", "localhost/", "localhost:80:80", "[::2]", "[evil]", "", " ", "local"),
    *("127.1", "2130706433", "0.0.0.0", "localhost,evil.com", "xn--localhost-", "localhost\x00.evil.com"),
]


def refused(hosts: Hosts, name: str | None) -> bool:
    try:
        hosts.check(name)
    except RequestError:
        return True
    return False


@pytest.mark.parametrize(("bound", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "::1"), ("::1", "::1")])
def test_on_loopback_only_its_own_names_are_good(bound: str, address: str) -> None:
    hosts = Hosts(bound, address, ())
    assert not [name for name in [*OURS, None] if refused(hosts, name)]
    assert not [name for name in EVIL if not refused(hosts, name)]


def test_the_name_and_the_address_it_is_bound_to_are_good_too() -> None:
    hosts = Hosts("box.internal", "127.0.1.1", ())
    assert not [name for name in ("box.internal:80", "127.0.1.1", *OURS) if refused(hosts, name)]
    assert refused(hosts, "box.internal.evil.com")


@pytest.mark.parametrize(("bound", "address"), [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("10.0.0.7", "10.0.0.7")])
def test_elsewhere_any_name_is_good_unless_some_are_given(bound: str, address: str) -> None:
    assert not [name for name in [*OURS, *EVIL] if refused(Hosts(bound, address, ()), name)]
    hosts = Hosts(bound, address, ("LLM.example.org",))
    assert not [name for name in ["llm.example.org:443", *OURS] if refused(hosts, name)]
    assert not [name for name in EVIL if name != bound and not refused(hosts, name)]


def test_allowed_hosts_add_to_those_of_loopback_and_a_star_is_any() -> None:
    hosts = Hosts("127.0.0.1", "127.0.0.1", ("llm.example.org",))
    assert not [name for name in ["llm.example.org", *OURS] if refused(hosts, name)]
    assert refused(hosts, "sub.llm.example.org")
    assert not [name for name in EVIL if refused(Hosts("127.0.0.1", "127.0.0.1", ("*",)), name)]


@pytest.mark.parametrize("name", ["http://a.org", "a.org:80", "", "a b", "::1", "*.a.org"])
def test_what_is_no_host_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--allowed-hosts"):
        ServerSettings(allowed_hosts=(name,))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/metrics", "/openapi.json"])
def test_a_page_that_lets_its_name_lead_here_gets_403(path: str) -> None:
    with running(FakeLLM(says("x"))) as server:
        for host in ("localhost.evil.com", f"evil.com:{server.port}"):
            method = "POST" if path.endswith("completions") else "GET"
            headers = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}
            status, raw, _ = server.raw(method, path, {"prompt": "x"} if method == "POST" else None, headers)
            assert status == 403
            error = json.loads(raw)["error"]
            assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
            assert "--allowed-hosts" in error["message"]


def raw_status(server: Running, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(request)
        return connection.recv(65536).split(b"\r\n")[0]


def test_a_host_is_neither_left_out_nor_given_twice() -> None:
    with running(FakeLLM(says("x"))) as server:
        assert b" 400 " in raw_status(server, b"GET /health HTTP/1.1\r\n\r\n")
        assert b" 400 " in raw_status(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n")
        assert b" 200 " in raw_status(server, b"GET /health HTTP/1.0\r\n\r\n")
