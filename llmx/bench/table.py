"""A bench's findings for people: tables of rates and latencies, and lines that say what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmx.bench.ceilings import Limit
from llmx.bench.run import Findings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def show(console: Console, found: Findings) -> None:
    """Print the tables of the parts that have figures, then what bounds them."""
    results, info = found.results(), found.info
    kind = f"{info.parameters / 1e6:,.1f} M parameters, {'+'.join(info.schemes)}"
    where = info.device + (f", {info.threads} threads" if info.device == "cpu" else "")
    console.out(f"{info.model}: {info.architecture}, {kind}; computed in {info.dtype} on {where}", highlight=False)
    if found.plan.prompt_len or found.plan.gen_len:
        console.print(_rates(found, results))
    lines = []
    if "serving" in results:
        console.print(_serving(results["serving"]))
        lines += serving_lines(results["serving"])
        if found.plan.concurrency > info.max_num_seqs:
            lines.append(
                f"Note: the engine runs {info.max_num_seqs} sequences at once (--max-num-seqs); the rest waited."
            )
    lines += [bound_line(part, limit) for part, limit in found.limits().items()]
    if found.interrupted:
        lines.append("Interrupted: these are the figures up to there.")
    for line in lines:
        console.out(line, highlight=False)


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
    """What was run, throughput, and what the engine's counters say."""
    done = f"{figures['completed']} of {figures['num_prompts']} requests, {figures['max_concurrency']} at once"
    lengths = f"prompts of {figures['input_len']} and outputs of {figures['output_len']} tokens"
    output, total = number(figures["output_throughput"], 1), number(figures["total_token_throughput"], 1)
    rate = f"{output} output tokens/s ({total} with prompts), {number(figures['request_throughput'])} requests/s"
    lines = [f"{done}, {lengths}", rate]
    if "kv_utilisation" in figures:
        shares = {
            "KV slots in use": figures["kv_utilisation"],
            "prompt tokens cached": figures["cached_token_share"],
            "engine busy": figures["busy_share"],
        }
        parts = [f"{name} {number(100 * value, 1)} %" for name, value in shares.items() if value is not None]
        lines.append(", ".join([*parts, f"preemptions {figures['preemptions']}"]))
    if figures["failed"]:
        lines.append(f"{figures['failed']} requests failed: {' '.join(figures['errors']) or 'wrong number of tokens'}")
    if (figures.get("cached_token_share") or 0.0) >= 0.01:
        lines.append("Note: part of the prompts came from the prefix cache, so TTFT is not that of new prompts.")
    return lines


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
        what = f"reads {scaled(limit.weight_bytes, 'B')} of weights a {'token' if limit.tokens == 1 else 'pass'}"
    else:
        rate = scaled(limit.flops / limit.computes, "FLOP/s")
        what = f"computes {scaled(limit.flops / limit.tokens, 'FLOP')} a token"
    share = limit.reached / limit.tokens_per_second
    verdict = f"{limit.by} bound it"
    if share < 0.5:
        verdict = "the rest is attention, sampling and dispatch"
    elif share > 1.05:
        verdict = "more than all: much of the weights stays in the processor's caches"
    return (
        f"{part} {what}: {rate}, measured here, allow {limit.tokens_per_second:,.1f} tokens/s; "
        f"{100 * share:.1f} % reached: {verdict}."
    )
