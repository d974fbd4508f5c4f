"""The work queue of the C++ kernels: driven under the thread sanitizer, as far as the compiler has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = ROOT / "kernels" / "cpu"
DRIVER = ROOT / "tests" / "native" / "queue_driver.cpp"


def compiled(to: Path, *flags: str) -> bool:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [DRIVER, CPU / "runtime" / "pool.cpp"]
    command = [compiler, "-std=c++17", "-O1", "-g1", *flags, f"-I{CPU}", *map(str, sources), "-o", str(to), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 or flags, done.stderr
    return done.returncode == 0


def test_the_queue_runs_every_task_once_and_without_races(tmp_path: Path) -> None:
    """Many threads, tiny tasks, several callers, forked children. `make sanitize` drives it longer, with kernels."""
    driver = tmp_path / "driver"
    if not compiled(driver, "-fsanitize=thread"):
        pytest.skip("this compiler has no thread sanitizer")
    # A forked child starts threads of its own, which the sanitizer allows when it is told so.
    env = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([driver, "1000"], capture_output=True, text=True, env=env)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this system (its memory is laid out in another way)")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_queue_runs_every_task_once(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    compiled(driver)
    done = subprocess.run([driver, "4000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_driver_calls_kernels_as_they_are_declared(tmp_path: Path) -> None:
    """`make sanitize` compiles and runs it with them, which takes minutes."""
    assert compiled(tmp_path / "driver", "-fsyntax-only", "-DDRIVE_KERNELS", "-DLLMX_ISA=portable")
