"""The scripts that show what the bench must hold: they run, in a small size; their bounds are for a quiet machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def results(script: str, *flags: str) -> tuple[int, dict[str, Any]]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["results"]
    return done.returncode, found


def test_the_client_is_held_against_the_servers_own_clock() -> None:
    flags = ["--concurrency", "2", "--requests", "4", "--ttft-ms", "30", "--itl-ms", "5", "--output-len", "8"]
    code, found = results("bench_client.py", *flags, "--repeats", "2")
    turns = [one["llmx"] for one in found["c2"]["turns"]]
    for one in turns:
        assert one["truth"]["mean_ttft_ms"] >= 30
        assert min(one["lag"].values()) > 0  # nothing is there before it was sent, nor read before it was written
        assert one["figures"]["mean_ttft_ms"] == pytest.approx(one["truth"]["mean_ttft_ms"] + sum(one["lag"].values()))
        for name, error in one["error"].items():
            assert error == pytest.approx(one["figures"][name] / one["truth"][name] - 1)
    median = found["c2"]["median"]["llmx"]["error"]
    assert median["mean_ttft_ms"] == pytest.approx(sum(one["error"]["mean_ttft_ms"] for one in turns) / 2)
    judged = ("mean_ttft_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput")
    assert (code == 3) is bool(found["wrong"])
    assert bool(found["wrong"]) is any(abs(median[name]) > 0.02 for name in judged)


def test_the_gain_of_batching_is_the_median_over_seeds_at_the_share_of_the_capacity() -> None:
    flags = ["--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    code, found = results("batching_gain.py", *flags, "--requests", "8", "--seeds", "3", "--batch", "4")
    gains = [1 - one["continuous"]["p99_e2el_ms"] / one["static"]["p99_e2el_ms"] for one in found["seeds"]]
    assert found["median_p99_e2el_lower_by"] == pytest.approx(sorted(gains)[1])
    for one in found["seeds"]:
        assert one["request_rate"] == pytest.approx(0.7 * one["capacity_requests_per_second"])
        assert one["saturated"]["most_running_since_start"] == 4
        for contender in ("continuous", "static"):
            assert one[contender]["completed"] == 8
            assert one[contender]["cached_tokens"] == 0
        assert one["continuous"]["total_input_tokens"] == one["static"]["total_input_tokens"]
    assert found["holds"] is (code == 0)


def test_a_busy_neighbour_changes_no_token_and_is_held_against_quiet_runs() -> None:
    flags = ["--model", "random:tiny", "--input-len", "40", "--output-len", "8", "--rounds", "3", "--threads", "2"]
    code, found = results("busy_neighbour.py", *flags)
    for name, ratio in found["ratios"].items():
        what, kind = name.split("_")
        pairs = zip(found["rounds"][kind][what], found["rounds"]["quiet"][what], strict=True)
        assert ratio == pytest.approx(sorted(busy / quiet for busy, quiet in pairs)[1])
    assert (code == 0) is (min(found["ratios"].values()) >= found["goal"])


def test_the_simulation_of_batching_serves_in_the_order_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    serve = importlib.import_module("batching_limits").serve

    def run(most: int, shortest: bool = False, static: bool = False) -> Any:
        return serve(lambda decodes, prompt: 1.0, [0.0, 0.5], [(1, 3), (1, 1)], most, shortest, static)

    assert run(2, static=True) == [3, 3.5]  # the second waits for all of the first batch
    assert run(2) == [3, 1.5]
    assert run(1) == [3, 3.5]
    assert run(1, shortest=True) == [4, 1.5]
    costs: list[tuple[int, int]] = []

    def cost(decodes: int, prompt: int) -> float:
        costs.append((decodes, prompt))
        return 1.0

    serve(cost, [0.0, 0.0], [(5, 2), (7, 1)], 2, False, False)
    assert costs == [(2, 12), (1, 0)]  # sequences, and tokens of prompts


def test_what_batching_could_gain_is_told_for_each_order() -> None:
    flags = ["--model", "random:tiny", "--requests", "8", "--seeds", "3", "--rounds", "1"]
    code, found = results("batching_limits.py", *flags)
    assert code == 0
    assert len(found["p99_e2el_lower_by"]) == 5
    assert all(len(gains) == 3 and max(gains) < 1 for gains in found["p99_e2el_lower_by"].values())
    assert list(found["step_ms"]) == ["1", "2", "4", "8", "12", "16", "24", "32"]
