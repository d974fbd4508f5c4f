"""A conversation in the terminal: turns, what is kept of them, and the commands that begin with a slash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from llmx.commands.terminal import Lines, show
from llmx.errors import LlmxError, UsageError

if TYPE_CHECKING:
    from llmx.core import SamplingParams
    from llmx.llm import LLM

COMMANDS = {
    "/reset": "forget what was said",
    "/system": "TEXT: set the system message; without TEXT: none",
    "/save": "FILE: write the conversation as JSON",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D",
}
NOTES = 'Ctrl-C ends an answer. A line that ends with \\ goes on in the next; """ begins and ends a longer text.'
Answer = Generator[tuple[str, str | None], None, None]  # pieces of text, each with the finish reason once it is known


class Speaker(Protocol):
    """Who answers: a model loaded here, or a server."""

    name: str

    def alive(self) -> bool: ...

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """LlmxError where it can't. Close it to interrupt."""


class Local:
    """A model loaded here."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.name = llm.info.model
        self._llm, self._params = llm, params

    def alive(self) -> bool:
        return self._llm.alive()

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        with self._llm.open(self._llm.render(messages), self._params) as stream:
            for delta in stream:
                yield delta.text, delta.finish_reason


class Conversation:
    """What was said so far. A turn is kept when it has an answer, be it the beginning of one."""

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self.speaker = speaker
        self.system = system
        self.turns: list[dict[str, str]] = []
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        """One turn, shown as it comes. KeyboardInterrupt passes on; what was said until then is kept."""
        question = {"role": "user", "content": text}
        said: list[str] = []
        finish: str | None = None
        try:
            with contextlib.closing(self.speaker.answer([*self.messages, question])) as pieces:
                for piece, reason in pieces:
                    finish = reason
                    said.append(piece)
                    show(piece)
        except KeyboardInterrupt:
            self._keep(question, said)
            raise
        finally:
            if any(said):
                show("\n")
        self._keep(question, said)
        if finish == "length":
            typer.echo("(cut off: that was the most tokens allowed)", err=True)

    def _keep(self, question: dict[str, str], said: list[str]) -> None:
        if any(said):
            self.turns += [question, {"role": "assistant", "content": "".join(said)}]

    def obey(self, line: str) -> bool:
        """A line that begins with a slash; False: leave. UsageError for one that can't be."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        match command:
            case "/exit":
                return False
            case "/reset":
                self.turns.clear()
                typer.echo("(forgotten)", err=True)
            case "/system":
                self.system = rest or None
                typer.echo("(system message set)" if rest else "(no system message)", err=True)
            case "/save":
                self.save(rest)
            case "/help":
                typer.echo("\n".join([*(f"{name:8} {what}" for name, what in COMMANDS.items()), NOTES]), err=True)
            case _:
                close = get_close_matches(command, COMMANDS, 1)
                meant = f"Did you mean {close[0]}?" if close else "/help lists the commands."
                raise UsageError(f"{command} is no command.", f'{meant} To say it, put it in """.')
        return True

    def save(self, name: str) -> None:
        """Write {"model", "messages"}. A file that something else wrote is not overwritten."""
        from llmx.report import write_whole

        if not name:
            raise UsageError("/save needs the name of a file.")
        path = Path(name).expanduser().absolute()
        if path.exists() and path not in self._saved:
            raise UsageError(f"{path} is there already.", "Give another name.")
        document = {"model": self.speaker.name, "messages": self.messages}
        try:
            write_whole(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UsageError(f"{path} can't be written: {error.strerror}.") from error
        self._saved.add(path)
        typer.echo(f"(saved to {path})", err=True)


def converse(talk: Conversation, lines: Lines) -> None:
    """Until /exit or the end of the input. Where nobody sits at a terminal, the first error or interrupt ends it."""
    with lines:
        while True:
            try:
                text, literal = lines.message()
                if text.startswith("/") and not literal:
                    if not talk.obey(text):
                        return
                elif text.strip():
                    talk.ask(text)
            except EOFError:
                if lines.interactive:
                    typer.echo(err=True)
                return
            except KeyboardInterrupt:
                if not lines.interactive:
                    raise
                typer.echo("(interrupted; /exit or Ctrl-D leaves)", err=True)
            except LlmxError as error:
                if not lines.interactive or not talk.speaker.alive():
                    raise
                typer.echo(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
