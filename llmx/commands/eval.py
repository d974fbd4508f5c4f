"""`llmx eval`: perplexity, distance to a reference model, tasks; a table, a JSON report, gates on its figures."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import identity, model_facts, ready, ticker
from llmx.errors import UsageError
from llmx.gates import enforce, judge, parse_gates, require

if TYPE_CHECKING:
    from llmx.config import EngineConfig
    from llmx.evals.run import Findings, Model
    from llmx.evals.text import Written
    from llmx.gates import Gate

INTERRUPTED = 130
_WORK = {"rich_help_panel": "What is measured"}
_OUTPUT = {"rich_help_panel": "Output"}


def eval(
    model: o.Model = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", "-r", metavar="MODEL", help="Compare with this model's probabilities.", **_WORK),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            "-f",
            help="UTF-8 text to score. Default: tokens that the reference (or else the model) draws itself.",
            **_WORK,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="hf:ORG/NAME/FILE",
            help="Text from a data set of the hub, or a file here: .parquet (needs pyarrow), .jsonl, .json or text.",
            **_WORK,
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help="llama.cpp: windows of 512, the second half scored, as llama-perplexity; hf: windows of 2048, all "
            "scored, as in the GPTQ and AWQ papers.",
            **_WORK,
        ),
    ] = "llama.cpp",
    window: Annotated[
        int | None, typer.Option("--ctx", help="Tokens in a window.", show_default="the protocol's", **_WORK)
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help="Most windows to score.", show_default="all; 8 of generated text", **_WORK),
    ] = None,
    logits: Annotated[
        Path | None,
        typer.Option(help="Compare with these logits (--save-logits, or llama-perplexity's), on their text.", **_WORK),
    ] = None,
    save_logits: Annotated[
        Path | None,
        typer.Option(help="Keep the reference's logits (without --reference: MODEL's) in this file.", **_WORK),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-eval, with commas between, run against `llmx serve` (needs llmx\\[eval]).", **_WORK
        ),
    ] = None,
    tasks_path: Annotated[
        Path | None, typer.Option(help="A folder with further task files of lm-eval.", **_WORK)
    ] = None,
    tasks_limit: Annotated[
        int | None, typer.Option(min=1, help="Most examples of each task.", show_default="all", **_WORK)
    ] = None,
    tasks_chat: Annotated[
        bool, typer.Option("--tasks-chat", help="Ask through the chat API; only for tasks that generate.", **_WORK)
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of generated text.", **_WORK)] = 0,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 3 if this holds, as 'kld.mean>0.05'; repeatable.", **_OUTPUT),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report there; -: stdout.", **_OUTPUT)
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    activations: o.Activations = "auto",
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    block_size: o.BlockSize = 16,
    threads: o.Threads = None,
    tp: o.TensorParallel = 1,
) -> None:
    """Measure how good a model is: perplexity and, against a reference, KL divergence; tasks with --tasks.

    With --tasks alone (no --text, --dataset, --reference or --logits) only the tasks are run.
    """
    from llmx.evals.run import Findings, make_plan

    started = datetime.now(UTC)
    gates = parse_gates(fail_if)
    if reference is not None and logits is not None:
        raise UsageError("--reference computes what --logits brings.", hint="Leave one of the two out.")
    if text is not None and dataset is not None:
        raise UsageError("--text and --dataset are two texts.", hint="Leave one of the two out.")
    o.writable(save_logits)
    o.writable(None if json == Path("-") else json)
    compares = reference is not None or logits is not None
    scores = tasks is None or compares or text is not None or dataset is not None or save_logits is not None
    name, defaulted = o.choose_model(model)
    config = o.engine_config(
        name,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
        block_size=block_size,
        threads=threads,
        tp=tp,
    )
    written = _written(text, dataset)
    plan = make_plan(protocol, window, chunks, seed, written, logits, save_logits, compares)
    found = Findings(plan)
    _check_names(gates, scores, compares, tasks)
    if tasks is not None:
        from llmx.evals.tasks import Wanted, run_tasks

        wanted = Wanted.parse(tasks, tasks_path, tasks_limit, tasks_chat)
    ready(name)
    found.identity = identity(name)
    if scores:
        _score(config, reference, found)
    if tasks is not None and not found.interrupted:
        with ticker() as say:
            found.tasks, found.interrupted = run_tasks(config, wanted, say)
    _publish(name, found, gates, defaulted, started, json)


def _written(text: Path | None, dataset: str | None) -> Written | None:
    from llmx.evals.dataset import fetch
    from llmx.evals.text import read_file

    if dataset is not None:
        with ticker() as say:
            return fetch(dataset, say)
    return None if text is None else read_file(text)


def _check_names(gates: tuple[Gate, ...], scores: bool, compares: bool, tasks: str | None) -> None:
    """Before a long run: figures that it can't have. Those of tasks are known only behind it."""
    from llmx.evals.figures import NAMES

    names = [f"text.{name}" for name in ("tokens", "ctx", "windows", "windows_asked", "scored", "bytes", "bos")]
    names += NAMES["perplexity"] if scores else ()
    if not compares and (alone := [g for g in gates if g.path in NAMES["distance"]]):
        raise UsageError(f"--fail-if {alone[0].text!r} needs a reference.", hint="add --reference or --logits")
    names += NAMES["distance"] if compares else ()
    if tasks is None:
        require(gates, names)


def _score(config: EngineConfig, reference: str | None, found: Findings) -> None:
    from llmx.evals.run import evaluate

    if reference is not None:
        ready(reference)
        found.reference_identity = identity(reference)
    # What is compared is the model and its arithmetic against exact products.
    other = None if reference is None else _model(replace(config, model=reference, activations="bf16"))
    with ticker() as say:
        evaluate(_model(config), other, found, say)


def _model(config: EngineConfig) -> Model:
    from llmx.evals.run import Model, open_tokenizer
    from llmx.formats.hub import locate

    located = None if config.model.startswith("random:") else locate(config.model)
    return Model(config, located, open_tokenizer(located))


def _publish(
    name: str, found: Findings, gates: tuple[Gate, ...], defaulted: bool, started: datetime, path: Path | None
) -> None:
    """The report, the verdicts on the gates in it; then what they say."""
    from rich.console import Console

    from llmx.evals.figures import DEFINITIONS
    from llmx.evals.table import show
    from llmx.formats import identity as weights
    from llmx.report import Report

    results = found.results()
    verdicts = [] if found.interrupted else judge(gates, results)
    if gates:
        results["gates"] = [asdict(verdict) for verdict in verdicts]
    report = Report(
        "eval",
        results,
        model={"name": name, **found.identity} if found.info is None else model_facts(found.info, found.identity),
        model_defaulted=defaulted,
        definitions=DEFINITIONS | weights.DEFINITIONS,
        kernels={} if found.info is None else dict(found.info.kernels),
        seeds={"text": found.plan.seed},
        started=started,
    )
    if path == Path("-"):
        typer.echo(jsonlib.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        show(Console(), results, found.info)
    if path is not None and path != Path("-"):
        report.write_json(path)
        typer.echo(path)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    enforce(verdicts)
