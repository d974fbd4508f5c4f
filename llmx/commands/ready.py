"""Before torch is imported: find the model, fetch it if need be, check the files. And progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from llmx.commands.options import is_terminal
from llmx.config import EngineInfo

STEPS = 4  # plain lines of a whole progress


def ready(name: str) -> Path | None:
    """After this `LLM(name)` finds files whose structure and sizes are right. UsageError where they are not.

    Where the model is: a directory or a file; None for random weights.
    """
    if name.startswith("random:"):
        return None
    from llmx.formats.hub import pull
    from llmx.formats.structure import check

    with progress(f"fetching {name}") as tell:
        located = pull(name, tell)
    check(located)
    return located.path


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function (bytes done, bytes in all) that draws a bar, or plain lines where nobody watches."""
    if not is_terminal():
        yield _lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _lines(label: str) -> Callable[[int, int], None]:
    said = -1

    def tell(done: int, total: int) -> None:
        nonlocal said
        step = STEPS * done // total if total else STEPS
        if step > said:
            said = step
            typer.echo(f"{label}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", err=True)

    return tell


@contextmanager
def ticker() -> Iterator[Callable[[str], None]]:
    """A function that says what is going on: in one changing line, or in plain ones where nobody watches."""
    if not is_terminal():
        yield lambda line: typer.echo(line, err=True)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:

        def tell(line: str) -> None:
            if line.startswith(("Note:", "warning:")):  # to be read later, too
                console.print(line, markup=False, highlight=False)
            else:
                status.update(line)

        yield tell


def identity(name: str) -> dict[str, Any]:
    """Which weights `name` is, for a report: sha256 and revision; of random ones, nothing. To be called after `ready`,
    before anything is timed: a file that wasn't hashed before is read."""
    if name.startswith("random:"):
        return {}
    from llmx.formats.hub import locate
    from llmx.formats.identity import identify

    path = locate(name).path
    if not is_terminal():
        return identify(path)
    with progress(f"hashing {name}") as tell:
        return identify(path, tell)


def model_facts(info: EngineInfo, identified: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """What a report says of the model: everything but the kernels, which have their own place."""
    facts = asdict(info)
    facts["name"] = facts.pop("model")
    del facts["kernels"]
    return {**facts, **identified}
