"""`llmx pull`: fetch a model that has a name, and say where it is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llmx.commands.options import DEMO, is_terminal
from llmx.formats import hub


def pull(
    model: Annotated[str, typer.Argument(help="`demo`, or a model that is there already.", metavar="[MODEL]")] = DEMO,
) -> None:
    """Fetch a model into the cache and print its path."""
    located = _with_bar(model) if is_terminal() else hub.pull(model, _Lines(model))
    typer.echo(str(located.path))


def _with_bar(model: str) -> hub.Located:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(f"Fetching {model}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        return hub.pull(model, lambda done, total: bar.update(task, completed=done, total=total))


class _Lines:
    """Progress for a log: a line at the beginning and at each further quarter."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.quarter = -1

    def __call__(self, done: int, total: int) -> None:
        if (quarter := 4 * done // total) > self.quarter:
            self.quarter = quarter
            print(f"Fetching {self.model}: {25 * quarter} % of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)
