"""What every request passes first: id, size, host, key, a place in the queue; and its line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmx.errors import RequestError
from llmx.server import keys
from llmx.server.admission import Admission, Overloaded
from llmx.server.errors import refusal
from llmx.server.hosts import Hosts
from llmx.server.protocol import HEAD_BYTES, HEAD_TOO_LARGE, MOST_HEADERS
from llmx.server.service import KEY, PLACE, Service

access = logging.getLogger("llmx.access")

LONGEST_URL = 8192  # bytes
GIVEN_ID = re.compile(r"[!-~]{1,128}")


class Front:
    """ASGI middleware. It refuses before anything of the body is read, so a full server says so at once."""

    def __init__(self, app: ASGIApp, service: Service, address: str) -> None:
        self.app, self.service = app, service
        self.hosts = Hosts(service.settings.host, address, service.settings.allowed_hosts)
        self.queues: dict[str, Admission] = {
            "/v1/chat/completions": service.admission,
            "/v1/completions": service.admission,
            "/tokenize": service.desk,
            "/detokenize": service.desk,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        began, status = time.monotonic(), 499

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._serve(scope, headers, receive, tell)
        finally:
            if self.service.settings.log_requests:
                client, line = scope.get("client") or ("-", 0), scope["raw_path"].decode("ascii", "replace")
                took = 1000 * (time.monotonic() - began)
                access.info(
                    '%s:%d "%s %s HTTP/%s" %d %.0f ms %s',
                    *client, scope["method"], line, scope["http_version"], status, took, id,
                )  # fmt: skip

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            check_size(scope)
            self.hosts.check(headers.get("host"))
            key = keys.check(self.service.settings.keys, path, headers)
            queue = self.queues.get(path) if scope["method"] == "POST" else None
            place = queue.enter() if queue is not None else None
        except RequestError as error:
            if isinstance(error, Overloaded):
                self.service.traffic.rejected.add(code=str(error.code))
            await refusal(error)(scope, receive, send)
            return
        if place is None:
            await self.app(scope, receive, send)
            return
        with place:
            scope[PLACE], scope[KEY] = place, key
            await self.app(scope, receive, send)


def check_size(scope: Scope) -> None:
    """RequestError for what no client sends in earnest."""
    headers = scope["headers"]
    if len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES:
        raise RequestError(HEAD_TOO_LARGE, status=431, code="headers_too_large")
    if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST_URL:
        raise RequestError(f"The URL has over {LONGEST_URL} bytes.", status=414, code="url_too_long")
