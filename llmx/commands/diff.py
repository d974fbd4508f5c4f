"""`llmx diff`: where two models, or two settings of one, part: token, layer, op, tensor."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import identity, ready, ticker
from llmx.errors import CheckFailed, UsageError

PROMPT = "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the"
_B = {"rich_help_panel": "What B has instead"}


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, as in `llmx generate`.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="The other; A again if left out.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="What both are given.")] = PROMPT,
    ids: Annotated[str | None, typer.Option("--ids", help="Token ids instead of a prompt: 1,2,3.")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=0, max=4096, help="Of A's greedy continuation, that both are then given.")
    ] = 16,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Relative error that is none.", show_default="1e-4; in 16 bits 0.02"),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    activations: o.Activations = "bf16",
    kernels_a: Annotated[
        str | None, typer.Option("--kernels-a", help="Take every op of A from cuda, cpu or reference.")
    ] = None,
    threads: o.Threads = None,
    dtype_b: Annotated[str | None, typer.Option("--dtype-b", help="As --dtype.", **_B)] = None,
    device_b: Annotated[str | None, typer.Option("--device-b", help="As --device.", **_B)] = None,
    kv_cache_dtype_b: Annotated[
        str | None, typer.Option("--kv-cache-dtype-b", help="As --kv-cache-dtype.", **_B)
    ] = None,
    activations_b: Annotated[str | None, typer.Option("--activations-b", help="As --activations.", **_B)] = None,
    kernels_b: Annotated[
        str | None, typer.Option("--kernels-b", help="As --kernels-a, of B; if not given, A's.", **_B)
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout, and no lines.")
    ] = None,
) -> None:
    """Find the first token, layer, op and tensor at which two models part, or two settings of one.

    Every op of B is also run on A's own inputs, so that none is blamed for what it inherits. Exit code 3: they differ.
    """
    started = datetime.now(UTC)
    config = o.engine_config(
        a, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype, activations=activations, threads=threads, seed=0
    )
    with _said_of("B"):
        other = replace(
            config,
            model=b or a,
            dtype=dtype_b or dtype,
            device=device_b or device,
            kv_cache_dtype=kv_cache_dtype_b or kv_cache_dtype,
            activations=activations_b or activations,
        )
    given = None if ids is None else _ids(ids)
    for name in dict.fromkeys((config.model, other.model)):
        ready(name)
    weights = [identity(one.model) for one in (config, other)]
    from llmx.device import yield_while_waiting

    yield_while_waiting()
    from llmx.formats.identity import DEFINITIONS as formulae
    from llmx.inspect.compare import compare
    from llmx.inspect.show import DEFINITIONS, figures, lines
    from llmx.inspect.side import Side
    from llmx.report import Report

    with _said_of("A"):
        first = Side(config, kernels_a)
    with _said_of("B"):
        second = Side(other, kernels_b or kernels_a)
    with ticker() as say:
        found = compare(first, second, prompt=prompt, ids=given, tokens=tokens, tolerance=tolerance, say=say)
    facts = {"name": a, **weights[0], "b": {"name": other.model, **weights[1]}}
    report = Report("diff", figures(found), model=facts, definitions=DEFINITIONS | formulae, started=started)
    if json == Path("-"):
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        for line in lines(found):
            typer.echo(line)
    if json is not None and json != Path("-"):
        report.write_json(json)
    if found.differs:
        raise CheckFailed(found.sentence())


@contextmanager
def _said_of(side: str) -> Iterator[None]:
    """Errors in here name the side whose option is wrong."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"Of {side}: {error.message}", error.hint) from None


def _ids(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise UsageError(f"--ids must be whole numbers with commas between them, not {text[:60]!r}.") from None
