"""An evaluation's findings for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmx.evals.figures import SPREAD

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llmx.config import EngineInfo

SHOWN = tuple(name for name in SPREAD if name not in ("p10", "p25", "p75"))


def show(console: Console, results: Mapping[str, Any], info: EngineInfo | None) -> None:
    """What was run on which text, the figures, the tasks, the gates."""
    if info is not None:
        console.out(f"{info.model}: {_kind(info.parameters, info.schemes, info.dtype, info.device)}", highlight=False)
    if (reference := results.get("reference")) is not None:
        kind = _kind(*(reference[name] for name in ("parameters", "schemes", "dtype", "device")))
        console.out(f"reference {reference['model']}: {kind}", highlight=False)
    for line in text_lines(results):
        console.out(line, highlight=False)
    if "perplexity" in results:
        console.print(_figures(results))
    if "tasks" in results:
        console.print(_tasks(results["tasks"]))
    for gate in results.get("gates", ()):
        console.out(f"{'FAILED' if gate['failed'] else 'passed'}: {gate['says']}", highlight=False)
    if results["interrupted"]:
        console.out("Interrupted: these are the figures up to there.", highlight=False)


def _kind(parameters: int, schemes: Any, dtype: str, device: str) -> str:
    return f"{parameters / 1e6:,.1f} M parameters, {'+'.join(schemes)}; computed in {dtype} on {device}"


def text_lines(results: Mapping[str, Any]) -> list[str]:
    """Where the text is from, how it was cut, how much of it was scored."""
    text = results.get("text")
    if text is None:
        return []
    seed = f", seed {text['seed']}" if "seed" in text else ""
    lines = [f"text: {text['source']}: {text['name']}{seed}; {text['tokens']:,} tokens, sha256 {text['sha256'][:16]}…"]
    bos = "no BOS put in" if text["bos"] is None else f"BOS {text['bos']} first in each"
    if text["protocol"] == "hf":
        bos = "as they are"
    lines.append(
        f"protocol {text['protocol']}: {text['windows']} of {text['windows_asked']} windows of {text['ctx']} tokens, "
        f"{bos}; {text['scored']:,} positions scored"
    )
    if text.get("tokenised_alike") is False:
        lines.append("Note: the two models' tokenizers read the text differently; the reference's tokens were scored.")
    return lines


def _figures(results: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("figure", "value", "±"):
        table.add_column(name, justify="left" if name == "figure" else "right")

    def row(name: str, value: float | None, error: float | None = None, unit: float = 1, digits: int = 4) -> None:
        end = " %" if unit == 100 else ""
        table.add_row(name, _number(value, unit, digits) + end, "" if error is None else _number(error, unit, digits))

    row("perplexity", results["perplexity"]["mean"], results["perplexity"]["se"])
    row("mean -ln p", results["nll"]["mean"], results["nll"]["se"])
    if "kld" not in results:
        return table
    row("reference perplexity", results["reference_perplexity"]["mean"], results["reference_perplexity"]["se"])
    row("perplexity / reference", results["ppl_ratio"]["mean"], results["ppl_ratio"]["se"], digits=5)
    row("ln(perplexity / reference)", results["ln_ppl_ratio"]["mean"], results["ln_ppl_ratio"]["se"], digits=5)
    table.add_section()
    row("KL divergence, mean", results["kld"]["mean"], results["kld"]["se"], digits=6)
    for name in SHOWN:
        row(f"KL divergence, {name}", results["kld"][name], digits=6)
    table.add_section()
    row("same likeliest token", results["same_top"]["share"], results["same_top"]["se"], 100, 3)
    row("Δp, mean", results["delta_p"]["mean"], results["delta_p"]["se"], 100, 3)
    row("Δp, rms", results["delta_p"]["rms"], results["delta_p"]["rms_se"], 100, 3)
    for name in SHOWN:
        row(f"Δp, {name}", results["delta_p"][name], None, 100, 3)
    return table


def _number(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{round(value * unit, digits) + 0.0:,.{digits}f}"  # never "-0"


def _tasks(tasks: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("task", "metric", "value", "±"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for task, metrics in tasks.items():
        for metric, value in metrics.items():
            if isinstance(value, Mapping):
                error = value.get("se")
                table.add_row(task, metric, _number(value["mean"], 1, 4), "" if error is None else f"{error:.4f}")
    return table
