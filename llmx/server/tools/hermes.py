"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4."""

from __future__ import annotations

import re

from llmx.server.calls import Format, JsonCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
JSON = re.compile(r'"arguments\\?"')  # others write XML between the same marks


def detect(template: str) -> bool:
    return OPEN in template and "<function=" not in template and JSON.search(template) is not None


def build(template: str) -> Format:
    return Format(
        markers=(OPEN,),
        ends=(CLOSE,),
        reader=lambda names, bare: JsonCalls(CLOSE),
        around=lambda name: (f'{{"name": "{name}", "arguments": ', "}"),
        body=lambda call, several, quote: f'"\\n" {call} {quote(chr(10) + CLOSE)}',
        joint="\n",
    )
