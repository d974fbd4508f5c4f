"""Text to and from whoever sits there: a person at a terminal, or a pipe."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

from llmx.errors import UsageError

# What a terminal obeys rather than shows; a model's text must not move the cursor or set the title.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HISTORY_LINES = 1000


def show(text: str) -> None:
    """To stdout at once; as it is to a file or pipe, without control characters to a terminal."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Lines:
    """Messages of one line or several from standard input. As a context manager: what was typed is kept in `history`.

    `interactive`: a person types them; then there is a prompt, and readline where stdout is a terminal too.
    """

    def __init__(self, history: Path) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history
        self._readline: ModuleType | None = None

    def __enter__(self) -> Lines:
        if self.interactive and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline

                self._readline = readline
                with contextlib.suppress(OSError):  # none yet
                    readline.read_history_file(self._history)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None:
            self._readline.set_history_length(HISTORY_LINES)
            with contextlib.suppress(OSError):  # a history is not worth an error
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._readline.write_history_file(self._history)

    def message(self) -> tuple[str, bool]:
        """The next message, and whether it is quoted and so no command. EOFError: there is none.

        A line that ends with a backslash goes on in the next one; three double quotes begin a text that three end.
        """
        first = self._line(PROMPT)
        quoted = first.lstrip().startswith(QUOTES)
        lines = [first.lstrip().removeprefix(QUOTES)] if quoted else [first]
        with contextlib.suppress(EOFError):  # the end of the input ends the message too
            if quoted:
                while not lines[-1].rstrip().endswith(QUOTES):
                    lines.append(self._line(MORE))
                lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
            else:
                while lines[-1].endswith("\\"):
                    lines[-1] = lines[-1][:-1]
                    lines.append(self._line(MORE))
        return "\n".join(lines).strip("\n"), quoted

    def _line(self, prompt: str) -> str:
        try:
            if self.interactive and sys.stdout.isatty():
                return input(prompt)
            if self.interactive:  # stdout is data here
                sys.stderr.write(prompt)
                sys.stderr.flush()
            line = sys.stdin.buffer.readline().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not UTF-8 text: byte {error.start} can't be read.") from error
        if not line:
            raise EOFError
        return line.rstrip("\r\n")
