"""`llmx pull`: fetch a model that has a name, and say where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from llmx.commands.options import DEMO
from llmx.commands.ready import progress


def pull(
    model: Annotated[str, typer.Argument(help="`demo`, or a model that is there already.", metavar="[MODEL]")] = DEMO,
) -> None:
    """Fetch a model into the cache and print its path."""
    from llmx.formats import hub

    with progress(f"fetching {model}") as tell:
        located = hub.pull(model, tell)
    typer.echo(str(located.path))
