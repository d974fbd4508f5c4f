"""Where `llmx bench` puts its figures: a table, a JSON report under vLLM's keys too, and the gates on them."""

from __future__ import annotations

import json as jsonlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmx.commands.ready import model_facts
from llmx.errors import CheckFailed, UsageError
from llmx.gates import Gate, Verdict, judge, parse_gates, require

if TYPE_CHECKING:
    from llmx.bench.findings import Findings
    from llmx.bench.plan import Plan
    from llmx.report import Report

INTERRUPTED = 130
LONG_HINT = 400
WIDTH = 120  # of tables where there is no terminal


class Outlet:
    """Where the figures go, and what they are held against: all of it checked before the run."""

    def __init__(
        self, flags: Mapping[str, Any], name: str, defaulted: bool, started: datetime, plan: Plan
    ) -> None:  # fmt: skip
        from llmx.bench.compare import check_comparable, parse_bound, read_report
        from llmx.report import SCHEMA_VERSION

        self.defaulted, self.started = defaulted, started
        self.gates: tuple[Gate, ...] = parse_gates(flags["fail_if"])
        if self.gates:
            _require(self.gates, plan)
        self.bound = parse_bound(flags["max_regression"], "--max-regression")
        self.against: Path | None = flags["against"]
        self.old = None if self.against is None else read_report(self.against, "bench")
        if self.old is not None:
            check_comparable(self.old, {"command": "bench", "schema_version": SCHEMA_VERSION})
        self.path = destination(flags["json"], name, started)
        self.label, self.metadata = flags["label"], parse_metadata(flags["metadata"])
        self.is_detailed = bool(flags["save_detailed"])
        if self.is_detailed and plan.load is None:
            raise UsageError("--save-detailed is of requests, and --requests 0 sends none.")

    def publish(self, found: Findings) -> None:
        """The table and the path of the JSON to stdout, or with no path the JSON alone; then the gates. CheckFailed."""
        results = found.results()
        verdicts, unknown = self._judge(results)
        if verdicts:
            results["gates"] = [asdict(verdict) for verdict in verdicts]
        document = flat(make_report(found, results, self.defaulted, self.started), found)
        if "label" in document:
            document["label"] = self.label
        details = found.detailed() if self.is_detailed else {}
        document = {**self.metadata, **details, **document}
        failed = [verdict.says for verdict in verdicts if verdict.failed] + self._worse(document)
        self._show(found, document)
        if found.interrupted:
            raise typer.Exit(INTERRUPTED)
        if unknown is not None:
            raise unknown
        if failed:
            count = "A gate" if len(failed) == 1 else f"{len(failed)} gates"
            raise CheckFailed(f"{count} failed: {'; '.join(failed)}.")

    def _judge(self, results: Mapping[str, Any]) -> tuple[list[Verdict], UsageError | None]:
        """Also what is wrong with the gates, to be said when the report has been written."""
        from llmx.bench.findings import by_short_paths

        try:
            return judge(self.gates, by_short_paths(results)), None
        except UsageError as error:
            return [], error

    def _worse(self, document: dict[str, Any]) -> list[str]:
        """What got worse since the earlier report; written into this one too."""
        from llmx.bench.compare import changes, regressions

        if self.old is None:
            return []
        worse = regressions(changes(self.old["results"], document["results"]), self.bound)
        document["against"] = {"report": str(self.against), "bound": self.bound, "worse": worse}
        return worse

    def _show(self, found: Findings, document: Mapping[str, Any]) -> None:
        text = jsonlib.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if self.path is None:
            typer.echo(text, nl=False)
            return
        from rich.console import Console

        from llmx.bench.table import show

        show(Console(width=None if sys.stdout.isatty() else WIDTH), found)
        _write(self.path, text)
        typer.echo(self.path)


def parse_metadata(texts: list[str] | None) -> dict[str, str]:
    """Their keys lie on top of the report, as in vLLM's files. UsageError for what is no KEY=VALUE."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--metadata {text!r} is no KEY=VALUE.")
        found[key.strip()] = value.strip()
    return found


def _require(gates: tuple[Gate, ...], plan: Plan) -> None:
    """UsageError for a figure that this plan has none of."""
    from llmx.bench.findings import Findings

    limits = [f"ceilings.{part}.share_reached" for part in ("prefill", "decode", "serving")]
    try:
        require(gates, Findings(plan).names() + limits)
    except UsageError as error:
        if len(error.hint or "") > LONG_HINT:
            error.hint = "Figures are ttft_ms.p99, tpot_ms.mean, output_throughput, failed and the like: see a report."
        raise


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


def _write(path: Path, text: str) -> None:
    from llmx.report import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"The report can't be written to {path}: {error.strerror}.") from error


def make_report(found: Findings, results: Mapping[str, Any], defaulted: bool, started: datetime) -> Report:
    from llmx.bench.definitions import DEFINITIONS
    from llmx.formats import identity as weights
    from llmx.report import Report

    if found.info is not None:
        model = model_facts(found.info, found.identity)
    else:
        assert found.server is not None
        model = {"name": found.server.model, "url": found.server.root + found.server.path}
    return Report(
        "bench",
        _infinite(results),
        model=model,
        model_defaulted=defaulted,
        definitions=DEFINITIONS | (weights.DEFINITIONS if found.info is not None else {}),
        kernels=dict(found.info.kernels) if found.info is not None else {},
        seeds={"workload": found.plan.seed},
        started=started,
    )


def _infinite(value: Any) -> Any:
    """JSON has no infinity: "inf", as vLLM writes it, says more than null."""
    if isinstance(value, Mapping):
        return {key: _infinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_infinite(inner) for inner in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def flat(report: Report, found: Findings) -> dict[str, Any]:
    """The report, with the figures of `serving` on top too, where `vllm bench serve` has them, under its keys."""
    document = report.to_dict()
    serving = document["results"].get("serving")
    if serving is None:
        return document
    assert report.model is not None
    plain = {key: value for key, value in serving.items() if not isinstance(value, dict | list)}
    head = {
        "date": f"{report.started:%Y%m%d-%H%M%S}",
        "endpoint_type": "llmx" if found.server is None else "openai-chat" if found.server.chat else "openai",
        "backend": "llmx" if found.server is None else "openai",
        "label": None,
        "model_id": report.model["name"],
        "tokenizer_id": report.model["name"] if found.recount is None else found.recount.name,
    }
    return {**head, **plain, **document}
