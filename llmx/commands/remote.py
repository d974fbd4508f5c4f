"""A conversation with a server that speaks OpenAI's API: plain HTTP, streamed, by the standard library."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from llmx.errors import LlmxError, UsageError

KEYS = ("LLMX_API_KEY", "OPENAI_API_KEY")
SILENCE_SECONDS = 600.0  # a long prompt may take minutes before its first token
LINE_BYTES = 1 << 20
ERROR_BYTES = 1 << 16


class Remote:
    """A model behind a URL. `options`: fields of each request, only those that the user set; the rest is the server's.

    model: the served name; None: the first that the server lists. LlmxError where it can't be reached or says no.
    """

    def __init__(self, url: str, model: str | None, options: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url} is no address of a server.", "Give one like http://127.0.0.1:8000.")
        self.base = url.rstrip("/") + ("/v1" if parts.path in ("", "/") else "")
        self.options = dict(options)
        self._key = next((key for name in KEYS if (key := os.environ.get(name, "").strip())), None)
        self._opener = _opener(parts.hostname)
        self.name = model or self._first_model()

    def alive(self) -> bool:
        return True  # it may answer the next time

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[tuple[str, str | None], None, None]:
        """Pieces of the answer as they come, each with the finish reason where that is known. Close it to interrupt."""
        body = {"model": self.name, "messages": list(messages), "stream": True} | self.options
        finish = None
        with self._open("/chat/completions", body) as response:
            for event in self._events(response):
                if isinstance(event.get("error"), dict):
                    raise LlmxError(f"{self.base}: {event['error'].get('message')}")
                for choice in event.get("choices") or ():
                    finish = choice.get("finish_reason") or finish
                    yield (choice.get("delta") or {}).get("content") or "", finish
        if finish is None:
            raise LlmxError(f"{self.base}: the answer broke off.")

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            listed = self._decode(self._read(response, LINE_BYTES))
        models = [one.get("id") for one in listed.get("data") or () if isinstance(one, dict)]
        if not models:
            raise LlmxError(f"{self.base} lists no models.", "Name one: llmx chat MODEL --url URL.")
        return str(models[0])

    def _open(self, path: str, body: Any) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.base + path, data, {"Content-Type": "application/json", "User-Agent": "llmx"})
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            response: HTTPResponse = self._opener.open(request, timeout=SILENCE_SECONDS)
            return response
        except HTTPError as error:
            with error:
                raise self._refusal(error.code, error.read(ERROR_BYTES)) from None
        except (URLError, OSError, HTTPException, ValueError) as error:  # ValueError: a header or port that can't be
            raise self._unreached(error) from error

    def _refusal(self, status: int, body: bytes) -> LlmxError:
        try:
            said = json.loads(body)["error"]
            said = said if isinstance(said, str) else said["message"]
        except (ValueError, KeyError, TypeError):
            said = "no reason given"
        hint = f"Put the key into {KEYS[0]}." if status in (401, 403) else None
        return LlmxError(f"{self.base} answered {status}: {said}", hint)

    def _unreached(self, error: Exception) -> LlmxError:
        reason = getattr(error, "reason", None) or error
        said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        return LlmxError(f"{self.base} can't be reached: {said}.", "Is the server running there?")

    def _read(self, response: HTTPResponse, most: int) -> bytes:
        try:
            return response.read(most)
        except (OSError, HTTPException) as error:
            raise self._unreached(error) from error

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """The data of each event up to [DONE]; comments and other fields are passed over."""
        while True:
            try:
                line = response.readline(LINE_BYTES)
            except (OSError, HTTPException) as error:
                raise LlmxError(f"{self.base}: the answer broke off: {error}.") from error
            if not line:
                return
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield self._decode(data)

    def _decode(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise LlmxError(f"{self.base} sent something else than OpenAI's JSON: {data[:80]!r}")
        return value


def _opener(host: str) -> OpenerDirector:
    """No proxy for this machine itself, whatever HTTP_PROXY says."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return build_opener(ProxyHandler({})) if local else build_opener()
