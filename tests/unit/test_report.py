"""The report: its JSON is versioned and plain, its file is whole or absent, its table shows every result."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from rich.console import Console

from llmx.errors import UsageError
from llmx.report import SCHEMA_VERSION, Report

FIELDS = ["schema_version", "tool", "tool_version", "command", "argv", "started", "environment", "model"]
FIELDS += ["model_defaulted", "definitions", "kernels", "seeds", "results"]


def example(**changes: object) -> Report:
    values: dict[str, object] = {
        "command": "bench",
        "model": {"name": "demo"},
        "results": {"decode": {"tokens_per_second": {"mean": 123.456, "sd": 1.5}, "runs": [1, 2]}, "cached": 1234567},
        "definitions": {"decode.tokens_per_second": "tokens after the first, by the time they took"},
        "kernels": {"linear": "reference"},
        "seeds": {"sampling": 7},
    }
    return Report(**(values | changes))  # type: ignore[arg-type]


def shown(report: Report) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(report.table(), report.environment_table())
    return capture.get()


def test_the_json_has_the_fields_of_its_schema_in_order():
    report = example().to_dict()
    assert list(report) == FIELDS
    assert report["schema_version"] == SCHEMA_VERSION == 1
    assert report["tool"] == "llmx"
    assert report["results"]["decode"]["tokens_per_second"] == {"mean": 123.456, "sd": 1.5}
    assert report["model_defaulted"] is False
    assert example(model_defaulted=True).to_dict()["model_defaulted"] is True
    assert report["argv"] == sys.argv


def test_the_start_is_in_utc():
    there = datetime(2026, 3, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert example(started=there).to_dict()["started"] == "2026-02-28T23:30:00+00:00"
    now = datetime.fromisoformat(example().to_dict()["started"])
    assert abs((datetime.now(UTC) - now).total_seconds()) < 3600


def test_what_json_lacks_becomes_plain():
    @dataclass
    class Inner:
        path: Path
        kinds: tuple[str, ...]

    results = {"inner": Inner(Path("a/b"), ("x",)), "nan": math.nan, "inf": [math.inf, 1.5], 3: True}
    plain = example(results=results).to_dict()["results"]
    assert plain == {"inner": {"path": "a/b", "kinds": ["x"]}, "nan": None, "inf": [None, 1.5], "3": True}


def test_the_environment_names_processor_memory_and_versions():
    environment = example().to_dict()["environment"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["cpu"]["model"]
    assert 1 <= environment["cpu"]["usable_cores"] <= environment["cpu"]["cores"]
    assert environment["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    assert environment["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_the_table_shows_every_result_with_its_spread():
    text = shown(example())
    assert "llmx bench: demo" in text
    assert "123.5 ± 1.500" in text
    assert "decode.tokens_per_second" in text
    assert "1,234,567" in text
    assert "1, 2" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (0.00012345, "0.000123"),
        (98765.4321, "98,765"),
        (None, "–"),
        (True, "True"),
        ("x", "x"),
        (-2.5, "-2.500"),
    ],
)
def test_numbers_have_four_digits_that_matter(value, text):
    assert f" {text} " in shown(example(results={"x": value}))


def test_the_file_is_the_dictionary(tmp_path):
    report = example()
    report.write_json(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == report.to_dict()
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        example().write_json(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        example().write_json(tmp_path / "none" / "r.json")
