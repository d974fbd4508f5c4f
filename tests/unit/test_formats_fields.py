"""Typed reads: what each accepts, and the one sentence for what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.errors import UsageError
from llmx.formats.fields import Fields, load_json, parse_json

DATA = {
    "whole": 7,
    "real": 1.5,
    "yes": True,
    "word": "silu",
    "many": [1, 2],
    "words": ["a", "b"],
    "none": None,
    "rope": {"factor": 8.0, "type": "llama3"},
}


@pytest.fixture
def fields() -> Fields:
    return Fields(DATA, "config.json")


def test_each_type_is_read(fields: Fields) -> None:
    assert fields.integer("whole") == 7
    assert fields.number("real") == 1.5
    assert isinstance(fields.number("whole"), float)
    assert fields.boolean("yes") is True
    assert fields.text("word", one_of=["gelu", "silu"]) == "silu"
    assert fields.integers("many") == (1, 2)
    assert fields.integers("whole") == (7,)
    assert fields.numbers("many") == (1.0, 2.0)
    assert fields.strings("words") == ("a", "b")
    assert fields.strings("word") == ("silu",)
    assert fields.section("rope").number("factor") == 8.0


def test_null_is_absent(fields: Fields) -> None:
    assert "none" not in fields
    assert "whole" in fields
    assert fields.integer("none", 3) == 3
    assert fields.section("none", None) is None
    assert "none" not in fields.keys()  # noqa: SIM118 (keys is what is tested)
    with pytest.raises(UsageError, match=r"^config\.json: none is missing; it must be a whole number of at least 1\.$"):
        fields.integer("none", low=1)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.integer("word", low=1), "config.json: word must be a whole number of at least 1, not 'silu'."),
        (lambda f: f.integer("yes"), "config.json: yes must be a whole number, not True."),
        (lambda f: f.integer("real"), "config.json: real must be a whole number, not 1.5."),
        (
            lambda f: f.integer("whole", low=1, high=6),
            "config.json: whole must be a whole number between 1 and 6, not 7.",
        ),
        (lambda f: f.integer("whole", high=6), "config.json: whole must be a whole number of at most 6, not 7."),
        (lambda f: f.number("word"), "config.json: word must be a number, not 'silu'."),
        (lambda f: f.number("yes"), "config.json: yes must be a number, not True."),
        (lambda f: f.boolean("whole"), "config.json: whole must be true or false, not 7."),
        (lambda f: f.text("whole"), "config.json: whole must be a string, not 7."),
        (lambda f: f.text("word", one_of=("gelu", "relu")), "config.json: word must be one of gelu, relu, not 'silu'."),
        (
            lambda f: f.integers("words"),
            "config.json: words must be a whole number, or a list of such, not a list of 2.",
        ),
        (lambda f: f.numbers("words"), "config.json: words must be a list of numbers, not a list of 2."),
        (lambda f: f.strings("many"), "config.json: many must be a list of strings, not a list of 2."),
        (lambda f: f.section("many"), "config.json: many must be a table, not a list of 2."),
        (lambda f: f.section("rope").integer("type"), "config.json: rope.type must be a whole number, not 'llama3'."),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_key(fields: Fields, read, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        read(fields)
    assert caught.value.message == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(UsageError, match="theta must be a number"):
        Fields({"theta": value}, "config.json").number("theta")


def test_a_whole_number_fits_64_bits() -> None:
    with pytest.raises(UsageError, match="size must be a whole number"):
        Fields({"size": 2**63}, "config.json").integer("size")


def test_messages_stay_short_and_printable_whatever_the_file_holds() -> None:
    for key, value in (
        ("k" * 100_000, 1),
        ("\x1b[2J", 1),
        ("\ud800", 1),
        ("key", "\x1b\ud800" * 100_000),
        ("key", 10**4000),
    ):
        with pytest.raises(UsageError) as caught:
            Fields({"s": {key: value}}, "config.json").section("s").boolean(key)
        assert len(caught.value.message) < 400
        assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": 1,}', "is not valid JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b"[1, 2]", "must hold a JSON object, not a list of 2"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a":' * 200_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_broken_json_is_one_sentence(text: bytes, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        parse_json(text, "config.json")
    assert caught.value.message.startswith("config.json ")


def test_a_key_may_appear_twice_only_where_that_is_harmless() -> None:
    text = b'{"a": {"b": 1, "b": 2}}'
    assert parse_json(text, "config.json").section("a").integer("b") == 2
    with pytest.raises(UsageError, match="names 'b' twice"):
        parse_json(text, "header", unique=True)


def test_a_file_that_is_missing_or_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(UsageError, match="No such file"):
        load_json(path)
    with path.open("wb") as file:
        file.truncate(2**34)  # a sparse file: reading it would fail for lack of memory
    with pytest.raises(UsageError, match="has 17,179,869,184 bytes"):
        load_json(path)
