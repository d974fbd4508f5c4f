"""A server process to measure, its memory, and a bare HTTP client: it shares the machine, so it must cost little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import ROOT

START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


@dataclass(frozen=True)
class Answer:
    """seconds: until the first byte of the body, and until the end. status 0: we left, or it never came."""

    status: int
    first: float
    whole: float
    tokens: int = 0


@dataclass(frozen=True)
class Server:
    port: int
    process: subprocess.Popen[str]

    def memory(self) -> dict[str, int]:
        """Bytes that are the processes' own (RssAnon and VmSwap: mapped weights don't count), by process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {"front": _own(self.process.pid), "engine": sum(_own(int(child)) for child in children)}

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics that have no labels of their own."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=ANSWER_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        found = (re.fullmatch(r'(\S+)\{model_name="[^"]*",engine="0"\} (\S+)', line) for line in lines)
        return {match[1]: float(match[2]) for match in found if match}

    async def ask(self, path: str, body: dict[str, Any], leave: float | None = None) -> Answer:
        """One request on a connection of its own; with `leave`, it is closed so many seconds after it was sent."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(leave if leave is not None else ANSWER_SECONDS):
                return await self._ask(path, body, began)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return Answer(0, 0.0, time.perf_counter() - began)

    async def _ask(self, path: str, body: dict[str, Any], began: float) -> Answer:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            status = int((await reader.readline()).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            chunks = [await reader.read(65536)]
            first = time.perf_counter()
            while chunk := await reader.read(65536):
                chunks.append(chunk)
            return Answer(status, first - began, time.perf_counter() - began, _tokens(b"".join(chunks)))
        finally:
            writer.close()


def _tokens(raw: bytes) -> int:
    found = re.findall(rb'"completion_tokens": ?(\d+)', raw)
    return int(found[-1]) if found else 0


def _own(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("RssAnon", "VmSwap"))  # type: ignore[index]


@contextmanager
def serving(model: str | None, *flags: str) -> Iterator[Server]:
    """`llmx serve` with the model, or with a tiny one of random weights (which takes transformers to make)."""
    with tempfile.TemporaryDirectory() as scratch:
        if model is None:
            sys.path.insert(0, str(ROOT / "tests"))
            from server.model import build

            model = str(build(Path(scratch) / "tiny"))
        log = Path(scratch) / "log"
        command = [sys.executable, "-m", "llmx.cli", "serve", model, "--port", "0", *flags]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])}
        with log.open("w") as err, subprocess.Popen(command, stderr=err, text=True, env=environment) as process:
            try:
                yield Server(_port(process, log), process)
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()


def _port(process: subprocess.Popen[str], log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")


def request(draw: random.Random, most_tokens: int) -> tuple[str, dict[str, Any]]:
    """A path and a body: chats and completions, plain and streamed, short and long."""
    words = " ".join(draw.choices(WORDS, k=draw.randint(1, 24)))
    body: dict[str, Any] = {"max_tokens": draw.randint(1, most_tokens), "n": draw.choice([1, 1, 1, 2])}
    if draw.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if draw.random() < 0.3:
        body |= {"logprobs": True} if draw.random() < 0.5 else {"stop": ["e", "ox"]}
    if draw.random() < 0.5:
        body.pop("logprobs", None)
        return "/v1/completions", body | {"prompt": words}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}


def percentiles(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for name, q in at.items()}
