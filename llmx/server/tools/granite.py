"""`<|tool_call|>[{"name": …, "arguments": {…}}, …]`: Granite 3."""

from __future__ import annotations

from llmx.server.calls import Format, JsonCalls

TAG = "<|tool_call|>"


def detect(template: str) -> bool:
    return TAG in template and "<|tool|>" not in template  # which Phi 4 has beside it


def build(template: str) -> Format:
    return Format(
        markers=(TAG,),
        reader=lambda names, bare: JsonCalls(),
        around=lambda name: (f'{{"name": "{name}", "arguments": ', "}"),
        body=lambda call, several, quote: f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"',
    )
