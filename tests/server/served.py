"""`llmx serve` as a process, and its engine's processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from server.running import PATIENCE, eventually

STREAM: dict[str, Any] = {"prompt": "the", "temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}


class Served:
    """A server process, what it said on stderr, and its engine's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    @property
    def said(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        found = re.search(r"at (http://127\.0\.0\.1:\d+/v1)", self.said)
        assert found, self.said
        return found[1]

    @property
    def engine(self) -> int:
        (child,) = children(self.process.pid)
        return child

    def ended(self) -> int:
        """Its exit code, once it has one and has said everything."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


def children(pid: int) -> list[int]:
    """Processes that a process's first thread has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(*arguments: str) -> subprocess.Popen[str]:
    """`llmx serve` with these arguments, from the package that the tests import."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "llmx.cli", "serve", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[Served]:
    options = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4")
    with command(str(model), *options, *arguments) as process:
        served = Served(process)
        try:
            assert eventually(lambda: "Try: curl" in served.said or process.poll() is not None)
            assert process.poll() is None, served.said
            yield served
        finally:
            process.kill()
            served.ended()


def alive(pid: int) -> bool:
    """Whether that process runs (one that ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def connected(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client
