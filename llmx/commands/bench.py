"""`llmx bench`: prefill and decode rates, and latencies under load, here or at a URL; a table, a JSON report, gates."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmx.commands import options as o
from llmx.commands.bench_output import Outlet
from llmx.commands.ready import identity, progress, ready, ticker
from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.bench.findings import Findings
    from llmx.bench.plan import Load, Plan

CLOSED = 8  # requests at once where nothing else is said
KEYS = ("LLMX_API_KEY", "OPENAI_API_KEY")
BATCHINGS = {"continuous": ("continuous",), "static": ("static",), "both": ("continuous", "static")}
_WORK = {"rich_help_panel": "What is measured"}
_LOAD = {"rich_help_panel": "The requests"}
_URL = {"rich_help_panel": "Against a server"}
_OUT = {"rich_help_panel": "Output and gates"}


def bench(
    model: o.Model = None,
    prompt_len: Annotated[
        int, typer.Option("-p", "--n-prompt", min=0, help="Tokens of the prefill test; 0: none.", **_WORK)
    ] = 512,
    gen_len: Annotated[
        int, typer.Option("-n", "--n-gen", min=0, help="Tokens of the decode test; 0: none.", **_WORK)
    ] = 128,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Runs of both tests.", **_WORK)] = 5,
    batching: Annotated[
        str, typer.Option(help="continuous; static: a batch is served whole before the next; both.", **_WORK)
    ] = "continuous",
    static_batch: Annotated[int, typer.Option(min=1, help="Most requests in a static batch.", **_WORK)] = 32,
    baseline: Annotated[
        str | None, typer.Option(help="transformers: static batches of its generate beside ours.", **_WORK)
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of the requests: mean ± sd.", **_WORK)] = 1,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            help="Requests at once; 1,4,16: one after the other. With --request-rate: most at once.",
            show_default="8; none with --request-rate",
            **_LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Requests a second, sent whether or not others have ended; inf: all at once.", **_LOAD),
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="poisson, gamma or constant gaps.", show_default="poisson", **_LOAD)
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of gamma gaps: below 1 burstier than Poisson.", show_default="1", **_LOAD),
    ] = None,
    ramp_up: Annotated[
        str | None,
        typer.Option(
            metavar="HOW:FROM:TO", help="Instead of --request-rate: linear:1:10, exponential:1:10 a second.", **_LOAD
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "--num-prompts", min=0, help="Requests in all; 0: none.", **_LOAD)
    ] = 32,
    dataset: Annotated[
        str,
        typer.Option(
            help='random, prefix-repetition, or a file, also hf:ORG/NAME/FILE of the hub: rows of {"prompt", '
            '"output_tokens"}, {"messages"}, Spec-Bench\'s questions or ShareGPT\'s talks, as JSON or Parquet.',
            **_LOAD,
        ),
    ] = "random",
    input_len: Annotated[
        str,
        typer.Option(
            help="Random prompts' tokens: a length, a range, or lognormal:MEDIAN:SIGMA:MOST (log-normal, as traces of "
            "real use are).",
            **_LOAD,
        ),
    ] = "32:512",
    output_len: Annotated[
        str, typer.Option(help="Outputs' tokens, the same way; of a file: at most the last.", **_LOAD)
    ] = "16:256",
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens that prompts share.", **_LOAD)] = 256,
    suffix_len: Annotated[int, typer.Option(min=1, help="Tokens that are each prompt's own.", **_LOAD)] = 256,
    num_prefixes: Annotated[int, typer.Option(min=1, help="Different beginnings.", **_LOAD)] = 10,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos/--no-ignore-eos", show_default="not of a file", help="Outputs go on.", **_LOAD),
    ] = None,
    warmups: Annotated[
        int | None,
        typer.Option(
            "--warmups",
            "--num-warmups",
            min=0,
            help="Requests before, of other prompts.",
            show_default="one for each at once; of a URL twice that, at least 8",
            **_LOAD,
        ),
    ] = None,
    warm_prefix: Annotated[
        bool, typer.Option("--warm-prefix", help="Prompts may be in the prefix cache from before.", **_LOAD)
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and arrivals.", **_LOAD)] = 0,
    url: Annotated[
        str | None, typer.Option(help="Measure the server there; MODEL is the name that it serves.", **_URL)
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="completions or chat.", show_default="chat for a dataset of chats", **_URL),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Counts the answers' tokens again, and alone where the server tells no number of them.",
            show_default="the served model, where it is here",
            **_URL,
        ),
    ] = None,
    client_procs: Annotated[int, typer.Option(min=1, help="Processes that send.", **_URL)] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds without a byte.", **_URL)] = 600,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms: ttft:500,tpot:50,e2el:9000, or mlperf:llama3.1-8b-interactive.", **_OUT),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", show_default="./llmx-bench-MODEL-TIME.json", help="-: stdout.", **_OUT),
    ] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option(help="Exit 3 if a figure is so: 'ttft_ms.p99>500'; repeatable.", **_OUT)
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Exit 3 if worse than this earlier report.", **_OUT)] = None,
    max_regression: Annotated[str, typer.Option(help="How much worse is not worse.", **_OUT)] = "5%",
    label: Annotated[str | None, typer.Option(help="Goes into the report as it is.", **_OUT)] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="The same, under a key; repeatable.", **_OUT)
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="The report has each request's times and text.", **_OUT)
    ] = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    activations: o.Activations = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    block_size: o.BlockSize = 16,
    threads: o.Threads = None,
    tp: o.TensorParallel = 1,
) -> None:
    """Measure a model here, or a server at a URL: rates of one request, throughput and latencies of many.

    Tokens are counted as ids. The report's last line is the path of its JSON.
    """
    flags = dict(locals())
    started = datetime.now(UTC)
    plan = make_plan(flags)
    name, defaulted = o.choose_model(model) if url is None else (model, False)
    outlet = Outlet(flags, name or "server", defaulted, started, plan)
    found = _at_url(flags, plan) if url is not None else _here(flags, name or o.DEMO, plan)
    outlet.publish(found)


def make_plan(flags: Mapping[str, Any]) -> Plan:
    """The flags as a plan. UsageError for what can't be, before any work."""
    from llmx.bench.plan import Plan

    remote = flags["url"] is not None
    prompt_len, gen_len = (0, 0) if remote else (flags["prompt_len"], flags["gen_len"])
    load = _load(flags) if flags["requests"] else None
    if flags["tokenizer"] is not None and not remote:
        raise UsageError("--tokenizer goes with --url: tokens of a model here are counted as they are made.")
    if remote and load is None:
        raise UsageError("--requests 0 leaves nothing to measure at a URL.")
    return Plan(prompt_len, gen_len, flags["repetitions"], load, flags["seed"])


