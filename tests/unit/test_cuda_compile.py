"""Every Triton kernel compiles for three generations without a GPU, spills no register and fits in shared memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KiB that one program may have


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own: the tests' process may have Triton's interpreter in place of the compiler."""
    folder = tmp_path_factory.mktemp("aot")
    script, report = ROOT / "benchmarks" / "triton_aot.py", folder / "costs.json"
    env = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "--few", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())["results"]["cases"]
    return found


def test_every_kernel_is_among_the_cases(cases: dict[str, Any]) -> None:
    files = (ROOT / "kernels" / "cuda").glob("*.py")
    written = {name for path in files for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert written == {case["kernel"] for case in cases.values()}


@pytest.mark.parametrize("arch", SHARED)
def test_no_register_is_spilled_and_shared_memory_suffices(cases: dict[str, Any], arch: str) -> None:
    for name, case in cases.items():
        cost = case["costs"][arch]
        assert cost["stack"] == 0, f"{name} spills: {cost}"
        assert 16 <= cost["registers"] <= 255, (name, cost)
        assert cost["shared"] <= SHARED[arch] * 1024, (name, cost)
        assert (cost["product"] is not None) == name.startswith("attention"), (name, cost)  # tensor cores multiply
