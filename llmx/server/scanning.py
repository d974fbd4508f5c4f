"""JSON a character at a time: as far as it goes it is known to be right, so it can be passed on before it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Container

SPACE = " \t\r\n"
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
SCALAR_BEGINS, SCALAR_GOES_ON = "-0123456789tfn", "-+.eE0123456789truefalsn"
LONGEST_SCALAR = 512
VALUE, FIRST_VALUE, KEY, FIRST_KEY, COLON, NEXT = "value", "value or ]", "key", "key or }", ":", ", or the end"


class Malformed(Exception):
    """What came can't be the beginning of what it should be."""


class Scanner:
    """Follows one JSON object or array (RFC 8259).

    closers: brackets that are open, as the characters that close them. want: what may come. scalar: of a number or word
    that is being read. in_string: inside a text. key: the last key of the objects, quoted. done: all is closed.
    """

    def __init__(self) -> None:
        self.closers: list[str] = []
        self.want = VALUE
        self.scalar = ""
        self.in_string = False
        self.key = ""
        self.done = False
        self._in_key = False
        self._escape = 0  # characters that an escape still needs: -1 for the one behind the backslash, or hex digits

    def feed(self, c: str) -> str:
        """`c` as it is to be written: line breaks inside texts, which models like, become escapes. Malformed."""
        if self.done:
            raise Malformed
        if self.in_string:
            return self._string(c)
        if self.scalar:
            if c in SCALAR_GOES_ON and len(self.scalar) < LONGEST_SCALAR:
                self.scalar += c
                return c
            if not SCALAR.fullmatch(self.scalar):
                raise Malformed
            self.scalar = ""
        if c not in SPACE:
            self._token(c)
        return c

    def _token(self, c: str) -> None:
        if c == '"' and self.want in (KEY, FIRST_KEY):
            self.in_string = self._in_key = True
            self.key, self.want = c, COLON
        elif self.want in (VALUE, FIRST_VALUE) and c != "]":
            self._value(c)
        elif c == ":" and self.want == COLON:
            self.want = VALUE
        elif c == "," and self.want == NEXT:
            self.want = KEY if self.closers[-1] == "}" else VALUE
        elif self.want in (NEXT, FIRST_KEY, FIRST_VALUE) and c == self.closers[-1]:
            self.closers.pop()
            self.want, self.done = NEXT, not self.closers
        else:
            raise Malformed

    def _value(self, c: str) -> None:
        if c == "{":
            self.closers.append("}")
            self.want = FIRST_KEY
        elif c == "[":
            self.closers.append("]")
            self.want = FIRST_VALUE
        elif self.closers and c == '"':
            self.in_string, self.want = True, NEXT
        elif self.closers and c in SCALAR_BEGINS:
            self.scalar, self.want = c, NEXT
        else:
            raise Malformed

    def _string(self, c: str) -> str:
        written = c
        if self._escape == -1:
            if c not in '"\\/bfnrtu':
                raise Malformed
            self._escape = 4 if c == "u" else 0
        elif self._escape:
            if c not in "0123456789abcdefABCDEF":
                raise Malformed
            self._escape -= 1
        elif c == "\\":
            self._escape = -1
        elif c < " ":
            written = json.dumps(c)[1:-1]
        elif c == '"':
            self.in_string = False
        if self._in_key:
            self.key += written
            self._in_key = self.in_string
        return written


NAME = "name"
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id")  # what else models put into a call


class CallObject:
    """`{"name": …, "arguments": {…}}`, the keys in any order.

    name: once it is known. begun: a part of the arguments was given out. complete: the arguments are all there.
    known: names that count, None: any. With `known` other keys than those of a call don't count either: it may be
    an ordinary JSON answer.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        self.name: str | None = None
        self.begun = self.complete = False
        self._known = known
        self._scan = Scanner()
        self._key = ""
        self._value: list[str] | None = None  # of the value that is being read
        self._streams = False  # it is given out as it comes
        self._early: str | None = None  # arguments that came before the name

    @property
    def done(self) -> bool:
        return self._scan.done

    def feed(self, c: str) -> str:
        """What `c` adds to the arguments' text. Malformed."""
        scan = self._scan
        outer, in_scalar = len(scan.closers) == 1, bool(scan.scalar)
        starts = outer and scan.want == VALUE and c not in SPACE
        shown = scan.feed(c)
        if starts:
            self._start(c)
        new = ""
        if self._value is not None:
            ended_before = outer and in_scalar and not scan.scalar
            if not ended_before:
                if self._streams:
                    new = shown
                else:
                    self._value.append(shown)
            if ended_before or (len(scan.closers) == 1 and not scan.in_string and not scan.scalar):
                new += self._end()
        if scan.done and not self.complete:
            new += self._give("{}")
        self.begun = self.begun or bool(new)
        return new

    def _start(self, c: str) -> None:
        self._value = []
        self._key = json.loads(self._scan.key)
        if self._known is not None and self._key not in (NAME, *ARGUMENTS, *BESIDE):
            raise Malformed
        if self._key in ARGUMENTS and (self.complete or self._early is not None):
            self._key = ""  # a second time
        self._streams = self._key in ARGUMENTS and self.name is not None and c == "{"

    def _end(self) -> str:
        text = "".join(self._value or ())
        self._value = None
        if self._key == NAME and self.name is None:
            name = json.loads(text)
            if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
                raise Malformed
            self.name = name
            return "" if self._early is None else self._give(self._early)
        if self._streams:
            self._streams, self.complete = False, True
        elif self._key in ARGUMENTS:
            text = _as_object(text)
            if self.name is not None:
                return self._give(text)
            self._early = text
        return ""

    def _give(self, arguments: str) -> str:
        if self.name is None:
            raise Malformed
        self.complete = True
        return arguments


def _as_object(text: str) -> str:
    """Arguments that are no object: some models write the object's JSON as a text, or null for none."""
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    try:
        inner = json.loads(text)
        if isinstance(inner, str) and isinstance(json.loads(inner), dict):
            return inner
    except (ValueError, RecursionError):
        pass
    raise Malformed