def _load(flags: Mapping[str, Any]) -> Load:
    from llmx.bench.arrivals import PROCESSES, parse_ramp, parse_rate
    from llmx.bench.datasets import open_dataset
    from llmx.bench.plan import SERVER, Load
    from llmx.bench.slo import parse_slo
    from llmx.bench.workload import parse_span

    rate = None if flags["request_rate"] is None else parse_rate(flags["request_rate"])
    ramp = None if flags["ramp_up"] is None else parse_ramp(flags["ramp_up"])
    if ramp is not None:
        if rate is not None:
            raise UsageError("--ramp-up and --request-rate are two rates.", "Leave one of the two out.")
        rate = math.inf
    arrivals, burstiness = flags["arrivals"], flags["burstiness"]
    _one_of("arrivals", arrivals or "poisson", PROCESSES)
    if rate is None and (arrivals is not None or burstiness is not None):
        raise UsageError("--arrivals and --burstiness go with --request-rate or --ramp-up.")
    if burstiness is not None and (not 0 < burstiness < math.inf or arrivals not in (None, "gamma")):
        raise UsageError(f"--burstiness {burstiness:g} must be above 0, and goes with --arrivals gamma.")
    if arrivals is None:
        arrivals = "poisson" if burstiness in (None, 1.0) else "gamma"
    contenders = (SERVER,) if flags["url"] is not None else _contenders(flags)
    with ticker() as say:
        dataset = open_dataset(
            flags["dataset"],
            flags["ignore_eos"],
            say,
            input_len=parse_span(flags["input_len"], "--input-len"),
            output_len=parse_span(flags["output_len"], "--output-len"),
            prefix_len=flags["prefix_len"],
            suffix_len=flags["suffix_len"],
            prefixes=flags["num_prefixes"],
        )
    return Load(
        dataset,
        flags["requests"],
        _points(flags, contenders, rate),
        rate,
        arrivals,
        1.0 if burstiness is None else burstiness,
        flags["repeat"],
        parse_slo(flags["slo"]),
        flags["warmups"],
        flags["warm_prefix"],
        flags["static_batch"],
        flags["client_procs"],
        ramp,
    )


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"--{flag} {value} is not known; there are {', '.join(known)}.")


