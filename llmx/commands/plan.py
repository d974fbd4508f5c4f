"""`llmx plan`: what fits on some hardware, how fast it would be, what to change; from config.json or a GGUF header."""

from __future__ import annotations

import json as jsonlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmx.commands import options as o
from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.planning.anatomy import Anatomy
    from llmx.planning.hardware import Hardware
    from llmx.planning.sizes import Load

CONTEXT = 4096  # unless the model was made for less
WIDE = 200  # columns of a pipe or a file


def plan(
    model: o.Model = None,
    hardware: Annotated[
        str,
        typer.Option("--hardware", help="cpu (this machine, measured), H100, 4xA100-80G, 16x8xH800 (machines x 8)."),
    ] = "cpu",
    context: Annotated[
        int | None, typer.Option("--context", min=2, help="Most tokens of a request.", show_default="4096, or fewer")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=2**20, help="Requests at once.")] = 1,
    quant: Annotated[
        str | None, typer.Option("--quant", help="Plan the weights in this scheme (fp8, awq, q4_k_m, ...).")
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="auto, float32, bfloat16, float16, fp8 or int8.")
    ] = "auto",
    input_len: Annotated[
        int | None, typer.Option("--input-len", min=1, help="Tokens of a prompt.", show_default="3/4 of the context")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--output-len", min=1, help="Tokens of an output.", show_default="what is left")
    ] = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    threads: o.Threads = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulae with their numbers.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout, and no table.")
    ] = None,
) -> None:
    """Plan memory and speed of a model on some hardware without its weights: what fits, how fast, what to change."""
    from rich.console import Console

    from llmx.planning.plans import make
    from llmx.planning.show import DEFINITIONS, figures, show
    from llmx.planning.source import read
    from llmx.planning.storage import quant as scheme
    from llmx.report import Report

    started = datetime.now(UTC)
    name, defaulted = o.choose_model(model)
    anatomy = read(name)
    if quant is not None:
        anatomy = anatomy.quantised(scheme(quant))
    load = _load(anatomy, hardware, kv_dtype, context, concurrency, input_len, output_len)
    found = make(anatomy, _hardware(anatomy, hardware, load, threads), load, memory_utilization)
    report = Report(
        "plan",
        figures(found),
        model={"name": name, "architecture": anatomy.architecture, "runs": anatomy.runs},
        model_defaulted=defaulted,
        definitions=DEFINITIONS,
        started=started,
    )
    if json == Path("-"):
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    show(Console(width=None if sys.stdout.isatty() else WIDE), found, explain)
    if json is not None:
        report.write_json(json)


def _load(
    anatomy: Anatomy,
    hardware: str,
    kv_dtype: str,
    context: int | None,
    concurrency: int,
    input_len: int | None,
    output_len: int | None,
) -> Load:
    """What is asked for, and what follows for the rest."""
    from llmx.planning.sizes import Load
    from llmx.planning.storage import KV_SCALES, kv_bytes

    context = context or min(CONTEXT, anatomy.max_position)
    if input_len is None:
        input_len = max(1, context - output_len if output_len is not None else context * 3 // 4)
    if output_len is None:
        output_len = max(1, context - input_len)
    if kv_dtype == "auto":  # as the engine: GGUF names no dtype
        plain = "float32" if hardware == "cpu" else "bfloat16"
        kv_dtype = anatomy.dtype if anatomy.layers[0].matrices[0].storage is None else plain
    scales = KV_SCALES if kv_dtype.lower() == "int8" else 0
    return Load(context, concurrency, input_len, output_len, kv_bytes(kv_dtype), scales)


def _hardware(anatomy: Anatomy, name: str, load: Load, threads: int | None) -> Hardware:
    """The data sheets', or this machine as measured now."""
    from llmx.planning.hardware import parse

    if name != "cpu":
        return parse(name)
    if load.input_len + load.output_len > load.context:
        raise UsageError(
            f"--input-len {load.input_len} and --output-len {load.output_len} are more than --context {load.context}."
        )
    from llmx.device import use_threads, yield_while_waiting

    yield_while_waiting()
    from llmx.bench.calibration import measured_machine

    use_threads(threads)
    typer.echo("measuring what the engine does on this machine, on a few layers of this size", err=True)
    return measured_machine(anatomy, load)
