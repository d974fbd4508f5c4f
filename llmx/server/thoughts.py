"""What a model thinks before it answers, told apart from the answer while it comes."""

from __future__ import annotations

from dataclasses import dataclass

from llmx.detokenizer import StopStrings
from llmx.server.scanning import SPACE
from llmx.server.settings import MARKS, check_parser

BEFORE, INSIDE, AFTER = range(3)


@dataclass(frozen=True)
class Thought:
    """A part of what the model thinks."""

    text: str


def find_marks(name: str, template: str) -> tuple[str, str] | None:
    """What stands around thoughts, None for "off". "auto": the pair that the template's source has, if any."""
    check_parser(name)
    if name == "auto":
        return next((pair for pair in MARKS.values() if pair[0] in template and pair[1] in template), None)
    return MARKS.get(name)


class ThoughtParser:
    """One answer's text to thoughts and the answer behind them, the same however the text is cut into pieces.

    Thoughts stand at the beginning, behind the first mark or, with `inside`, behind a prompt that ends with it; white
    space around them is dropped.
    """

    def __init__(self, marks: tuple[str, str], inside: bool) -> None:
        self._open, self._close = marks
        self._ends = StopStrings([self._close])
        self._state = 0
        self._place = INSIDE if inside else BEFORE
        self._held = ""
        self._space = ""
        self._leading = True  # nothing of the thoughts was said, or nothing of an answer that comes behind them
        self.found = inside

    @property
    def over(self) -> bool:
        """Whether all that comes belongs to the answer."""
        return self._place == AFTER

    def push(self, text: str) -> tuple[str, str]:
        """What this adds to (thoughts, answer)."""
        thoughts: list[str] = []
        for at, c in enumerate(text):
            if self._place == AFTER:
                return "".join(thoughts), self._answer(text[at:])
            if self._place == INSIDE:
                thoughts.append(self._think(c))
            elif not self._begin(c):
                held, self._held = self._held, ""
                self._place = AFTER
                return "", held + text[at + 1 :]
        return "".join(thoughts), ""

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held, ""
        if self._place == BEFORE:
            return "", held
        return (self._say(held), "") if self._place == INSIDE else ("", "")

    def _begin(self, c: str) -> bool:
        """Whether the answer may still begin with thoughts."""
        self._held += c
        start = self._held.lstrip(SPACE)
        if start == self._open:
            self._held, self._place, self.found = "", INSIDE, True
        return self._open.startswith(start)

    def _think(self, c: str) -> str:
        self._held += c
        self._state = self._ends.step(self._state, c)
        if self._ends.match[self._state]:
            said = self._say(self._held[: -len(self._close)])
            self._held, self._place, self._leading = "", AFTER, True
            return said
        safe = len(self._held) - self._ends.held[self._state]
        safe_text, self._held = self._held[:safe], self._held[safe:]
        return self._say(safe_text)

    def _say(self, text: str) -> str:
        """Thoughts without the white space at their beginning and, until more comes, at their end."""
        text = self._space + text
        if self._leading:
            text = text.lstrip(SPACE)
        end = len(text.rstrip(SPACE))
        self._space = text[end:]
        self._leading = self._leading and not end
        return text[:end]

    def _answer(self, text: str) -> str:
        """White space between the thoughts and the answer belongs to neither."""
        if self.found and self._leading:
            text = text.lstrip(SPACE)
            self._leading = not text
        return text
