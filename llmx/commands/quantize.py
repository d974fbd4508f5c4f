"""`llmx quantize`: a checkpoint with fewer bits, that other engines load too."""

from __future__ import annotations

import json as jsonlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import identity, ready, ticker
from llmx.errors import UsageError

_HOW = {"rich_help_panel": "How"}
_CALIBRATION = {"rich_help_panel": "Calibration"}
_OUTPUT = {"rich_help_panel": "Output"}


def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As in `llmx generate`: a directory, a .gguf file, a hub name, `demo`."),
    ],
    awq: Annotated[bool, typer.Option("--awq", help="4 bits, by activation-aware scales.", **_HOW)] = False,
    gptq: Annotated[bool, typer.Option("--gptq", help="2 to 8 bits, errors made up for.", **_HOW)] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="8-bit floats.", **_HOW)] = False,
    int8: Annotated[bool, typer.Option("--int8", help="8-bit weights and activations.", **_HOW)] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new folder.", show_default="./NAME-awq-w4g128", **_OUTPUT)
    ] = None,
    bits: Annotated[int | None, typer.Option("--bits", help="Of a weight.", show_default="4", **_HOW)] = None,
    group_size: Annotated[
        str, typer.Option("--group-size", help="Inputs that share a scale; auto: 128, 64 or 32, what fits.", **_HOW)
    ] = "auto",
    sym: Annotated[
        bool | None,
        typer.Option("--sym/--asym", help="Without or with zero points.", show_default="gptq sym, awq asym", **_HOW),
    ] = None,
    fp8_mode: Annotated[
        str | None,
        typer.Option("--fp8-mode", help="dynamic, static or block (128 x 128).", show_default="dynamic", **_HOW),
    ] = None,
    damp: Annotated[
        float | None,
        typer.Option("--damp", help="GPTQ: part of the mean diagonal added.", show_default="0.01", **_HOW),
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order",
            help="GPTQ: large inputs first (static groups).",
            show_default="act-order",
            **_HOW,
        ),
    ] = None,
    ignore: Annotated[
        str | None, typer.Option("--ignore", metavar="REGEX", help="Linears that stay as they are.", **_HOW)
    ] = None,
    quantize_lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="The head too, unless it is tied to the embedding.", **_HOW)
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq, gptq, gptq_v2, compressed-tensors or fp8 (DeepSeek's).",
            show_default="the method's own",
            **_HOW,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help="Have autoawq or auto-gptq do it (CUDA only).", show_default="llmx", **_HOW),
    ] = None,
    backend_venv: Annotated[
        Path | None,
        typer.Option("--backend-venv", metavar="DIR", help="An environment that has it.", **_HOW),
    ] = None,
    create_backend_venv: Annotated[
        bool, typer.Option("--create-backend-venv", help="Make that environment, with pinned versions.", **_HOW)
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A layer that falls back is an error.", **_HOW)] = False,
    calib: Annotated[
        str | None,
        typer.Option(
            help="Text, .jsonl or .parquet, here or as hf:ORG/NAME/FILE.",
            show_default="text that the model draws itself",
            **_CALIBRATION,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts.", **_CALIBRATION)] = 64,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens in each.", **_CALIBRATION)] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of drawn text.", **_CALIBRATION)] = 0,
    states: Annotated[
        str,
        typer.Option(
            help="Where its hidden states are kept: ram, disk (a file beside the result, until it is done) or auto "
            "(disk where they would take over a quarter of the free memory).",
            **_CALIBRATION,
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say sizes, memory and time only.", **_OUTPUT)] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was cut off.", **_OUTPUT)] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.", **_OUTPUT)] = False,
    measure: Annotated[
        bool, typer.Option("--eval", help="Then compare with MODEL: perplexity, KL divergence.", **_OUTPUT)
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout.", **_OUTPUT)
    ] = None,
    threads: o.Threads = None,
) -> None:
    """Quantize a model: --awq, --gptq, --fp8 or --int8. The folder's path is printed at the end."""
    started = datetime.now(UTC)
    from llmx.quantize.options import check_own, choose, parse_group
    from llmx.quantize.room import check_place

    chosen = [name for name, on in (("awq", awq), ("gptq", gptq), ("fp8", fp8), ("int8", int8)) if on]
    if len(chosen) != 1:
        raise UsageError("Give one of --awq, --gptq, --fp8 and --int8.")
    group = parse_group(group_size)
    check_own(chosen[0], {"--group-size": group, "--sym/--asym": sym, "--fp8-mode": fp8_mode, "--damp": damp,
                          "--act-order/--no-act-order": act_order})  # fmt: skip
    options = choose(
        chosen[0], form=form, bits=bits, symmetric=sym, fp8_mode=fp8_mode or "dynamic",
        damp=0.01 if damp is None else damp, act_order=act_order is not False, ignore=ignore, strict=strict,
        head=quantize_lm_head,
    )  # fmt: skip
    if calib is not None and not options.calibrates:
        raise UsageError(
            f"--calib {calib}: --fp8-mode {options.fp8_mode} is made without text.", hint="--fp8-mode static uses it"
        )
    check_place(states)
    if backend is None and (backend_venv is not None or create_backend_venv):
        raise UsageError("--backend-venv and --create-backend-venv are of --backend, which is not given.")
    o.writable(None if json == Path("-") else json)
    other = None
    if backend is not None:
        from llmx.quantize.backends import Backend, check

        other = Backend(backend, backend_venv, create_backend_venv)
        check(other, options, model)
    ready(model)
    known = identity(model)
    from llmx.device import use_threads, yield_while_waiting

    yield_while_waiting()
    from llmx.formats import identity as weights
    from llmx.formats.hub import locate
    from llmx.quantize.run import DEFINITIONS, Wanted, lines
    from llmx.quantize.run import quantize as run
    from llmx.report import Report

    use_threads(threads, 1)
    wanted = Wanted(
        options, group, output, calib, samples, seq_len, seed, resume, force, dry_run, measure, other,
        states,
    )  # fmt: skip
    with ticker() as say:
        made = run(model, locate(model), wanted, say)
    report = Report(
        "quantize", made.results, model={"name": model, **known}, definitions=DEFINITIONS | weights.DEFINITIONS,
        seeds={"text": seed}, started=started,
    )  # fmt: skip
    if json is not None and json != Path("-"):
        report.write_json(json)
    for line in lines(made):
        typer.echo(line, err=not dry_run or json == Path("-"))
    if json == Path("-"):
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    elif not dry_run:
        typer.echo(str(made.path))
