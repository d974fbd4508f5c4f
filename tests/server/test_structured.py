"""Structured output through openai's client: what comes fits, and what can't be asked for is refused at once."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import APIError, BadRequestError, OpenAI
from server.running import Running

from llmx.llm import LLM

pytest.importorskip("llguidance", reason="structured output needs llguidance")

WORD = {"type": "string", "maxLength": 5}
CLOSED = {"additionalProperties": False}


def pydantic_like(kind: str, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **more}
    return {"type": "object", "properties": properties, "required": list(properties), **CLOSED}


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "green", 3, None, True, {"a": 1}]},
    "const": {"const": {"fixed": [1, "two"]}},
    "boolean": {"type": "boolean"},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "integer": {"type": "integer", "minimum": -5, "maximum": 120},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    "string": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "items": False, "minItems": 2},
    "object": {"type": "object", "properties": {"name": WORD, "ok": {"enum": [True]}}, "required": ["name"], **CLOSED},
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, **CLOSED},
    "nested": {
        "type": "object",
        "properties": {"in": {"type": "object", "properties": {"x": {"enum": [0, 1]}}, "required": ["x"], **CLOSED}},
        "required": ["in"],
        **CLOSED,
    },
    "definitions": {
        "$defs": {"point": {"type": "array", "items": {"enum": [0, 5]}, "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        **CLOSED,
    },
    "any of": {"anyOf": [{"enum": ["x"]}, {"type": "array", "items": {"enum": [1]}, "maxItems": 2}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"enum": ["no"]}]},
    "one of kinds": {
        "$defs": {"cat": pydantic_like("cat", lives={"enum": [7, 9]}), "dog": pydantic_like("dog", good={"const": 1})},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
    },
    "all of": {
        "allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}}],
        "unevaluatedProperties": True,
        **CLOSED,
    },
    "recursive": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
    "notes": {"type": "object", "title": "T", "description": "d", "properties": {"p": {"const": 1, "format": "own"}}}
    | {"required": ["p"], **CLOSED},
}  # fmt: skip
del SCHEMAS["all of"]["unevaluatedProperties"], SCHEMAS["all of"]["additionalProperties"]
SCHEMAS["all of"]["allOf"][1] |= CLOSED


@pytest.fixture(scope="session")
def terse(llm: LLM) -> dict[str, float]:
    """A bias against spaces: a random model would put as many as it may."""
    spaces = [t for t in range(llm.tokenizer.vocab_size) if llm.tokenizer.piece(t).isspace()]
    return {str(token): -100 for token in spaces}


def named(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def say(client: OpenAI, **options: Any) -> tuple[str, str]:
    """The text of a chat's answer, and how it finished."""
    extra = {
        k: options.pop(k) for k in list(options) if k not in ("response_format", "logit_bias", "seed", "max_tokens")
    }
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body=extra, **{"max_tokens": 150} | options
    )  # fmt: skip
    assert made.choices[0].message.content is not None
    assert made.choices[0].finish_reason is not None
    return made.choices[0].message.content, made.choices[0].finish_reason


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_of_a_schema_parses_and_fits(name: str, client: OpenAI, terse: dict[str, float]) -> None:
    schema, ended = SCHEMAS[name], 0
    Draft202012Validator.check_schema(schema)
    for seed in range(2):
        text, finish = say(client, response_format=named(schema, strict=True), seed=seed, logit_bias=terse)
        if finish == "stop":
            ended += 1
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    assert ended


