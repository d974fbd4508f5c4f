"""`llmx inspect`: what a checkpoint holds, and what is wrong with it."""

from __future__ import annotations

import json as jsonlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from llmx.commands import options as o
from llmx.commands.ready import progress
from llmx.errors import CheckFailed, UsageError

WIDE = 200  # columns of a pipe or a file


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder, a .gguf file, or a name, as in `llmx generate`.")
    ],
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="List the stored tensors of these names, each.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="With min, max and rms; packed weights unpacked.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read the headers only, and no numbers.")] = False,
    fail_on: Annotated[str, typer.Option("--fail-on", help="Exit code 3 for a warning too, or for an error.")] = (
        "error"
    ),
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout, and no tables.")
    ] = None,
) -> None:
    """List what a checkpoint holds (schemes, sizes, effective bits) and what is wrong with it, by tensor.

    Exit code 3: something is. Whatever other engines refuse is a warning.
    """
    from llmx.inspect.findings import LEVELS

    if fail_on not in LEVELS:
        raise UsageError(f"--fail-on must be {' or '.join(LEVELS)}, not {fail_on!r}.")
    if quick and stats:
        raise UsageError("--quick reads no numbers, so there are no --stats.", hint="Leave one of the two out.")
    o.writable(None if json == Path("-") else json)
    started = datetime.now(UTC)
    from llmx.formats.hub import pull
    from llmx.inspect.examine import examine
    from llmx.inspect.findings import at_least
    from llmx.inspect.listing import DEFINITIONS, figures, show
    from llmx.report import Report

    with progress(f"fetching {checkpoint}") as tell:
        located = pull(checkpoint, tell)
    if o.is_terminal():
        with progress("reading") as tell:
            found = examine(located, quick=quick, stats=stats, progress=tell)
    else:
        found = examine(located, quick=quick, stats=stats)
    if tensors is not None and not found.contents.matching(tensors) and found.contents.entries:
        names = [entry.stored.name for entry in found.contents.entries]
        raise UsageError(f"--tensors {tensors} matches none of {len(names)} names.", hint=f"One of them is {names[0]}.")
    if json is not None:
        facts: dict[str, Any] = {"name": checkpoint, "architecture": found.architecture}
        if not quick and found.contents.readable:
            facts |= _identity(located.path)
        report = Report("inspect", figures(found), model=facts, definitions=DEFINITIONS, started=started)
        if json == Path("-"):
            typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        else:
            report.write_json(json)
    if json != Path("-"):
        from rich.console import Console

        show(Console(width=None if sys.stdout.isatty() else WIDE), found, tensors)
    if (bad := at_least(found.findings, fail_on)) > 0:
        raise CheckFailed(f"{checkpoint} has {bad} {'faults' if bad > 1 else 'fault'} of level {fail_on}"
                          f"{'' if fail_on == 'error' else ' or worse'}.")  # fmt: skip


def _identity(path: Path) -> dict[str, Any]:
    """Nothing where the folder is refused as a whole: what is wrong is among the findings."""
    from llmx.formats.identity import identify

    try:
        return identify(path)
    except UsageError:
        return {}
