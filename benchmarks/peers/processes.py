"""A contender's process: it lives through all rounds and runs only in its turns, so it disturbs nobody else's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
GRACE = 10.0  # seconds between asking a process to end and killing it


class Unavailable(Exception):
    """A contender can't run here; the text says why, and its column stays empty."""


class Held:
    """A command in a process group of its own, stopped (SIGSTOP) between turns; what it prints is in `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, ask: bool = False):
        self.command, self.log = list(command), log
        pipe = subprocess.PIPE if ask else None
        with log.open("a") as file:
            file.write(f"$ {' '.join(self.command)[:2000]}\n")
            file.flush()
            self.process = subprocess.Popen(
                self.command, stdin=pipe or subprocess.DEVNULL, stdout=pipe or file, stderr=file, text=True,
                env=os.environ | dict(env or {}), start_new_session=True,
            )  # fmt: skip

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def failed(self, what: str) -> Unavailable:
        """What to raise: the last line of the log that says something is the best reason there is."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return Unavailable(f"{what}: {lines[-1][:400]}" if lines else what)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Worker(Held):
    """peers/worker.py, run by `python`."""

    def __init__(self, python: str, engine: str, options: dict[str, Any], log: Path, env: Mapping[str, str]) -> None:
        script = Path(__file__).with_name("worker.py")
        super().__init__([python, str(script), engine, json.dumps(options)], log, env, ask=True)
        try:
            self.about: dict[str, Any] = self._answer()["about"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failed(f"it ended with exit code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Unavailable(found["error"][:600])
        return found

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        with self.turn():
            try:
                self.process.stdin.write(json.dumps(asked) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise self.failed("it has ended") from None
            return self._answer()


class HttpServer(Held):
    """A server on a free port of the loopback, ready when /health is answered. `{port}` in the command is its port."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        super().__init__([part.replace("{port}", port) for part in command], log, env)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed(f"the server ended with exit code {self.process.returncode}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise self.failed(f"the server did not answer within {START_SECONDS:.0f} s")


def output_of(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command prints on stdout. Unavailable if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | dict(env or {}))
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stderr}\n")
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(lines[-2:])[:400]}")
    return done.stdout
