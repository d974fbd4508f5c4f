"""`llmx pull org/name` and a first use by `llmx generate`, against a fake hub that HF_ENDPOINT names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import pytest
from fake_hub import Hub
from server.model import build

ROOT = Path(__file__).parents[2]
GGUF = b"GGUF" + bytes(100_000)


@pytest.fixture
def remote() -> Iterator[Hub]:
    with fake_hub.serve() as served:
        yield served


def variables(remote: Hub, cache: Path, **more: str) -> dict[str, str]:
    """An environment without the user's own settings of the hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    hub = {"HF_ENDPOINT": remote.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    return {**kept, "PYTHONPATH": str(ROOT), **hub, **more}


def llmx(remote: Hub, cache: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmx.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables(remote, cache, **more), cwd=cache)


def test_the_path_is_on_stdout_and_lines_are_on_stderr(remote: Hub, tmp_path: Path) -> None:
    remote.add("org/name", {"x-Q4_K_M.gguf": GGUF})
    ran = llmx(remote, tmp_path, "pull", "org/name:Q4_K_M")
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.rstrip("\n")).read_bytes() == GGUF
    assert ran.stderr
    assert all(line.startswith("fetching org/name:Q4_K_M: ") for line in ran.stderr.splitlines())
    again = llmx(remote, tmp_path, "pull", "org/name:Q4_K_M", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout, again.stderr) == (0, ran.stdout, "")


def test_a_first_use_fetches_and_a_second_makes_no_request(remote: Hub, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in build(tmp_path / "model").iterdir()}
    remote.add("org/tiny", files | {"pytorch_model.bin": b"pickle", "README.md": b"#"})
    words = ("generate", "Hello", "--model", "org/tiny", "--max-tokens", "4", "--temperature", "0", "--device", "cpu")
    first = llmx(remote, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    assert "fetching org/tiny: " in first.stderr
    assert not {"pytorch_model.bin", "README.md"} & set(remote.fetched())
    remote.requests.clear()
    second = llmx(remote, tmp_path, *words)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert not remote.requests


@pytest.mark.parametrize(
    ("name", "more", "code", "says"),
    [
        ("org/none", {}, 2, "There is no model org/none"),
        ("org/gated:Q8_0", {}, 1, "org/gated is gated"),
        ("org/gated:Q4_0", {}, 2, "no GGUF file of type 'Q4_0'; it has Q8_0"),
        ("org/gated:Q8_0", {"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE forbids"),
        ("org/gated:Q8_0", {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "can't be fetched from http://127.0.0.1:9"),
    ],
)
def test_a_failure_is_an_error_a_hint_and_a_code(
    remote: Hub, tmp_path: Path, name: str, more: dict[str, Any], code: int, says: str
) -> None:
    remote.add("org/gated", {"x-Q8_0.gguf": GGUF}, gated=True)
    ran = llmx(remote, tmp_path, "pull", name, **more)
    assert (ran.returncode, ran.stdout) == (code, "")
    error, hint = ran.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert hint.startswith("hint: ")


def test_an_interrupted_pull_leaves_no_part_and_the_next_one_ends_it(remote: Hub, tmp_path: Path) -> None:
    remote.add("org/name", {"x-Q8_0.gguf": GGUF})
    remote.stall["x-Q8_0.gguf"] = 50_000
    command = [sys.executable, "-m", "llmx.cli", "pull", "org/name:Q8_0"]
    with subprocess.Popen(
        command,
        env=variables(remote, tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if not remote.stalled.wait(60):
            process.kill()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not [path for path in tmp_path.rglob("blobs/*") if path.is_file()]
    ran = llmx(remote, tmp_path, "pull", "org/name:Q8_0")
    assert Path(ran.stdout.rstrip("\n")).read_bytes() == GGUF
