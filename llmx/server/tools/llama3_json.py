"""`{"name": …, "parameters": {…}}`, bare or behind `<|python_tag|>`: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from llmx.server.calls import Format, JsonCalls

TAG = "<|python_tag|>"


def detect(template: str) -> bool:
    return '"parameters": dictionary' in template or (TAG in template and "<function=" not in template)


def build(template: str) -> Format:
    return Format(
        markers=(TAG,),
        reader=lambda names, bare: JsonCalls(separator=";", known=names if bare else None),
        around=lambda name: (f'{{"name": "{name}", "parameters": ', "}"),
        body=lambda call, several, quote: f'{call} ("; " {call})*' if several else call,
        bare=True,
        single="only supports single tool-calls" in template,
    )
