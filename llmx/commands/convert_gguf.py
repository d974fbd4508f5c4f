"""`llmx convert-gguf`: a model as one GGUF file, of any type, in one step."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmx.commands import options as o
from llmx.commands.ready import identity, progress, ready, ticker
from llmx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmx.convert.arrays import Numbers
    from llmx.formats.hub import Located

_TYPES = {"rich_help_panel": "Types"}
_IMPORTANCE = {"rich_help_panel": "Importance"}
_OUTPUT = {"rich_help_panel": "Output"}


def convert_gguf(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, or a .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new file.", show_default="./NAME-TYPE.gguf", **_OUTPUT)
    ] = None,
    type_: Annotated[
        str,
        typer.Option(
            "--type", metavar="TYPE",
            help="q4_k_m, q4_k_s, q5_k_m, q5_k_s, q6_k, q3_k_s, q3_k_m, q3_k_l, q2_k, q8_0, q4_0, q4_1, q5_0, q5_1, "
            "iq4_nl, iq4_xs, f16, bf16, f32; copy: as it is.", **_TYPES,
        ),
    ] = "q4_k_m",
    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", metavar="REGEX=TYPE", help="For tensors in whose name it is found.", **_TYPES),
    ] = None,
    output_type: Annotated[
        str | None, typer.Option("--output-type", metavar="TYPE", help="Of output.weight.", **_TYPES)
    ] = None,
    embedding_type: Annotated[
        str | None, typer.Option("--embedding-type", metavar="TYPE", help="Of token_embd.weight.", **_TYPES)
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="No mixture: one type for all.", **_TYPES)] = False,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Rows that are no whole blocks of a type are an error.", **_TYPES)
    ] = False,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="As llama-imatrix writes it.", **_IMPORTANCE)
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option(help="Text to collect it with: a file here, or hf:ORG/NAME/FILE.", **_IMPORTANCE),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts of --calib.", **_IMPORTANCE)] = 64,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens in each.", **_IMPORTANCE)] = 512,
    save_imatrix: Annotated[
        Path | None, typer.Option("--save-imatrix", metavar="FILE", help="Keep what --calib gave.", **_IMPORTANCE)
    ] = None,
    pretokenizer: Annotated[
        str | None,
        typer.Option("--pretokenizer", metavar="NAME", help="tokenizer.ggml.pre, where it isn't found.", **_OUTPUT),
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option("--split-max-size", metavar="SIZE", help="Of the tensors in one file: 2G, 500M.", **_OUTPUT),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say types and sizes only.", **_OUTPUT)] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.", **_OUTPUT)] = False,
    measure: Annotated[
        bool, typer.Option("--eval", help="Then compare with MODEL: perplexity, KL divergence.", **_OUTPUT)
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout.", **_OUTPUT)
    ] = None,
    threads: o.Threads = None,
) -> None:  # fmt: skip
    """Write a model as a GGUF file, as llama.cpp's converter and quantiser do. The paths are printed at the end."""
    started = datetime.now(UTC)
    from llmx.convert.gguf_types import MIXTURES, Asked, parse_override, parse_type
    from llmx.formats.gguf_write import parse_size

    mixture = type_.lower()
    if mixture != "copy" and mixture not in MIXTURES:
        raise UsageError(f"--type {type_[:40]} is not known; there are {', '.join(MIXTURES)} and copy.")
    if imatrix and calib:
        raise UsageError("--imatrix and --calib both say what is important; give one.")
    if save_imatrix and not calib:
        raise UsageError("--save-imatrix keeps what --calib collects, which is not given.")
    asked = Asked(
        mixture, pure=pure, fallback=not no_fallback, importance=bool(imatrix or calib),
        overrides=[parse_override(text) for text in tensor_type or ()],
        output=None if output_type is None else parse_type(output_type, "--output-type"),
        embedding=None if embedding_type is None else parse_type(embedding_type, "--embedding-type"),
    )  # fmt: skip
    if mixture == "copy" and (asked.overrides or asked.output or asked.embedding or pure or asked.importance):
        raise UsageError("--type copy changes no type, so the other options about types don't go with it.")
    most = None if split_max_size is None else parse_size(split_max_size)
    o.writable(None if json == Path("-") else json)
    if save_imatrix is not None and o.writable(save_imatrix) and save_imatrix.exists() and not force:
        raise UsageError(f"{save_imatrix} is there already.", hint="choose another name, or replace it with --force")
    ready(model)
    known = {} if json is None else identity(model)  # reads files whole that weren't hashed before
    from llmx.convert.folder import short_name
    from llmx.convert.gguf_run import DEFINITIONS, Wanted, check, convert, lines
    from llmx.device import chosen_threads, use_threads, yield_while_waiting
    from llmx.formats import identity as weights
    from llmx.formats.hub import locate
    from llmx.formats.hub_data import is_hub_name
    from llmx.report import Report

    yield_while_waiting()
    count = chosen_threads(threads)
    located = locate(model)
    path = output or Path(f"{short_name(located)}-{mixture}.gguf")
    wanted = Wanted(asked, path, most, pretokenizer, imatrix, force=force, dry_run=dry_run, threads=count)
    if (calib or measure) and not dry_run:
        use_threads(count)
    if calib and dry_run:
        if not is_hub_name(calib):  # nothing is fetched for a dry run
            _read(located, calib, samples, seq_len)
    elif calib:
        check(located, wanted)
        texts = _read(located, calib, samples, seq_len)
        importance, about = _collect(located, texts, calib, seq_len, save_imatrix)
        wanted = replace(wanted, importance=importance, collected=about)
    with progress(f"writing {path.name}") as tell:  # imports torch only for what has to be unpacked
        results = convert(located, wanted, tell, lambda line: typer.echo(line, err=True))
    if measure and not dry_run:
        results["eval"] = _measure(model, results["paths"][0])
    if json is not None:
        report = Report(
            "convert-gguf", results, model={"name": model, **known}, definitions=DEFINITIONS | weights.DEFINITIONS,
            started=started,
        )  # fmt: skip
        if json == Path("-"):
            typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        else:
            report.write_json(json)
    for line in lines(results, every=dry_run):
        typer.echo(line, err=not dry_run or json == Path("-"))
    if not dry_run and json != Path("-"):
        for written in results["paths"]:
            typer.echo(written)


def _read(located: Located, calib: str, samples: int, length: int) -> Sequence[Sequence[int]]:
    """The texts of --calib as the model's tokens. UsageError where there are none."""
    from llmx.quantize.calibration import read

    with ticker() as say:
        return read(calib, located, samples, length, say).texts


def _collect(
    located: Located, texts: Sequence[Sequence[int]], calib: str, length: int, keep: Path | None
) -> tuple[dict[str, Numbers], dict[str, Any]]:
    """Importance from texts, read by the model itself, and what is said of it."""
    from llmx.convert.gguf_collect import as_importance, collect
    from llmx.convert.gguf_importance import chunks_of, write_importance

    with ticker() as say:
        sums = collect(located, texts, say)
    if keep is not None:
        write_importance(keep, sums, length, calib)
    return as_importance(sums), {"dataset": calib, "chunks_count": chunks_of(sums, length)}


def _measure(model: str, path: str) -> dict[str, Any]:
    """The file beside what it was made from."""
    from llmx.formats.hub import locate
    from llmx.models import open_model
    from llmx.quantize.run import measure

    with ticker() as say:
        return measure(model, Path(path), 0, open_model(locate(path)).config.max_position, say)
