"""`llmx compare`: what changed from one report to another, and whether it got worse."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmx.commands import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from llmx.bench.compare import Change

WIDTH = 120  # of the table where there is no terminal
EVEN = 0.005  # a change smaller than this is shown as none


def compare(
    old: Annotated[Path, typer.Argument(metavar="A.json", help="The earlier report.")],
    new: Annotated[Path, typer.Argument(metavar="B.json", help="The later one, of the same command.")],
    fail_on: Annotated[
        str | None, typer.Option(help="Exit 3 if a figure is worse by more than this share, such as 5%.")
    ] = None,
    json: o.Json = None,
) -> None:
    """Compare two reports of `llmx bench` or of `llmx eval`, figure by figure."""
    from rich.console import Console

    from llmx.bench.compare import (
        changes,
        check_comparable,
        differences,
        enforce,
        parse_bound,
        read_report,
        regressions,
    )
    from llmx.errors import UsageError

    bound = None if fail_on is None else parse_bound(fail_on, "--fail-on")
    reports = [read_report(path) for path in (old, new)]
    check_comparable(*reports)
    found = changes(reports[0]["results"], reports[1]["results"])
    if not found:
        raise UsageError(f"{old} and {new} have no figure in common.")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(found))
    differs = differences(*reports)
    for line in differs:
        console.out(f"differs: {line}", highlight=False)
    worse = [] if bound is None else regressions(found, bound)
    if json is not None:
        _write(json, (old, new), found, differs, bound, worse)
    enforce(worse)


def _table(found: Sequence[Change]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("figure", "better", "A", "B", "change", ""):
        table.add_column(name, justify="left" if name in ("figure", "better", "") else "right")
    for change in found:
        better = "higher" if change.higher_is_better else "lower"
        before, after = _value(change.old, change.sd[0]), _value(change.new, change.sd[1])
        by = f"{100 * change.relative:+.1f} %" if math.isfinite(change.relative) else "from 0"
        table.add_row(change.path, better, before, after, by, _verdict(change))
    return table


def _value(value: float, sd: float | None) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
    return shown if sd is None else f"{shown} ± {sd:.2g}"


def _verdict(change: Change) -> str:
    if abs(change.worse) < EVEN:
        return ""
    return "worse" if change.worse > 0 else "better"


def _write(
    path: Path, reports: tuple[Path, Path], found: Sequence[Change], differs: list[str], bound: float | None,
    worse: list[str],
) -> None:  # fmt: skip
    from llmx.report import Report

    figures: dict[str, Any] = {
        change.path: {"old": change.old, "new": change.new, "change": change.relative, "better": "higher"
                      if change.higher_is_better else "lower"}
        for change in found
    }  # fmt: skip
    results = {"old": str(reports[0]), "new": str(reports[1]), "bound": bound, "worse": worse}
    Report("compare", results | {"figures": figures, "differences": differs}).write_json(path)
    typer.echo(path)
