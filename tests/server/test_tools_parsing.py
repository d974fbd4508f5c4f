"""Calls found in text: right ones in every format, wrong ones as text, and the same in whatever pieces they come."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from llmx.server import tools
from llmx.server.answers import Answer
from llmx.server.calls import Arguments, Begin, Content, ToolParser
from llmx.server.scanning import Malformed, Scanner
from llmx.server.thoughts import Thought, ThoughtParser

NAMES = ("add", "get_weather")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]"}]}}'
ADDED = ("add", '{"a": 1, "b": [2, {"c": "}]"}]}')
CITY = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
CITED = ("get_weather", '{"city": "Zürich"}')
LLAMA_ADD, LLAMA_CITY = (text.replace("arguments", "parameters") for text in (ADD, CITY))


def answer(name: str, *, template: str = "", limit: int | None = None, hidden: tuple[str, ...] = ()) -> Answer:
    format = tools.find(name, template)
    assert format is not None
    return Answer(None, ToolParser(format, NAMES, limit=limit, hidden=hidden))


def parse(name: str, text: str, *, cut: bool = False, **more: Any) -> tuple[str, list[tuple[str, str]]]:
    one = answer(name, **more)
    one.push(text)
    one.finish(cut)
    return one.content, one.calls


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
        (
            "hermes",
            f"Let me see.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{CITY}\n</tool_call>\n",
            "Let me see.",
            [ADDED, CITED],
        ),
        ("hermes", f"<tool_call>[{ADD}, {CITY}]</tool_call>", "", [ADDED, CITED]),
        ("hermes", f"<tool_call>\n{ADD}\n{CITY}\n</tool_call>", "", [ADDED, CITED]),
        ("hermes", f"<tool_call>\n{ADD}", "", [ADDED]),
        ("hermes", f"<tool_call>{ADD}</tool_call> Done.", " Done.", [ADDED]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}</tool_call>',
            "",
            [("add", '{"a": "x\\ny"}')],
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "no such", "arguments": {}}</tool_call>', "", [("no such", "{}")]),
        ("llama3_json", LLAMA_ADD, "", [ADDED]),
        ("llama3_json", f" \n{LLAMA_ADD}; {LLAMA_CITY}", "", [ADDED, CITED]),
        ("llama3_json", f"<|python_tag|>{LLAMA_ADD}", "", [ADDED]),
        ("llama3_json", f"So: <|python_tag|>{LLAMA_ADD};{LLAMA_CITY}", "So:", [ADDED, CITED]),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        ("mistral", f"[TOOL_CALLS] [{ADD}, {CITY}]", "", [ADDED, CITED]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
            "",
            [("add", '{"a": 1}')],
        ),
        (
            "mistral",
            'Hm.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}',
            "Hm.",
            [("add", '{"a": 1}'), ("get_weather", '{"city": "Bern"}')],
        ),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]add {"a": 1}', "", [("add", '{"a": 1}')]),
        ("granite", f"<|tool_call|>[{ADD}, {CITY}]", "", [ADDED, CITED]),
        ("granite", f"<|tool_call|> {CITY}", "", [CITED]),
        ("phi4_mini", f"<|tool_call|>[{ADD}, {CITY}]<|/tool_call|>", "", [ADDED, CITED]),
    ],
)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(name, text) == (content, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "No calls here."),
        ("hermes", "  white space stays \n\n"),
        ("hermes", ""),
        ("hermes", "a <tool and <tool_cal"),
        ("hermes", "<tool_call>oops</tool_call>"),
        ("hermes", "The mark <tool_call> begins one."),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "no"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ad'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", "</tool_call>"),
        ("llama3_json", '{"name": "Ann", "age": 7}'),
        ("llama3_json", '{"name": "no such", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "add", "parameters": {}}}'),
        ("llama3_json", 'Like {"name": "add", "parameters": {}}'),
        ("llama3_json", "{"),
        ("llama3_json", "{not JSON}"),
        ("llama3_json", '<|python_tag|>print("x")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] no name {}"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CAL"),
        ("granite", "<|tool_call|>sorry"),
        ("phi4_mini", "<|tool_call|>[nothing]<|/tool_call|>"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert parse(name, text) == (text, [])


def test_text_behind_a_call_that_does_not_go_on_is_text() -> None:
    assert parse("llama3_json", f"{LLAMA_ADD}; and so on") == ("; and so on", [ADDED])
    assert parse("granite", f"<|tool_call|>[{ADD}, oops]") == (", oops]", [ADDED])


def test_marks_that_are_special_tokens_never_show() -> None:
    marks = ("<|tool_call|>", "<|/tool_call|>")
    assert parse("phi4_mini", "<|tool_call|>[nothing]<|/tool_call|>", hidden=marks) == ("[nothing]", [])
    assert parse("mistral", "a [ARGS] b", hidden=("[ARGS]",)) == ("a  b", [])


def test_arguments_that_break_off_being_json_go_on_as_they_are() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, b: 2}}\n</tool_call>\nDone.'
    assert parse("hermes", text) == ("Done.", [("add", '{"a": 1, b: 2}}\n')])
    assert parse("mistral", '[TOOL_CALLS]add[ARGS]{"a": oops}') == ("", [("add", '{"a": oops}')])


@pytest.mark.parametrize("end", range(len(f"Hm.<tool_call>\n{CITY}\n</tool_call>") + 1))
def test_a_call_that_a_limit_cuts_shows_no_mark(end: int) -> None:
    text = f"Hm.<tool_call>\n{CITY}\n</tool_call>"
    marker = "Hm.<tool_call>"
    content, calls = parse("hermes", text[:end], cut=True)
    assert content == (text[:end] if end < len(marker) else "Hm." if end < len(text) - 11 else content)
    assert "<tool_call>" not in content
    assert not calls or (calls[0][0] == "get_weather" and CITED[1].startswith(calls[0][1]))


def test_no_more_calls_count_than_are_allowed() -> None:
    text = f"A<tool_call>{ADD}</tool_call><tool_call>{CITY}</tool_call>B"
    assert parse("hermes", text, limit=1) == ("A", [ADDED])
    assert parse("granite", f"<|tool_call|>[{ADD}, {CITY}]", limit=1) == ("", [ADDED])


def test_arguments_are_passed_on_as_they_come() -> None:
    one, seen = answer("hermes"), []
    for c in f"<tool_call>{CITY}</tool_call>":
        seen += one.push(c)
    assert seen[0] == Begin(0, "get_weather")
    assert "".join(e.text for e in seen[1:] if isinstance(e, Arguments)) == CITED[1]
    assert len(seen) == 1 + len(CITED[1])


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    one = answer("hermes")
    assert one.push("I <to") == [Content("I")]
    assert one.push("ol") == []
    assert one.push("box>") == [Content(" <toolbox>")]


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        '"',
        "\\",
        "<|python_tag|>",
        "<|tool_call|>",
    ),
    *("<|/tool_call|>", "[TOOL_CALLS]", "[ARGS]", "add", "get_weather", ADD, CITY, LLAMA_ADD, '{"name": "add", '),
    *('"arguments": {', '"name": "', "<think>", "</think>", "<", "text", "é🫠", "\\u00e9", "1.5e3", "null"),
]


WHOLE = {
    "hermes": f"<tool_call>\n{ADD}\n</tool_call>",
    "llama3_json": f"<|python_tag|>{LLAMA_ADD}; {LLAMA_CITY}",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": [1, "x"]}',
    "granite": f"<|tool_call|>[{CITY}, {ADD}]",
    "phi4_mini": f"<|tool_call|>[{ADD}, {CITY}]<|/tool_call|>",
}


def random_text(luck: random.Random, whole: str) -> str:
    pieces = [*PIECES, whole, whole, whole]
    text = "".join(luck.choice(pieces) for _ in range(luck.randrange(1, 14)))
    if luck.random() < 0.3:
        at = luck.randrange(len(text))
        text = text[:at] + text[at + luck.randrange(4) :]
    return text


def joined(parts: list[Any]) -> list[Any]:
    """Neighbours of one kind as one."""
    out: list[Any] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Content | Thought) and type(last) is type(part):
            out[-1] = type(part)(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments) and last.index == part.index:
            out[-1] = Arguments(part.index, last.text + part.text)
        else:
            out.append(part)
    return out


@pytest.mark.parametrize("name", sorted(tools.formats()))
@pytest.mark.parametrize("thinking", [False, True])
def test_any_text_is_read_the_same_in_any_pieces(name: str, thinking: bool) -> None:
    luck = random.Random(f"{name} {thinking}")
    format = tools.find(name, "")
    assert format is not None
    found = 0
    for _ in range(600):
        text, cut, inside = random_text(luck, WHOLE[name]), luck.random() < 0.3, luck.random() < 0.5
        limit = luck.choice([None, None, 1])
        hidden = luck.choice([(), (*format.markers, *format.ends)])
        read = []
        for pieces in (1, luck.randrange(2, 9), len(text)):
            cuts = sorted(luck.randrange(len(text) + 1) for _ in range(pieces - 1))
            bounds = [0, *(range(1, len(text)) if pieces == len(text) else cuts), len(text)]
            thoughts = ThoughtParser(("<think>", "</think>"), inside) if thinking else None
            one = Answer(thoughts, ToolParser(format, NAMES, limit=limit, hidden=hidden))
            parts = [p for a, b in pairwise(bounds) for p in one.push(text[a:b])]
            parts += one.finish(cut)
            read.append(joined(parts))
            assert "".join(p.text for p in parts if isinstance(p, Content)) == one.content
            assert [p.index for p in parts if isinstance(p, Begin)] == list(range(len(one.calls)))
        assert read[0] == read[1] == read[2], text
        found += sum(isinstance(part, Begin) for part in read[0])
    assert found > 50


def test_the_scanner_takes_what_json_takes() -> None:
    luck = random.Random(5)
    alphabet = [
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"a"',
        '"\\n"',
        "1",
        "-0.5e+3",
        "01",
        "true",
        "nul",
        " ",
        '"',
        "\\",
        '"x',
        "{}",
    ]
    right = 0
    for _ in range(30_000):
        text = luck.choice("{[") + "".join(luck.choice(alphabet) for _ in range(luck.randrange(8)))
        try:
            json.loads(text)
            valid = True
        except ValueError:
            valid = False
        scanner = Scanner()
        try:
            for c in text.rstrip():
                scanner.feed(c)
            ours = scanner.done
        except Malformed:
            ours = False
        assert ours == valid, text
        right += valid
    assert right > 200


@pytest.mark.parametrize(
    ("text", "inside", "thought", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("\n\nYes <think>.", False, "", "\n\nYes <think>."),
        ("<thin", False, "", "<thin"),
        ("<think>Hm </thi", False, "Hm </thi", ""),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm.", True, "Hm.", ""),
    ],
)
def test_thoughts_are_told_apart(text: str, inside: bool, thought: str, content: str) -> None:
    one = Answer(ThoughtParser(("<think>", "</think>"), inside), None)
    one.push(text)
    one.finish(False)
    assert (one.thinking, one.content) == (thought, content)


def test_every_format_says_when_it_is_meant() -> None:
    templates = {
        "hermes": '<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>',
        "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.',
        "mistral": '{{ "[TOOL_CALLS][" }}',
        "granite": "respond only with <|tool_call|> followed by a JSON list of tools used",
        "phi4_mini": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }} <|tool_call|>",
    }
    assert set(templates) == set(tools.formats())
    for name, template in templates.items():
        assert [other for other, file in tools.formats().items() if file.detect(template)] == [name]
    assert tools.find("auto", "{{ tools | tojson }} <tool_call><function=") is None
