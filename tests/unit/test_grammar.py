"""The forms of structured output as grammars, what is refused of them, and that nothing breaks on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from llmx import grammar as g
from llmx.errors import RequestError

pytest.importorskip("llguidance", reason="structured output needs llguidance")

NESTED: dict[str, Any] = {"type": "string"}
for _ in range(g.forms.MOST_DEPTH):
    NESTED = {"type": "array", "items": NESTED}


def refusal(make: Callable[[], Any]) -> RequestError:
    """What validating the grammar that `make` gives raises."""
    with pytest.raises(RequestError) as caught:
        g.validate(make())
    assert caught.value.status == 400
    assert len(caught.value.message) < 700, "the input comes back"
    return caught.value


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"type": "strin"}, "used: Invalid", "strin"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": 3}}}}, "properties.a.items", ""),
        (
            {"properties": {"a": {"properties": {"b": {"pattern": "a("}}}}},
            "properties.a.properties.b",
            "unclosed group",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"q": {"not": {}}}}}}, "$defs.x.properties.q", "not"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "properties.a", "gone"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"if": {}}]}}}, "properties.a.anyOf[1]", "if"),
        (
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 3, "maxLength": 2}},
            "used",
            "nsatisfiable",
        ),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}}, "properties.a", "oneOf"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "used", "127.0.0.1"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_its_place(schema: dict[str, Any], where: str, what: str) -> None:
    said = refusal(lambda: g.from_json_schema(schema)).message
    assert where in said
    assert what in said


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a(b", "unclosed group at character 2"),
        ("ab(?=c)", "look-ahead and look-behind, is not supported at character 3"),
        (r"(a)\1", "backreferences"),
        ("(" * 30_000 + "a" + ")" * 30_000, "nested parentheses"),
        ("a" + "*" * 60_000, "nest"),
    ],
)
def test_a_regular_expression_that_cannot_be_used_is_refused(pattern: str, what: str) -> None:
    assert what in refusal(lambda: g.regex(pattern)).message


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: g.from_lark("start: foo"), 'unknown name: "foo"'),
        (lambda: g.from_lark('start: "a" ('), "line 1, column 13"),
        (lambda: g.from_lark("start: " + "(" * 20_000), "nested"),
        (lambda: g.from_gbnf('root ::= "a'), "line 1"),
        (lambda: g.from_gbnf('rot ::= "a"'), "root"),
        (lambda: g.from_gbnf("root ::= " + "(" * 5000), "nested"),
        (lambda: g.from_gbnf('root ::= "a" other'), "other"),
        (lambda: g.from_grammar("nothing of the kind"), "not valid"),
        (lambda: '{"grammars": [{"json_schema":' + '{"not":' * 9000 + "{}" + "}" * 9000 + "}]}", "recursion"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(make: Callable[[], str], what: str) -> None:
    assert what in refusal(make).message


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: g.from_json_schema(NESTED), "nested 33 deep"),
        (lambda: g.from_json_schema({"enum": ["x" * 70_000]}), "70014 bytes"),
        (lambda: g.from_json_schema({"x-guidance": {"lenient": True}, "type": "foo"}), "x-guidance"),
        (lambda: g.from_json_schema({"const": float("nan")}), "JSON has no form"),
        (lambda: g.from_json_schema({"const": "\ud800"}), "surrogate"),
        (lambda: g.regex("x" * 65_537), "65537 bytes"),
        (lambda: g.regex(""), "empty"),
        (lambda: g.choice([]), "between 1"),
        (lambda: g.choice([""]), "not empty"),
        (lambda: g.choice("abc"), "list of texts"),
        (lambda: g.choice(["x"] * 5000), "not 5000"),
        (lambda: g.from_lark(" \n"), "empty"),
        (lambda: "x" * 300_000, "300000 characters"),
    ],
)
def test_what_is_too_large_or_nothing_is_refused_before_it_is_tried(
    make: Callable[[], str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmx.grammar.check.subprocess.run", lambda *_, **__: pytest.fail("it was tried"))
    assert what in refusal(make).message


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: g.regex("a?" * 30_000), id="memory"),
        pytest.param(lambda: g.from_json_schema({"type": "integer", "multipleOf": 1_000_003}), id="time"),
        pytest.param(
            lambda: g.from_lark("start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 40))), id="for ever"
        ),
        pytest.param(
            lambda: g.from_lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "x"'),
            id="stack",
        ),
        pytest.param(
            lambda: g.from_json_schema(
                {
                    "$ref": "#/$defs/d0",
                    "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
                    | {"d900": {}},
                }
            ),
            id="references",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes are Linux's here")
def test_what_would_take_the_memory_the_time_or_the_stack_is_refused_and_we_live(make: Callable[[], str]) -> None:
    said = refusal(make).message
    assert "too complex" in said or "could not be compiled" in said  # by its own limits, or by our clock
    g.validate(g.regex("[0-9]+"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: g.json_object(),
        lambda: g.choice(['a"b', "c\\d", "x\ny", "é😀"]),
        lambda: g.regex("a/b\n|\\/x"),
        lambda: g.from_lark('start: "a" <|end|> <[300]>'),
        lambda: g.from_gbnf('root ::= "a" digits\ndigits ::= [0-9]+'),
        lambda: g.from_json_schema({"properties": {"format": {"type": "string", "format": "password"}}}),
        lambda: g.from_json_schema({"type": "string", "format": "date-time", "title": "x", "default": 3}),
        lambda: g.from_json_schema({}),
    ],
)
def test_what_can_be_used_is_found_good(make: Callable[[], str]) -> None:
    g.validate(make())


def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = g.regex("once[0-9]+")
    g.validate(made)
    lark = g.from_gbnf('root ::= "once"')
    monkeypatch.setattr("llmx.grammar.check.subprocess.run", lambda *_, **__: pytest.fail("it was tried again"))
    g.validate(made)
    assert g.from_gbnf('root ::= "once"') == lark
    g.validate(lark)


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": ["string", "null"]}, {"type": "null"}], False),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"const": True}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], False),
        ([{"enum": ["a"]}, {"enum": ["c"]}, {"type": "integer"}], True),
        ([kind("a"), kind("b")], True),
        ([kind("a"), kind("a")], False),
        ([kind("a"), {**kind("b"), "required": []}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
        ([{"$ref": "#/$defs/gone"}, kind("a")], False),
        ([{"$ref": "#"}, {"$ref": "#"}], False),
    ],
)
def test_a_one_of_is_an_any_of_only_where_its_branches_cannot_overlap(branches: list[Any], apart: bool) -> None:
    schema = {"oneOf": branches, "$defs": {"a": kind("a"), "b": kind("b")}}
    made = json.loads(g.schema_text(schema))
    assert ("anyOf" in made, "oneOf" in made) == (apart, not apart)
    assert made["anyOf" if apart else "oneOf"] == branches


def test_the_callers_schema_stays_as_it_is() -> None:
    schema = {"oneOf": [{"type": "string", "format": "password"}, {"type": "integer"}]}
    before = json.dumps(schema)
    g.from_json_schema(schema)
    assert json.dumps(schema) == before
