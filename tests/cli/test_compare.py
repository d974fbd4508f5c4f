"""`llmx compare`: directions, deviations, what else differs, and what can't be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmx.bench.compare import changes, differences, parse_bound, regressions
from llmx.cli import app
from llmx.errors import UsageError

SERVING = {
    "output_throughput": 100.0,
    "failed": 0,
    "duration": 9.0,
    "p99_ttft_ms": 50.0,
    "ttft_ms": {"mean": 30.0, "p99": 50.0, "std": 5.0},
    "icl_ms": {"mean": 1.0},
    "client": {"loop_lag_ms_p99": 1.0},
    "sd": {"output_throughput": 2.0, "ttft_ms": {"p99": 4.0}},
}
BENCH = {
    "schema_version": 1,
    "command": "bench",
    "argv": ["llmx", "bench", "demo"],
    "environment": {"cpu": {"model": "A"}},
    "model": {"name": "demo"},
    "results": {
        "interrupted": False,
        "serving": SERVING,
        "decode": {"tokens": 128, "tokens_per_second": {"mean": 20.0, "sd": 0.5, "samples": [19.5, 20.5]}},
    },
}
EVAL = {
    "schema_version": 1,
    "command": "eval",
    "results": {
        "perplexity": {"mean": 20.0, "se": 0.2},
        "kld": {"mean": 0.01, "se": 0.001, "p99": 0.2, "median": 0.005},
        "same_top": {"share": 0.9, "se": 0.01},
        "tasks": {"arc": {"acc,none": {"mean": 0.5, "se": 0.1}}},
    },
}


def changed(report: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(report))
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return found


def compare(tmp_path: Path, old: Any, new: Any, *flags: str) -> Result:
    for name, report in (("a.json", old), ("b.json", new)):
        (tmp_path / name).write_text(report if isinstance(report, str) else json.dumps(report))
    return CliRunner().invoke(app, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *flags])


def test_figures_of_merit_are_found_with_their_direction_and_deviation() -> None:
    found = {one.path: one for one in changes(BENCH["results"], BENCH["results"])}  # type: ignore[arg-type]
    assert set(found) == {
        *("serving.output_throughput", "serving.failed", "serving.ttft_ms.mean", "serving.ttft_ms.p99"),
        "decode.tokens_per_second.mean",
    }
    assert found["serving.output_throughput"].higher_is_better
    assert not found["serving.ttft_ms.p99"].higher_is_better
    assert found["serving.output_throughput"].sd == (2.0, 2.0)
    assert found["serving.ttft_ms.p99"].sd == (4.0, 4.0)
    assert found["decode.tokens_per_second.mean"].sd == (0.5, 0.5)
    assert found["serving.ttft_ms.mean"].sd == (None, None)


def test_evals_are_compared_too() -> None:
    found = {one.path: one for one in changes(EVAL["results"], EVAL["results"])}  # type: ignore[arg-type]
    higher = {path for path, one in found.items() if one.higher_is_better}
    assert higher == {"same_top.share", "tasks.arc.acc,none.mean"}
    assert set(found) - higher == {"perplexity.mean", "kld.mean", "kld.p99", "kld.median"}
    assert found["perplexity.mean"].sd == (0.2, 0.2)


@pytest.mark.parametrize(
    ("path", "value", "worse"),
    [
        (("output_throughput",), 90.0, 0.1),
        (("output_throughput",), 110.0, -0.1),
        (("ttft_ms", "p99"), 60.0, 0.2),
        (("failed",), 3, math.inf),
        (("ttft_ms", "p99"), "inf", math.inf),
    ],
)
def test_worse_is_worse_in_the_figures_own_direction(path: tuple[str, ...], value: Any, worse: float) -> None:
    new = changed(BENCH, "results", "serving", *path, to=value)
    found = [one for one in changes(BENCH["results"], new["results"]) if one.relative]  # type: ignore[arg-type]
    assert [one.worse for one in found] == [pytest.approx(worse)]
    assert bool(regressions(found, 0.05)) is (worse > 0.05)
    assert not regressions(found, math.inf)


def test_a_table_is_shown_and_what_else_differs(tmp_path: Path) -> None:
    new = changed(changed(BENCH, "environment", "cpu", "model", to="B"), "results", "serving", "failed", to=2)
    new["argv"] = ["llmx", "bench", "demo", "--threads", "1"]
    result = compare(tmp_path, BENCH, new)
    assert result.exit_code == 0, result.stderr
    assert "serving.ttft_ms.p99" in result.stdout
    assert "50 ± 4" in result.stdout
    assert "differs: environment.cpu.model: A → B" in result.stdout
    assert "differs: flags: bench demo → bench demo --threads 1" in result.stdout
    assert not differences(BENCH, BENCH)


def test_worse_by_more_than_the_bound_exits_3_and_the_report_is_written(tmp_path: Path) -> None:
    new = changed(BENCH, "results", "serving", "output_throughput", to=90.0)
    path = tmp_path / "c.json"
    result = compare(tmp_path, BENCH, new, "--fail-on", "5%", "--json", str(path))
    assert result.exit_code == 3
    assert "serving.output_throughput went from 100 to 90: 10 % worse, the bound is 5 %" in result.stderr
    assert json.loads(path.read_text())["results"]["worse"]
    assert compare(tmp_path, BENCH, new, "--fail-on", "10%").exit_code == 0
    assert compare(tmp_path, new, BENCH, "--fail-on", "0").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (BENCH, EVAL, "different commands, bench and eval"),
        (BENCH, changed(BENCH, "schema_version", to=2), "different versions of the report, 1 and 2"),
        ("not json", BENCH, "is not JSON"),
        ({"x": 1}, BENCH, "is not a report of llmx"),
        (changed(BENCH, "results", to={}), BENCH, "no figure in common"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path: Path, old: Any, new: Any, says: str) -> None:
    result = compare(tmp_path, old, new)
    assert result.exit_code == 2
    assert says in result.stderr


def test_bounds_are_shares() -> None:
    assert parse_bound("5%", "--x") == pytest.approx(0.05)
    assert parse_bound("0.1", "--x") == pytest.approx(0.1)
    assert parse_bound("500%", "--x") == 5
    with pytest.raises(UsageError, match="--x 5 is a share of 500 %") as error:
        parse_bound("5", "--x")
    assert error.value.hint == "Write 5% if that is meant."
    for text in ("-5%", "five", "5%%", ""):
        with pytest.raises(UsageError, match="--x must be a share"):
            parse_bound(text, "--x")
