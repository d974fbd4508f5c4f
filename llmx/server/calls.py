"""Tool calls in a model's text, found while it comes: what a format is made of, and the parser that all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmx.detokenizer import StopStrings
from llmx.server.scanning import SPACE, CallObject, Malformed


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Begin:
    """A call begins; its number counts from 0 in each answer."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of a call's arguments, which together are JSON text."""

    index: int
    text: str


Event = Content | Begin | Arguments


class Reader(ABC):
    """Reads what follows a marker. `out` collects ("name", name) and ("arguments", text) and ("end", "")."""

    def __init__(self) -> None:
        self.out: list[tuple[str, str]] = []
        self.calls = 0  # that have ended

    @abstractmethod
    def feed(self, c: str) -> bool:
        """Whether `c` belongs to the calls; if not, they are over. Malformed: no call began with what came since the
        last one, which is text then.
        """

    def finish(self) -> None:
        """The text has ended."""
        return

    def end_call(self) -> None:
        self.calls += 1
        self.out.append(("end", ""))


class JsonCalls(Reader):
    """`{"name": …, "arguments": {…}}`, or a list of such objects, or several with `separator` in between.

    ends: what closes the calls; only used where the JSON of some arguments is broken: they can't be taken back, so they
    go on as they are up to there. known: see `CallObject`.
    """

    def __init__(self, ends: str = "", separator: str = "", known: Collection[str] | None = None) -> None:
        super().__init__()
        self._ends, self._separator, self._known = ends, separator, known
        self._in_list = self._list_over = False
        self._object: CallObject | None = None
        self._awaits = True  # an object
        self._broken: str | None = None  # the rest of arguments that are no JSON

    def feed(self, c: str) -> bool:
        if self._broken is not None:
            return self._feed_broken(c)
        if self._object is not None:
            return self._feed_object(c)
        if c in SPACE:
            return True
        if self._list_over:
            return False
        if self._awaits:
            if c == "[" and not self._in_list and not self.calls:
                self._in_list = True
            elif c == "]" and self._in_list and not self.calls:
                raise Malformed
            elif c == "{":
                self._object, self._awaits = CallObject(self._known), False
                return self._feed_object(c)
            else:
                raise Malformed
        elif self._in_list:
            if c not in ",]":
                return False
            self._awaits, self._list_over = c == ",", c == "]"
        elif c == self._separator:
            self._awaits = True
        elif c == "{" and self._ends:  # several in one pair of marks
            self._object = CallObject(self._known)
            return self._feed_object(c)
        else:
            return False
        return True

    def _feed_object(self, c: str) -> bool:
        call = self._object
        assert call is not None, "the caller looked"
        begun = call.begun
        try:
            new = call.feed(c)
        except Malformed:
            if not begun:
                raise
            if not call.complete:
                self._broken = c
                return True
            self._object = None  # only a bracket is missing
            self.end_call()
            return False
        if call.begun and not begun:
            self.out.append(("name", call.name or ""))
        if new:
            self.out.append(("arguments", new))
        if call.done:
            self._object = None
            self.end_call()
        return True

    def _feed_broken(self, c: str) -> bool:
        assert self._broken is not None, "the caller looked"
        self._broken += c
        if self._ends and self._broken.endswith(self._ends):
            self._broken = self._broken.removesuffix(self._ends)
            self.finish()
            self._list_over = True
        return True

    def finish(self) -> None:
        if self._broken:
            self.out.append(("arguments", self._broken))
        if self._broken is not None:
            self._object = self._broken = None
            self.end_call()


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    markers: what a call, or a list of them, begins with. ends: what closes one. inside: other marks between these.
    bare: a call may also stand at the beginning of an answer without a marker. reader: by the tools' names and whether
    it stands bare. For grammars: `around`: head and tail of a call's arguments, by its name; body: what follows the
    marker, by Lark's expression for one call, whether there may be several, and what writes a text in Lark; joint: what
    is between two marked ones, None where one marker is followed by a list. single: an answer has one call at most.
    adapt: changes messages to what the template takes, and gives more variables for it. takes_tools: even though the
    template has no variable `tools`.
    """

    markers: tuple[str, ...]
    reader: Callable[[Collection[str], bool], Reader]
    around: Callable[[str], tuple[str, str]]
    body: Callable[[str, bool, Callable[[str], str]], str]
    joint: str | None = None
    ends: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    bare: bool = False
    single: bool = False
    takes_tools: bool = False
    adapt: Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]]], dict[str, Any]] | None = None


class ToolParser:
    """One answer's text to content and calls, the same however the text is cut into pieces.

    What may be the beginning of a marker, and white space that may stand before one, is held back. Text that turns out
    to be no call after its marker is content as it stands. limit: calls that count; whatever follows the last is
    dropped. hidden: marks that a text doesn't show, being special tokens.
    """

    def __init__(
        self,
        format: Format,
        names: Collection[str],
        *,
        limit: int | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        self.count = 0
        self._format, self._names, self._limit, self._hidden = format, names, limit, hidden
        self._marks = StopStrings([*format.markers, *format.ends, *(m for m in format.inside if m in hidden)])
        self._state = 0
        self._held = ""  # perhaps the beginning of a mark
        self._space = ""  # perhaps in front of a marker
        self._fresh = format.bare  # nothing but white space came
        self._reader: Reader | None = None
        self._marker = ""
        self._raw: list[str] = []  # what the reader was given since the marker or the last call
        self._open = False  # a call has begun and not ended
        self._unclosed = False  # the mark that ends the calls has not come
        self._full = False
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        for c in text:
            if self._full:
                break
            if self._reader is None:
                self._text(c)
            else:
                self._call(c)
        return self._take()

    def finish(self, cut: bool = False) -> list[Event]:
        """The text has ended; cut: by a limit, so that what came after a marker was to become a call."""
        if self._reader is not None and not self._full:
            self._reader.finish()
            self._drain(self._reader)
            raw = "".join(self._raw)
            is_rest = self._open or (self._reader.calls and "{" not in raw) or (cut and self._marker)
            if not is_rest and not self._full:
                self._show(self._visible(self._marker) + raw)
        elif not self._full:
            self._show(self._held)
        if self._space and not self.count and not self._full:
            self._events.append(Content(self._space))
        return self._take()

    def _text(self, c: str) -> None:
        """One character that is in no call."""
        if self._fresh:
            if c in SPACE:
                self._space += c
                return
            self._fresh = False
            if c == "{":
                self._begin("")
                self._call(c)
                return
        self._held += c
        self._state = self._marks.step(self._state, c)
        mark = self._marks.match[self._state]
        safe = len(self._held) - (self._marks.held[self._state] if mark is None else len(mark))
        self._show(self._held[:safe])
        self._held = self._held[safe:]
        if mark is None:
            return
        self._held, self._state = "", 0
        if mark in self._format.markers:
            self._begin(mark)
        elif self._unclosed and mark in self._format.ends:
            self._unclosed = False
        else:
            self._show(self._visible(mark))

    def _begin(self, marker: str) -> None:
        self._reader = self._format.reader(self._names, not marker)
        self._marker, self._unclosed = marker, False
        self._raw.clear()

    def _call(self, c: str) -> None:
        """One character behind a marker."""
        reader = self._reader
        assert reader is not None, "the caller looked"
        self._raw.append(c)
        try:
            belongs = reader.feed(c)
        except Malformed:
            self._reader = None
            marker = "" if reader.calls else self._visible(self._marker)
            self._show(marker + "".join(self._raw[:-1]))
            self._text(c)
            return
        self._drain(reader)
        if not belongs and not self._full:
            self._reader, self._unclosed = None, True
            self._text(c)

    def _drain(self, reader: Reader) -> None:
        for what, text in reader.out:
            if what == "name":
                self._events.append(Begin(self.count, text))
                self._open = True
            elif what == "arguments":
                self._events.append(Arguments(self.count, text))
            else:
                self.count += 1
                self._open = False
                self._full = self.count == self._limit
            self._raw.clear()
            if self._full:
                break
        reader.out.clear()

    def _show(self, text: str) -> None:
        """Content, but for white space at its end."""
        end = len(text.rstrip(SPACE))
        if end:
            self._events.append(Content(self._space + text[:end]))
            self._space = text[end:]
        else:
            self._space += text

    def _take(self) -> list[Event]:
        """What has come, neighbours joined."""
        joined: list[Event] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + event.text)
            elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
                joined[-1] = Arguments(event.index, last.text + event.text)
            else:
                joined.append(event)
        self._events = []
        return joined

    def _visible(self, mark: str) -> str:
        return "" if mark in self._hidden else mark