def _contenders(flags: Mapping[str, Any]) -> tuple[str, ...]:
    from llmx.bench.plan import TRANSFORMERS

    _one_of("batching", flags["batching"], tuple(BATCHINGS))
    found = BATCHINGS[flags["batching"]]
    if flags["baseline"] is not None:
        import importlib.util

        _one_of("baseline", flags["baseline"], (TRANSFORMERS,))
        if importlib.util.find_spec(TRANSFORMERS) is None:
            raise UsageError(
                "--baseline transformers needs the package transformers, which is not installed.",
                "pip install transformers accelerate",
            )
        if not _exact(flags):
            raise UsageError("--baseline transformers needs outputs of given lengths.", "Add --ignore-eos.")
        found = (*found, TRANSFORMERS)
    return found


def _exact(flags: Mapping[str, Any]) -> bool:
    from llmx.bench.datasets import PREFIXES, RANDOM

    return bool(flags["dataset"] in (RANDOM, PREFIXES) if flags["ignore_eos"] is None else flags["ignore_eos"])


def _points(flags: Mapping[str, Any], contenders: tuple[str, ...], rate: float | None) -> tuple[Any, ...]:
    from llmx.bench.plan import Point

    text = flags["concurrency"]
    if text is None:
        return tuple(Point(contender, CLOSED if rate is None else None) for contender in contenders)
    if re.fullmatch(r"\s*[1-9]\d{0,5}\s*(,\s*[1-9]\d{0,5}\s*)*", text, re.ASCII) is None:
        raise UsageError(f"--concurrency must be a number of at least 1, or several like 1,4,16, not {text!r}.")
    sizes = list(dict.fromkeys(int(size) for size in text.split(",")))
    if len(sizes) > 1 and len(contenders) > 1:
        raise UsageError("Several --concurrency with several contenders are too many; give one of either.")
    return tuple(Point(contender, size) for size in sizes for contender in contenders)


def _here(flags: Mapping[str, Any], name: str, plan: Plan) -> Findings:
    """Load the model in this process and measure it."""
    if flags["baseline"] is not None and name.startswith("random:"):
        raise UsageError(f"transformers knows no {name}.", "Leave --baseline out, or name a model with weights.")
    names = ("dtype", "device", "kv_cache_dtype", "activations", "max_model_len", "max_num_seqs",
             "max_num_batched_tokens", "memory_utilization", "block_size", "threads", "tp", "seed")  # fmt: skip
    config = o.engine_config(name, **{key: flags[key] for key in names})
    ready(name)
    identified = identity(name)
    from llmx.bench.findings import Findings
    from llmx.bench.run import measure
    from llmx.llm import LLM

    with progress(f"loading {name}") as tell:
        llm = LLM(config=config, progress=tell)
    with llm:
        plan.check(llm.info.max_model_len)
        found = Findings(plan, llm.info, identity=identified)
        with ticker() as say:
            measure(llm, found, say)
    return found


def _at_url(flags: Mapping[str, Any], plan: Plan) -> Findings:
    from llmx.bench.against import fresh_nonce, measure_server
    from llmx.bench.findings import Findings
    from llmx.bench.recount import find
    from llmx.bench.remote import connect

    assert plan.load is not None, "made so"
    chat = plan.load.dataset.is_chat
    if flags["endpoint"] is not None:
        _one_of("endpoint", flags["endpoint"], ("completions", "chat"))
        chat = flags["endpoint"] == "chat"
    key = next((value for name in KEYS if (value := os.environ.get(name, "").strip())), None)
    find_tokenizer = partial(find, flags["tokenizer"])
    server, recount = connect(flags["url"], flags["model"], chat, key, flags["timeout"], find_tokenizer)
    found = Findings(plan, server=server, recount=recount)
    with ticker() as say:
        measure_server(server, found, fresh_nonce(), say)
    return found
