"""`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name[ARGS]{…}` as newer Mistral models have it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmx.server.calls import Format, JsonCalls, Reader
from llmx.server.scanning import SPACE, Malformed, Scanner

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?")
LONGEST_HEAD = 256
ID = re.compile(r"[A-Za-z0-9]{9}")


def detect(template: str) -> bool:
    return TAG in template


def build(template: str) -> Format:
    new = ARGS in template
    list_body = '"[" {0} (", " {0})* "]"'
    return Format(
        markers=(TAG,),
        inside=(ARGS, CALL_ID),
        reader=lambda names, bare: Either(),
        around=lambda name: (name + ARGS, "") if new else (f'{{"name": "{name}", "arguments": ', "}"),
        body=lambda call, several, quote: call if new else list_body.format(call) if several else f'"[" {call} "]"',
        joint="" if new else None,
        adapt=_adapt if "9" in template else None,
    )


class Either(Reader):
    """The first character tells which of the two forms it is."""

    def __init__(self) -> None:
        super().__init__()
        self._list: JsonCalls | None = None
        self._head = ""
        self._scan: Scanner | None = None
        self._is_broken = False

    def feed(self, c: str) -> bool:
        if self._list is None and not self._head:
            if c in SPACE:
                return True
            if c == "[":
                self._list = JsonCalls()
                self._list.out = self.out
        if self._list is not None:
            belongs = self._list.feed(c)
            self.calls = self._list.calls
            return belongs
        if self.calls:
            return c in SPACE
        if self._scan is None and c != "{":
            self._head += c
            if len(self._head) > LONGEST_HEAD:
                raise Malformed
            return True
        return self._feed_arguments(c)

    def _feed_arguments(self, c: str) -> bool:
        if self._scan is None:
            head = HEAD.fullmatch(self._head.rstrip(SPACE))
            if head is None:
                raise Malformed
            self._scan = Scanner()
            self.out.append(("name", head[1]))
        if not self._is_broken:
            try:
                c = self._scan.feed(c)
            except Malformed:
                self._is_broken = True  # a call that has begun can't be taken back
        self.out.append(("arguments", c))
        if self._scan.done:
            self.end_call()
        return True

    def finish(self) -> None:
        if self._list is not None:
            self._list.finish()


def _adapt(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Templates refuse ids that are not nine letters and digits."""
    for message in messages:
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = _short(message["tool_call_id"])
    return {}


def _short(id: str) -> str:
    return id if ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
