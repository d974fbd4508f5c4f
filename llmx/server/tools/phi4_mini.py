"""`<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`: Phi 4 mini."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmx.server.calls import Format, JsonCalls

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


def detect(template: str) -> bool:
    return "<|tool|>" in template


def build(template: str) -> Format:
    return Format(
        markers=(OPEN,),
        ends=(CLOSE,),
        reader=lambda names, bare: JsonCalls(CLOSE),
        around=lambda name: (f'{{"name": "{name}", "arguments": ', "}"),
        body=_body,
        adapt=_adapt,
        takes_tools=True,
    )


def _body(call: str, several: bool, quote: Callable[[str], str]) -> str:
    calls = f'{call} (", " {call})*' if several else call
    return f'"[" {calls} {quote("]" + CLOSE)}'


def _adapt(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The template has no variable for tools: it wants them as JSON text in the system message."""
    if tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        functions = [tool["function"] for tool in tools]
        messages[0] = {**messages[0], "tools": json.dumps(functions, ensure_ascii=False)}
    return {}
