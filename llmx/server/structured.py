"""What a request may say about the form of its text: OpenAI's, vLLM's, SGLang's and llama.cpp's names for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, WithJsonSchema

from llmx import grammar
from llmx.errors import RequestError

T = TypeVar("T")
OBJECT = {"type": "object"}
RESPONSE_FORMAT: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {"type": "object", "properties": {"type": {"const": "json_object"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "schema": OBJECT, "strict": {"type": "boolean"}},
                    "required": ["name", "schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {"type": "null"},
    ]
}
SCHEMA = {"anyOf": [OBJECT, {"type": "string"}, {"type": "null"}]}
CHOICES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
STRUCTURED: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {name: shape}, "required": [name], "additionalProperties": False}
        for name, shape in (
            ("json", {"anyOf": SCHEMA["anyOf"][:2]}),
            ("regex", {"type": "string"}),
            ("choice", CHOICES),
            ("grammar", {"type": "string"}),
            ("json_object", {"const": True}),
        )
    ]
    + [{"type": "null"}]
}
TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
# Of vLLM's, what says how to do it; what is asked for holds in any case.
HINTS = ("disable_fallback", "disable_any_whitespace", "whitespace_pattern", "backend")


def _schema(value: Any, param: str) -> str:
    """A JSON schema, also as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{param} must be a JSON schema; this text is not JSON.", param=param) from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} must be a JSON schema: an object.", param=param)
    return grammar.from_json_schema(value, param=param)


def _choice(value: Any, param: str) -> str:
    return grammar.choice(value, param=param)


def _regex(value: Any, param: str) -> str:
    return grammar.regex(value, param=param)


def _grammar(value: Any, param: str) -> str:
    return grammar.from_grammar(value, param=param)


def _json_object(value: Any, param: str) -> str | None:
    if not isinstance(value, bool):
        raise RequestError(f"{param} must be true or false.", param=param)
    return grammar.json_object() if value else None


def _response_format(value: Any, param: str) -> str | None:
    """OpenAI's; a schema may stand beside `type` too, where llama.cpp's clients put it."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError("response_format.type must be text, json_object or json_schema.", param=f"{param}.type")
    schema, where = value.get("schema"), f"{param}.schema"
    if kind == "json_schema" and schema is None:
        inner, where = value.get("json_schema"), f"{param}.json_schema.schema"
        if not isinstance(inner, Mapping):
            raise RequestError("response_format.json_schema must be an object.", param=f"{param}.json_schema")
        if not isinstance(inner.get("strict"), bool | None):
            raise RequestError(
                "response_format.json_schema.strict must be true or false.", param=f"{param}.json_schema.strict"
            )
        schema = inner.get("schema")
    if schema is None and kind == "json_schema":
        raise RequestError(f"{where} is required.", param=where)
    return grammar.json_object() if schema is None else _schema(schema, where)


def _structured(value: Any, param: str) -> str | None:
    """vLLM's: an object with one of the forms in it."""
    forms = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object}
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} must be an object.", param=param)
    given = {name: one for name, one in value.items() if one not in (None, False)}
    if unknown := [name for name in given if name not in forms and name not in HINTS]:
        raise RequestError(
            f"{param} doesn't know {unknown[0][:100]!r}; it takes one of {', '.join(forms)}.", param=param
        )
    wanted = [name for name in given if name in forms]
    if len(wanted) != 1:
        raise RequestError(f"{param} must have exactly one of {', '.join(forms)}.", param=param)
    return forms[wanted[0]](given[wanted[0]], f"{param}.{wanted[0]}")


FORMS: dict[str, Callable[[Any, str], str | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
}


class StructuredFields(BaseModel):
    """At most one of them, or 400: never a text that nothing bounds where something was asked for."""

    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(STRUCTURED)] = None
    guided_json: Annotated[Any, WithJsonSchema(SCHEMA)] = None
    guided_regex: Annotated[Any, WithJsonSchema(TEXT)] = None
    guided_choice: Annotated[Any, WithJsonSchema({"anyOf": [CHOICES, {"type": "null"}]})] = None
    guided_grammar: Annotated[Any, WithJsonSchema(TEXT)] = None
    json_schema: Annotated[Any, WithJsonSchema(SCHEMA)] = None
    regex: Annotated[Any, WithJsonSchema(TEXT)] = None
    ebnf: Annotated[Any, WithJsonSchema(TEXT)] = None
    grammar: Annotated[Any, WithJsonSchema(TEXT)] = None

    @property
    def structured(self) -> bool:
        """Whether `text_grammar` has work to do."""
        return any(getattr(self, name) is not None for name in FORMS)

    async def apart(self, make: Callable[[], T]) -> T:
        """make(), in a thread where `text_grammar` would hold up the event loop."""
        return await asyncio.to_thread(make) if self.structured else make()

    def text_grammar(self) -> str | None:
        """What the text must look like, tried out; None: anything. Raises RequestError.

        The first time that a grammar comes it takes 0.1 s and more, so not for an event loop.
        """
        found: dict[str, str] = {}
        for name, form in FORMS.items():
            value = getattr(self, name)
            if value is not None and value != "" and (made := form(value, name)) is not None:
                found[name] = made
        if len(found) > 1:
            first, second, *_ = found
            raise RequestError(f"{first} and {second} exclude each other.", param=second)
        for name, made in found.items():
            grammar.validate(made, param=name)
            return made
        return None
