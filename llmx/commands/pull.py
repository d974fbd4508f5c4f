"""`llmx pull`: fetch a model that has a name, and say where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from llmx.commands.options import DEMO
from llmx.commands.ready import progress


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="`demo`, or a model of the Hugging Face Hub: org/name for its safetensors, org/name:Q4_K_M for the "
            "GGUF file of that type, org/name:file.gguf, each also as org/name@revision.",
            metavar="[MODEL]",
        ),
    ] = DEMO,
) -> None:
    """Fetch a model into the cache, or what is new of it, and print its path."""
    from llmx.formats import hub

    with progress(f"fetching {model}") as tell:
        located = hub.pull(model, tell, newest=True)
    typer.echo(str(located.path))
