"""What a text must follow so that every call in it is a right one: Lark, as llguidance has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmx.grammar import schema_text
from llmx.server.calls import Format

ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True)
class Wish:
    """What a request wants with its tools. functions: their definitions; empty: nothing is parsed. allowed: those that
    a grammar lets be called. must: at least one call. several: there may be more than one. strict: arguments follow the
    schemas even where calls are free.
    """

    functions: tuple[Mapping[str, Any], ...] = ()
    allowed: tuple[Mapping[str, Any], ...] = ()
    must: bool = False
    several: bool = True
    strict: bool = False


class Writer:
    """specials: text -> id of the special tokens, which a grammar must name as such."""

    def __init__(self, format: Format | None, marks: tuple[str, str] | None, specials: Mapping[str, int]) -> None:
        self._format, self._marks, self._specials = format, marks, specials

    def write(self, wish: Wish, thinks: bool, answer: str | None) -> str:
        """thinks: the prompt has begun the thoughts. answer: a grammar that the text follows where it has no call;
        None: any text, and from a marker on a call.
        """
        rules = ["%llguidance {}", *self._thoughts(thinks)]
        format = self._format
        if format is None or not wish.functions:
            start = "@answer"
        else:
            several = wish.several and not format.single
            rules += self._calls(format, wish, several)
            if wish.must:
                start = "calls"
            elif answer is not None:
                start = "(calls | @answer)"
            else:
                start = "free"
                rules += self._free(format, several)
        before = "" if self._marks is None else "thoughts" if thinks else "thoughts?"
        rules.append(f"start: {before} {start}")
        lark = "\n".join(rules)
        return lark if answer is None else json.dumps({"grammars": [{"lark_grammar": lark}, *_named(answer)]})

    def _calls(self, format: Format, wish: Wish, several: bool) -> list[str]:
        """Rules: `body` is what follows a marker, `calls` an answer that is nothing else."""
        rules = []
        for n, tool in enumerate(wish.allowed):
            function = tool["function"]
            bound = wish.must or function.get("strict")
            schema = _dense(function.get("parameters") or {} if bound else {})
            head, tail = format.around(function["name"])
            rules.append(f"call_{n}: {self._quote(head)} %json {schema} {self._quote(tail)}")
        rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(wish.allowed))))
        rules.append(f"body: {format.body('call', several, self._quote)}")
        marked = "body" if format.bare else f"{self._quote(format.markers[0])} body"
        more = f" ({self._quote(format.joint)} {marked})*" if several and format.joint is not None else ""
        return [*rules, f"calls: {marked}{more}"]

    def _free(self, format: Format, several: bool) -> list[str]:
        marker = format.markers[0]
        rules = [f"TEXT: {ANYTHING}"]
        if marker in self._specials:
            rules.append(f"marked: TEXT {self._quote(marker)} body")
        else:
            rules += [f"marker[lazy]: TEXT {self._quote(marker)}", "marked: marker body"]
        many = "*" if several and format.joint is not None else "?"
        if not format.bare:
            return [*rules, f"free: marked{many} TEXT"]
        # An answer that begins as a call does is one.
        return [*rules, r"OTHER: /[^{](.|\n)*/", "free: calls | OTHER?"]

    def _thoughts(self, thinks: bool) -> list[str]:
        if self._marks is None:
            return []
        first, last = self._marks
        begin = "" if thinks else self._quote(first)
        if last in self._specials:
            return [rf"thoughts: {begin} {ANYTHING} {self._quote(last)} /\n{{0,2}}/"]
        rules = [f"THINKING: {ANYTHING}", f"thinking[lazy]: THINKING {self._quote(last)}"]
        return [*rules, rf"thoughts: {begin} thinking /\n{{0,2}}/"]

    def _quote(self, text: str) -> str:
        """A text in Lark: strings, and the special tokens in it as such."""
        if not text:
            return ""
        for mark, token in self._specials.items():
            if mark and mark in text:
                before, after = text.split(mark, 1)
                return " ".join(filter(None, (self._quote(before), f"<[{token}]>", self._quote(after))))
        return json.dumps(text, ensure_ascii=False)


def _dense(schema: Mapping[str, Any]) -> str:
    """A schema whose JSON is spaced as templates write it, which the model knows best."""
    spacing = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return json.dumps({"type": "object", **json.loads(schema_text(schema, param="tools")), "x-guidance": spacing})


def _named(grammar: str) -> list[dict[str, Any]]:
    """A grammar as others refer to it."""
    try:
        found: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    except (ValueError, TypeError, LookupError):
        found = [{"lark_grammar": grammar}]
    return [{**found[0], "name": "answer"}, *found[1:]]
