"""One answer as it comes: thoughts, text and calls, for a stream and for the whole."""

from __future__ import annotations

from collections.abc import Sequence

from llmx.server.calls import Arguments, Begin, Content, Event, ToolParser
from llmx.server.thoughts import Thought, ThoughtParser

Part = Event | Thought


class Answer:
    """One answer of a request, part by part, and what it has been so far."""

    def __init__(self, thoughts: ThoughtParser | None, calls: ToolParser | None, close: int | None = None) -> None:
        """close: the token that ends thoughts, if it is one."""
        self._thoughts, self._calls, self._close = thoughts, calls, close
        self.thinking_tokens = 0
        self._seen = 0  # tokens until the thoughts were over
        self._thinking: list[str] = []
        self._content: list[str] = []
        self._called: list[tuple[str, list[str]]] = []

    @property
    def may_think(self) -> bool:
        return self._thoughts is not None

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments)"""
        return [(name, "".join(arguments)) for name, arguments in self._called]

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """tokens: those whose text this is."""
        if self._thoughts is None:
            return self._keep("", text)
        over = self._thoughts.over
        parts = self._keep(*self._thoughts.push(text))
        if not over:
            ends = self._thoughts.over and self._close in tokens
            self._seen += tokens.index(self._close) + 1 if ends else len(tokens)
            self.thinking_tokens = self._seen if self._thoughts.found else 0
        return parts

    def finish(self, cut: bool) -> list[Part]:
        """cut: by a limit on tokens."""
        parts = self._keep(*self._thoughts.finish()) if self._thoughts else []
        if self._calls is not None:
            parts += self._note(self._calls.finish(cut))
        return parts

    def _keep(self, thinking: str, text: str) -> list[Part]:
        parts: list[Part] = []
        if thinking:
            self._thinking.append(thinking)
            parts.append(Thought(thinking))
        if text:
            parts += self._note([Content(text)] if self._calls is None else self._calls.push(text))
        return parts

    def _note(self, events: list[Event]) -> list[Event]:
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Begin(_, name):
                    self._called.append((name, []))
                case Arguments(index, text):
                    self._called[index][1].append(text)
        return events
