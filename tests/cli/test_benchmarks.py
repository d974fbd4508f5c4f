"""The benchmark scripts run, in a small size, and their figures agree with each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document = json.loads(done.stdout)
    assert document["versions"]["torch"]
    assert document["script"].startswith("python ")
    found: dict[str, Any] = document["results"]
    return found


def test_kv_utilisation_counts_what_the_engine_counts() -> None:
    found = results(run("kv_utilisation.py", "--requests", "12", "--input-len", "20:90", "--output-len", "4:40"))
    assert found["most_running"] == 12
    assert found["paged"] == pytest.approx(found["slots_live"] / found["slots_held"])
    assert found["contiguous_whole_context"] < found["contiguous_exact"] < found["paged"] <= 1
    # Counted twice: by the engine from its blocks, and here from the sequences. A running sequence's newest token has a
    # slot, and no KV yet.
    assert 0 <= found["slots_live"] - found["tokens_with_final_kv"] <= found["sequence_steps"]


def test_the_gpu_benchmark_says_so_where_there_is_no_gpu() -> None:
    assert "no CUDA device" in run("gpu.py").stdout
    assert "add --tiny" in run("gpu.py", "--device", "cpu").stdout


def test_the_gpu_benchmark_can_be_tried_on_a_cpu() -> None:
    flags = ["-p", "16", "-n", "4", "-r", "2", "--requests", "2", "--concurrency", "2"]
    found = results(run("gpu.py", "--device", "cpu", "--tiny", "--dtype", "float32", *flags))["random:tiny"]
    assert found["model"]["device"] == "cpu"
    assert len(found["decode"]["tokens_per_second"]["samples"]) == 2
    assert found["serving"]["completed"] == 2
