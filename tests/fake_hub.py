"""A Hugging Face Hub on the loopback interface: the requests that huggingface_hub makes to fetch a model, or a file of
a data set, and failures.

Files of safetensors and GGUF lie, as there, behind a redirect to another path; the others are served where they are.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        """A hash of the content, as git's is: new files are a new commit."""
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path)
    ranges: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)  # file → bytes after which the connection breaks, once
    stall: dict[str, int] = field(default_factory=dict)  # file → bytes after which nothing more comes, once
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    status: int | None = None  # answered to every request
    body: bytes | None = None  # answered to every request, as a captive portal does

    def add(self, name: str, files: dict[str, bytes], **options: bool) -> Repository:
        return self.repositories.setdefault(name, Repository(files, **options))

    def fetched(self) -> list[str]:
        """The files whose content was asked for."""
        parts = [path.split("/", 5) for method, path in self.requests if method == "GET"]
        return [part[5] for part in parts if part[3] == "large" or (part[3] == "resolve" and not is_large(part[5]))]


def is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".gguf", ".bin"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # huggingface_hub looks for a list of user agents, whoever asks
            return self._send(404, b"")
        self.hub.requests.append((self.command, path))
        self.hub.agents.add(self.headers.get("User-Agent", ""))
        if self.hub.body is not None:
            return self._send(200, self.hub.body)
        if self.hub.status:
            return self._send(self.hub.status, b"{}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and not token.startswith("hf_"):
            return self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        whole = urlsplit(self.path).path.removeprefix("/datasets").strip("/")
        parts = [unquote(part) for part in whole.split("/")]  # a revision may have slashes in it
        if parts[:2] == ["api", "models"]:
            return self._describe("/".join(parts[2:4]), "/".join(parts[5:]), token)
        if parts[2] in ("resolve", "large"):
            return self._serve("/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:]), token)
        return self._send(404, b"")

    def _find(self, name: str, revision: str, token: str) -> Repository | None:
        """The repository; None after an error was sent."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and token != TOKEN):
            self._send(404 if token else 401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in ("main", "v1", "refs/pr/1", repository.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository

    def _describe(self, name: str, revision: str, token: str) -> None:
        repository = self._find(name, revision, token)
        if repository is None:
            return
        siblings: list[dict[str, Any]] = []
        for file, content in repository.files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": etag(content, False)}
            if is_large(file):
                entry["lfs"] = {"sha256": etag(content, True), "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _serve(self, name: str, kind: str, revision: str, file: str, token: str) -> None:
        repository = self._find(name, revision, token)
        if repository is None:
            return
        if repository.gated and token != TOKEN:
            return self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        content = repository.files.get(file)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{etag(content, is_large(file))}"'}
        if is_large(file) and kind == "resolve":
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
            return self._send(302, b"", headers | {"Location": self.path.replace("/resolve/", "/large/", 1)})
        first = 0
        if wanted := self.headers.get("Range"):
            self.hub.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        stops = self.hub.stall if file in self.hub.stall else self.hub.cut
        stop = stops.pop(file, None) if self.command == "GET" else None
        self._send(206 if first else 200, content[first:], headers, stop)
        if stop is not None and stops is self.hub.stall:
            self.hub.stalled.set()
            self.hub.closing.wait()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, stop: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:stop])
            self.wfile.flush()
        self.close_connection = stop is not None


def etag(content: bytes, large: bool) -> str:
    return (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that has left is none
            super().handle_error(request, client_address)


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