def test_a_json_object_is_one(client: OpenAI, llm: LLM, terse: dict[str, float]) -> None:
    bias = terse | {str(llm.tokenizer.encode("}")[-1]): 9}  # or a random model seldom closes what it opens
    texts = [say(client, response_format={"type": "json_object"}, seed=seed, logit_bias=bias) for seed in range(3)]
    whole = [json.loads(text) for text, finish in texts if finish == "stop"]
    assert whole
    assert all(isinstance(value, dict) for value in whole)
    assert all(text.startswith("{") for text, _ in texts)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[ab]{5}"}}, "[ab]{5}"),
    ({"structured_outputs": {"choice": ["one", "two"], "regex": None}}, "one|two"),
    ({"structured_outputs": {"json": {"enum": [1, 2]}, "disable_any_whitespace": True}}, "1|2"),
    ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
    ({"structured_outputs": {"json_object": True}, "max_tokens": 1}, r"\{.*"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
    ({"guided_json": {"type": "boolean"}}, "true|false"),
    ({"guided_regex": "[xyz]{3}"}, "[xyz]{3}"),
    ({"guided_choice": ["maybe"]}, "maybe"),
    ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
    ({"json_schema": {"const": None}}, "null"),
    ({"grammar": 'root ::= ("yes" | "no") "!"?'}, "(yes|no)!?"),
    ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
    ({"ebnf": 'root ::= "q"'}, "q"),
    ({"response_format": {"type": "json_object", "schema": {"enum": [5]}}}, "5"),
    ({"response_format": {"type": "text"}, "regex": "[ab]"}, "[ab]"),
    ({"response_format": None, "grammar": "", "guided_json": None, "regex": "[ab]"}, "[ab]"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=[next(iter(form)) for form, _ in FORMS])
def test_every_name_for_it_works_in_chats_and_completions(form: dict[str, Any], pattern: str, client: OpenAI) -> None:
    text, _ = say(client, seed=1, **form)
    assert re.fullmatch(pattern, text, re.DOTALL)
    made = client.completions.create(model="tiny", prompt="hi", extra_body={"max_tokens": 30, "seed": 2, "n": 2} | form)
    assert len(made.choices) == 2
    assert all(re.fullmatch(pattern, choice.text, re.DOTALL) for choice in made.choices)


DEEP: dict[str, Any] = {"type": "null"}
for _ in range(40):
    DEEP = {"anyOf": [DEEP]}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": named(None)}, "response_format.json_schema.schema", "required"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    ({"response_format": named({"type": "null"}, strict="yes")}, "response_format.json_schema.strict", "true or false"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_object"),
    ({"response_format": "json"}, "response_format.type", "json_object"),
    ({"response_format": named({"properties": {"a": {"type": "strin"}}, "required": ["a"]})}, "response_format", "a"),
    ({"response_format": named({"x-guidance": {"lenient": True}})}, "response_format", "x-guidance"),
    ({"response_format": named({"oneOf": [{"type": "string"}, {"minLength": 1}]})}, "response_format", "anyOf"),
    ({"response_format": named(DEEP)}, "response_format", "deep"),
    ({"response_format": named({"enum": ["x" * 70_000]})}, "response_format", "bytes"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": []}, "guided_json", "object"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": 7}, "guided_regex", "text"),
    ({"regex": "(?<=a)b"}, "regex", "look-behind"),
    ({"regex": "x" * 70_000}, "regex", "bytes"),
    ({"guided_choice": []}, "guided_choice", "between 1"),
    ({"guided_choice": [1]}, "guided_choice", "texts"),
    ({"grammar": "nothing"}, "grammar", "::="),
    ({"grammar": 'start: "a" <|unheard_of|>'}, "grammar", "unheard_of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": ["a"]}, "structured_outputs", "object"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar", "exclude"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "exclude"),
]


@pytest.mark.parametrize(("form", "param", "said"), REFUSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_cannot_be_is_refused_before_anything_is_said(
    form: dict[str, Any], param: str, said: str, stream: bool, client: OpenAI
) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**asked, extra_body=form)  # type: ignore[call-overload]
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["param"].startswith(param)
    assert said in body["message"]
    assert len(body["message"]) < 900, "the input comes back"


def test_completions_refuse_it_too(client: OpenAI) -> None:
    for form, _, _ in REFUSED[::4]:
        with pytest.raises(BadRequestError):
            client.completions.create(model="tiny", prompt="x", extra_body=form)


@pytest.mark.parametrize(
    "hostile", [{"regex": "a?" * 30_000}, {"guided_json": {"type": "integer", "multipleOf": 1_000_003}}]
)
def test_what_would_take_all_memory_or_time_is_refused_while_others_are_served(
    hostile: dict[str, Any], client: OpenAI, server: Running
) -> None:
    with pytest.raises(BadRequestError, match=r"too complex|could not be compiled"):
        say(client, **hostile)
    assert say(client, regex="[ab]{3}", seed=0)[1] == "stop"


def test_a_streamed_text_is_the_whole_one(client: OpenAI, terse: dict[str, float]) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": named(SCHEMAS["object"]),
        "seed": 3,
        "max_tokens": 150,
        "logit_bias": terse,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_text_that_is_cut_says_so(client: OpenAI) -> None:
    assert say(client, regex="[ab]{40}", max_tokens=3)[1] == "length"


def test_errors_are_of_the_kind_that_clients_know(client: OpenAI) -> None:
    with pytest.raises(APIError) as caught:
        say(client, regex="(")
    assert isinstance(caught.value, BadRequestError)
    assert caught.value.type == "invalid_request_error"
