"""A bench's findings for people: tables of rates and latencies, and lines that say what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmx.bench.ceilings import Limit
from llmx.bench.datasets import PREFIXES
from llmx.bench.findings import WARM, Findings
from llmx.bench.recount import APART
from llmx.bench.sse import RETOKENIZED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def show(console: Console, found: Findings) -> None:
    """Print the tables of the parts that have figures, then what bounds them."""
    results = found.results()
    console.out(_title(found), highlight=False)
    if found.plan.prompt_len or found.plan.gen_len:
        console.print(_rates(found, results))
    lines = []
    if "serving" in results:
        figures = results["serving"]
        for group, key in (("sweep", "at once"), ("contenders", "served by")):
            if group in results:
                console.print(_points(key, results, group))
        console.print(_serving(figures))
        lines += serving_lines(figures) + comparison_lines(results)
        most = figures["max_concurrency"]
        if found.info is not None and most is not None and most > found.info.max_num_seqs:
            lines.append(
                f"Note: the engine runs {found.info.max_num_seqs} sequences at once (--max-num-seqs); the rest waited."
            )
    lines += [bound_line(part, limit) for part, limit in found.limits().items()]
    if found.server is not None and "serving" in results:
        lines.append(server_bound(results["serving"]))
    if found.interrupted:
        lines.append("Interrupted: these are the figures up to there.")
    for line in lines:
        console.out(line, highlight=False)


def _title(found: Findings) -> str:
    if found.info is None:
        assert found.server is not None
        return f"{found.server.model} at {found.server.root}{found.server.path}"
    info = found.info
    kind = f"{info.parameters / 1e6:,.1f} M parameters, {'+'.join(info.schemes)}"
    where = info.device + (f", {info.threads} threads" if info.device == "cpu" else "")
    return f"{info.model}: {info.architecture}, {kind}; computed in {info.dtype} on {where}"


def _points(key: str, results: Mapping[str, Any], group: str) -> Table:
    """A row for each point of a sweep, or for each contender."""
    from rich.table import Table

    table = Table()
    main = results["serving"]
    first = {main["contender"]: main} if group == "contenders" else {}
    rows = first | results[group] | ({f"c{main['max_concurrency']}": main} if group == "sweep" else {})
    for name in (key, "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99 ms", "busy %"):
        table.add_column(name, justify="right")
    for name, figures in rows.items():
        latencies = (number(figures[f"p{q}_{part}_ms"], 1) for part in ("ttft", "tpot", "e2el") for q in (50, 99))
        busy = figures.get("busy_share")
        shown = number(None if busy is None else 100 * busy, 1)
        table.add_row(name.removeprefix("c") if group == "sweep" else name, number(figures["output_throughput"], 1),
            *latencies, shown)  # fmt: skip
    return table


def number(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"


def _rates(found: Findings, results: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("test", "tokens/s", "sd", "runs"):
        table.add_column(name, justify="left" if name == "test" else "right")
    for part, label in (("prefill", f"pp{found.plan.prompt_len}"), ("decode", f"tg{found.plan.gen_len}")):
        if part in results:
            rate = results[part]["tokens_per_second"]
            table.add_row(f"{part} {label}", number(rate["mean"]), number(rate["sd"]), str(len(rate["samples"])))
    return table


def _serving(figures: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        table.add_row(label, *(number(figures[f"{q}_{key}_ms"], 1) for q in ("mean", "p50", "p90", "p95", "p99")))
    return table


def serving_lines(figures: Mapping[str, Any]) -> list[str]:
    """What was run, throughput, and what the counters say."""
    output, total = number(figures["output_throughput"], 1), number(figures["total_token_throughput"], 1)
    rate = f"{output} output tokens/s ({total} with prompts), {number(figures['request_throughput'])} requests/s"
    if "sd" in figures:
        deviation, runs = figures["sd"].get("output_throughput"), len(figures["repeats"])
        rate += f"; ± {number(deviation, 1)} output tokens/s over {runs} runs"
    lines = [_what(figures), rate]
    shares = {
        "KV slots in use": figures.get("kv_utilisation"),
        "KV cache in use": (figures.get("kv_cache_usage") or {}).get("mean"),
        "prompt tokens cached": figures.get("cache_hit_rate"),
        "engine busy": figures.get("busy_share"),
        "kept the objectives": (figures.get("slo") or {}).get("attainment"),
    }
    parts = [f"{name} {number(100 * value, 1)} %" for name, value in shares.items() if value is not None]
    if figures.get("preemptions") is not None:
        parts.append(f"preemptions {number(figures['preemptions'], 0)}")
    if figures.get("peak_memory_bytes"):
        parts.append(f"peak memory {figures['peak_memory_bytes'] / 2**20:,.0f} MiB")
    if parts:
        lines.append(", ".join(parts))
    return lines + _notes(figures)


def _what(figures: Mapping[str, Any]) -> str:
    most = figures["max_concurrency"]
    if figures["loop"] == "closed":
        pace = f"{most} at once"
    elif "ramp_up_strategy" in figures:
        pace = f"{_ramp(figures)} due a second"
    elif figures["request_rate"] == "inf":
        pace = "all due at the start"
    else:
        pace = f"{number(figures['request_rate'])} due a second ({figures['arrivals']})"
    if figures["loop"] == "open" and most is not None:
        pace += f", at most {most} at once"
    prompts = figures["dataset"] if "input_len" not in figures else f"prompts of {figures['input_len']}"
    outputs = (
        f"outputs of {figures['output_len']} tokens" if figures["ignore_eos"] else "outputs as the model ends them"
    )
    return f"{number(figures['completed'], 0)} of {figures['num_prompts']} requests, {pace}, {prompts} and {outputs}"


def _ramp(figures: Mapping[str, Any]) -> str:
    return f"{figures['ramp_up_start_rps']:g} to {figures['ramp_up_end_rps']:g} ({figures['ramp_up_strategy']})"


def _notes(figures: Mapping[str, Any]) -> list[str]:
    """What makes the figures other than they seem."""
    lines = []
    if figures["failed"]:
        lines.append(f"{number(figures['failed'], 0)} requests failed: {'; '.join(figures['errors'])}")
    if (figures.get("cache_hit_rate") or 0.0) >= WARM and figures["dataset"] != PREFIXES:
        lines.append("Note: part of the prompts came from the prefix cache, so TTFT is not that of new prompts.")
    if figures.get("token_count_mismatch"):
        lines.append("Note: of some answers the server's usage and its token ids tell different numbers of tokens.")
    if (source := figures["token_source"]) == RETOKENIZED:
        lines.append("Note: the server tells no number of tokens; these are its texts, tokenized here.")
    elif abs(figures.get("retokenized_difference") or 0.0) > APART:
        difference = 100 * figures["retokenized_difference"]
        more = "more" if difference > 0 else "fewer"
        lines.append(
            f"Note: its texts, tokenized here, are {abs(difference):.1f} % {more} tokens than its {source} tell."
        )
    if figures["ignore_eos"] and figures["osl_mismatch"]:
        lines.append(f"Note: {number(figures['osl_mismatch'], 0)} outputs have another length than was asked for.")
    client = figures["client"]
    if client["client_bound"]:
        late = {"its loop": client["loop_lag_ms_p99"], "sending": client["dispatch_delay_ms_p99"]}
        shown = ", ".join(f"{what} {number(ms)} ms" for what, ms in late.items() if ms is not None)
        lines.append(f"Note: this client was late itself (p99: {shown}), so the figures are partly its own.")
    if figures.get("unsteady"):
        lines.append(f"Note: over 5 % apart from run to run: {', '.join(figures['unsteady'])}.")
    return lines


def comparison_lines(results: Mapping[str, Any]) -> list[str]:
    """The first contender against each other one."""
    lines, ours = [], results["serving"]["contender"]
    for name, one in results.get("comparison", {}).items():
        tail, ratio = one["p99_e2el_lower_by"], one["output_throughput_ratio"]
        if tail is not None and ratio is not None:
            lines.append(
                f"{ours} against {name}: p99 E2E {abs(100 * tail):.1f} % {'lower' if tail >= 0 else 'higher'}, "
                f"{ratio:.2f} times the output tokens/s (median of {one['rounds']} rounds)"
            )
    return lines


def server_bound(figures: Mapping[str, Any]) -> str:
    """What holds a served figure down, as far as one can tell from outside."""
    if figures["client"]["client_bound"]:
        return "bounded by: this client, which was late; try --client-procs, or another machine."
    rate, reached, busy = figures["request_rate"], figures["request_throughput"], figures.get("busy_share")
    said = "" if busy is None else f"; its engine was busy {100 * busy:.1f} % of the time"
    if figures["loop"] == "open" and rate != "inf" and reached and reached >= 0.9 * rate:
        return f"bounded by: the arrivals; the server kept up with {rate:g} requests a second{said}."
    if figures["loop"] == "closed":
        return f"bounded by: the server at {figures['max_concurrency']} requests at once{said}."
    if "ramp_up_strategy" in figures:
        return f"bounded by: the arrivals or the server; the rate went from {_ramp(figures)} requests a second{said}."
    return f"bounded by: the server, which took fewer requests than were due{said}."


def scaled(value: float, unit: str) -> str:
    """Three digits and a prefix: 1.9e8, "B" -> 190 MB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e3:.3g} k{unit}"


def bound_line(part: str, limit: Limit) -> str:
    """What would be possible at the rates measured in this process, and how much of it was reached."""
    if limit.by == "memory reads":
        rate = scaled(limit.weight_bytes / limit.reads, "B/s")
        per = "in all its steps" if part == "serving" else "a token" if limit.tokens == 1 else "a pass"
        what = f"reads {scaled(limit.weight_bytes, 'B')} of weights {per}"
    else:
        rate = scaled(limit.flops / limit.computes, "FLOP/s")
        per = "an output token, prompts included" if part == "serving" else "a token"
        what = f"computes {scaled(limit.flops / limit.tokens, 'FLOP')} {per}"
    share = limit.reached / limit.tokens_per_second
    verdict = f"{limit.by} bound it"
    if share < 0.5:
        verdict = "the rest is attention, sampling and dispatch"
    elif share > 1.05:
        verdict = "more than all: much of the weights stays in the processor's caches"
        if limit.by == "arithmetic":
            verdict = "more than all: the ceiling is a float matrix product's; products of 8-bit numbers can be faster"
    return (
        f"{part} {what}: {rate}, measured here, allow {limit.tokens_per_second:,.1f} tokens/s; "
        f"{100 * share:.1f} % reached: {verdict}."
    )
