"""The forms that users write, as grammars: text to text, nothing compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmx.errors import RequestError
from llmx.grammar.schema import settled

MOST_BYTES = 64 * 1024  # of a schema, a pattern or a grammar as its user wrote it
MOST_DEPTH = 32  # objects and arrays inside one another
MOST_CHOICES = 4096
# Bounded, or a small model may put spaces until its tokens run out; wide enough for what is indented.
SPACE = r"[ \t]{1,20}|\r?\n[ \t]{0,64}"


def from_json_schema(schema: Mapping[str, Any], *, param: str = "grammar") -> str:
    """The grammar of the JSON texts that a JSON Schema (draft 2020-12, as far as llguidance has it) allows.

    Keys come in the schema's order; whitespace between tokens is free but bounded. RequestError if the schema is too
    large or too deep; what it says is only checked by `validate`.
    """
    return json.dumps({"grammars": [{"json_schema": json.loads(schema_text(schema, param=param))}]})


def schema_text(schema: Mapping[str, Any], *, param: str = "grammar") -> str:
    """A schema ready for use inside a Lark grammar, after `%json`. RequestError as `from_json_schema`."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"A JSON schema must be an object, not {type(schema).__name__}.", param=param)
    if (depth := _depth(schema)) > MOST_DEPTH:
        raise RequestError(
            f"The JSON schema is nested {depth} deep; at most {MOST_DEPTH} levels are allowed.", param=param
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise RequestError("The JSON schema holds what JSON has no form for.", param=param) from None
    check_size(text, "JSON schema", param)
    if "x-guidance" in schema:  # the library reads options there, one of which switches its checks off
        raise RequestError("The JSON schema may not have x-guidance.", param=param)
    options = {"whitespace_flexible": True, "whitespace_pattern": SPACE}
    return json.dumps({**settled(json.loads(text)), "x-guidance": options})


def json_object() -> str:
    """The grammar of any JSON object."""
    return from_json_schema({"type": "object"})


def regex(pattern: str, *, param: str = "grammar") -> str:
    """The grammar of the texts that a regular expression matches as a whole.

    The syntax is Rust's: no look-around, no back-references; `^` and `$` at its ends are allowed and mean nothing.
    """
    if not isinstance(pattern, str):
        raise RequestError(f"A regular expression must be a text, not {type(pattern).__name__}.", param=param)
    check_size(pattern, "regular expression", param)
    # As the library's own grammar_from_regex has it; a slash ends a pattern in Lark, and so does a newline.
    return json.dumps({"grammars": [{"name": "regex", "lark_grammar": f"start: /{_in_slashes(pattern)}/"}]})


def _in_slashes(pattern: str) -> str:
    written, escaped = [], False
    for character in pattern:
        if escaped:
            escaped = False
            written.append("\\n" if character == "\n" else "\\" + character)
        elif character == "\\":
            escaped = True
        else:
            written.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(character, character))
    return "".join(written) + ("\\" if escaped else "")


def choice(options: Sequence[str], *, param: str = "grammar") -> str:
    """The grammar of exactly these texts."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not all(isinstance(o, str) for o in options):
        raise RequestError("A choice must be a list of texts.", param=param)
    if not options or len(options) > MOST_CHOICES:
        raise RequestError(f"A choice must have between 1 and {MOST_CHOICES} texts, not {len(options)}.", param=param)
    if not any(options):
        raise RequestError("A choice needs a text that is not empty.", param=param)
    text = " | ".join(json.dumps(option, ensure_ascii=False) for option in dict.fromkeys(options))
    check_size(text, "choice", param)
    return f"start: {text}"


def from_lark(text: str, *, param: str = "grammar") -> str:
    """A grammar in llguidance's dialect of Lark. RequestError if it is too large."""
    if not isinstance(text, str):
        raise RequestError(f"A grammar must be a text, not {type(text).__name__}.", param=param)
    check_size(text, "grammar", param)
    return text


def check_size(text: str, what: str, param: str) -> None:
    """RequestError where a text is longer than `MOST_BYTES`, or no Unicode text, or empty."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"The {what} has half of a surrogate pair: it is no Unicode text.", param=param) from None
    if size > MOST_BYTES:
        raise RequestError(f"The {what} has {size} bytes; at most {MOST_BYTES} are allowed.", param=param)
    if not text.strip():
        raise RequestError(f"The {what} is empty.", param=param)


def _depth(value: Any) -> int:
    """How deep objects and arrays are inside one another; without recursion, since that is what it guards."""
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else None
        if inner is not None:
            deepest = max(deepest, depth)
            if deepest > 4 * MOST_DEPTH:
                return deepest
            left += [(item, depth + 1) for item in inner]
    return deepest
