"""`llmx convert-hf`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import json as jsonlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import identity, ready, ticker
from llmx.errors import UsageError


def convert_hf(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, or a name that means one (`demo`).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new folder.", show_default="./NAME-hf")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="float32, bfloat16 or float16; auto: the file's, or bfloat16 if it is packed."),
    ] = "auto",
    shard_gb: Annotated[float, typer.Option("--shard-gb", min=0.0, help="Most of one file.")] = 5.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say names and sizes only.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout.")
    ] = None,
) -> None:
    """Write a GGUF model as a folder that transformers loads. The folder's path is printed at the end."""
    started = datetime.now(UTC)
    o.writable(None if json == Path("-") else json)
    ready(model)
    from llmx.convert.hf import DTYPES, convert
    from llmx.formats import identity as weights
    from llmx.formats.hub import locate
    from llmx.report import Report

    if not 1 <= shard_gb * 1e9 < 2**63:
        raise UsageError(f"--shard-gb must be a number of GB above 0, not {shard_gb:g}.")
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"--dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}.")
    known = identity(model)
    with ticker() as say:
        made = convert(
            locate(model), output, say, dtype=DTYPES.get(dtype), shard=int(shard_gb * 1e9), force=force, dry_run=dry_run
        )
    found = made.results
    report = Report(
        "convert-hf", found, model={"name": model, **known}, definitions=weights.DEFINITIONS, started=started
    )
    if json is not None and json != Path("-"):
        report.write_json(json)
    line = (
        f"{made.path}: {found['tensors']} tensors in {found['dtype']}, {found['bytes'] / 1e6:,.0f} MB "
        f"({found['source_bytes'] / 1e6:,.0f} MB now), for {found['architecture']}"
    )
    typer.echo(line, err=not dry_run)
    if json == Path("-"):
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    elif not dry_run:
        typer.echo(str(made.path))
