"""The scripts that measure a server run, in a small size. What they measure is for quieter machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")


def results(script: str, *flags: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)["results"]
    return found


def test_requests_and_clients_that_leave_hold_nothing_afterwards() -> None:
    found = results("soak.py", "--requests", "60", "--leave", "0.3", "--max-tokens", "4", "--most", "1e9")
    assert found["requests"] == 60
    assert found["left"] > 5
    assert found["statuses"] == {"200": 60 - found["left"]}
    assert set(found["left_behind"].values()) == {0}
    assert len(found["mib"]) == 20


def test_too_many_requests_are_answered_with_200_or_429_and_hold_nothing_afterwards() -> None:
    small = ("--seats", "2", "--queue", "2", "--seconds", "3", "--max-tokens", "8")
    found = results("overload.py", *small, "--reject-ms", "1e9", "--slower", "1e9")
    assert set(found["full"]["statuses"]) == {"200"}
    assert set(found["overloaded"]["statuses"]) == {"200", "429"}
    assert found["left_behind"] == 0


def test_the_clients_that_are_installed_get_on_with_the_server() -> None:
    found = results("clients.py")["clients"]
    assert found["openai"] == "works"
    assert all(said == "works" or said.startswith("skipped") for said in found.values())
