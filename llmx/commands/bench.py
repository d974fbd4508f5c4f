"""`llmx bench`: prefill and decode rates, and latencies at a concurrency; a table, and a JSON report."""

from __future__ import annotations

import json as jsonlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import model_facts, progress, ready, ticker
from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.bench.run import Findings

INTERRUPTED = 130
_WORK = {"rich_help_panel": "What is measured"}


def bench(
    model: o.Model = None,
    prompt_len: Annotated[
        int, typer.Option("-p", "--n-prompt", min=0, help="Tokens of the prefill test; 0: none.", **_WORK)
    ] = 512,
    gen_len: Annotated[
        int, typer.Option("-n", "--n-gen", min=0, help="Tokens of the decode test; 0: none.", **_WORK)
    ] = 128,
    repeat: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Runs of both tests.", **_WORK)] = 5,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "--max-concurrency", min=1, help="Requests at once.", **_WORK)
    ] = 8,
    requests: Annotated[
        int, typer.Option("--requests", "--num-prompts", min=0, help="Requests in all; 0: none.", **_WORK)
    ] = 32,
    input_len: Annotated[str, typer.Option(help="Their prompts' tokens: a length or a range.", **_WORK)] = "32:512",
    output_len: Annotated[str, typer.Option(help="Their outputs' tokens: a length or a range.", **_WORK)] = "16:256",
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts and lengths.", **_WORK)] = 0,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", show_default="./llmx-bench-MODEL-TIME.json", help="-: stdout."),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    block_size: o.BlockSize = 16,
    threads: o.Threads = None,
    tp: o.TensorParallel = 1,
) -> None:
    """Measure a model here: prefill and decode rates of one request, then throughput and latencies of many.

    Random prompts, end of text ignored, tokens counted as ids. The report's last line is the path of its JSON.
    """
    from llmx.bench.run import Findings, Plan, measure
    from llmx.bench.workload import parse_span

    started = datetime.now(UTC)
    spans = parse_span(input_len, "--input-len"), parse_span(output_len, "--output-len")
    plan = Plan(prompt_len, gen_len, repeat, concurrency, requests, *spans, seed)
    name, defaulted = o.choose_model(model)
    path = destination(json, name, started)
    config = o.engine_config(
        name,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
        block_size=block_size,
        threads=threads,
        tp=tp,
        seed=seed,
    )
    ready(name)
    from llmx.llm import LLM

    with progress(f"loading {name}") as tell:
        llm = LLM(config=config, progress=tell)
    with llm:
        plan.check(llm.info.max_model_len)
        found = Findings(plan, llm.info)
        with ticker() as say:
            measure(llm, found, say)
    publish(found, defaulted, started, path)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def destination(asked: Path | None, model: str, started: datetime) -> Path | None:
    """Where the JSON goes; None: stdout. UsageError before a long run, not after it."""
    if asked == Path("-"):
        return None
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name or "model")
    path = asked or Path(f"llmx-bench-{stem}-{started:%Y%m%dT%H%M%SZ}.json")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"The report can't be written to {path}.", hint="Give a path with --json, or - for stdout.")
    return path


def publish(found: Findings, defaulted: bool, started: datetime, path: Path | None) -> None:
    """The table and the path of the JSON to stdout; or with no path the JSON alone."""
    from rich.console import Console

    from llmx.bench.definitions import DEFINITIONS
    from llmx.bench.table import show
    from llmx.report import Report

    report = Report(
        "bench",
        found.results(),
        model=model_facts(found.info),
        model_defaulted=defaulted,
        definitions=DEFINITIONS,
        kernels=dict(found.info.kernels),
        seeds={"workload": found.plan.seed},
        started=started,
    )
    if path is None:
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    show(Console(), found)
    report.write_json(path)
    typer.echo(path)
