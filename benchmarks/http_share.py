"""What HTTP costs a step: streams through `llmx serve` against the same streams in one process, in turns.

Every stream gets its own prompt and the same number of tokens, greedily. A step's time is taken where all streams run:
from the last stream's first token to the first stream's last one. The client is this process, on the same machine, and
reads bytes only; what it takes from the server's processors counts as HTTP's.

    python benchmarks/http_share.py                  # the demo model (llmx pull demo), 32 streams
    python benchmarks/http_share.py --streams 8 --rounds 7 --json share.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from _common import publish, say
from _serving import Server, serving
from rich.console import Console

from llmx.bench.run import prompt_ids
from llmx.bench.workload import forced, random_prompt
from llmx.llm import LLM
from llmx.report import Report

DEFINITIONS = {
    "http_ms": "milliseconds of a step with all streams running, through HTTP, by when its tokens arrive",
    "in_process_ms": "the same in one process, with the same detokenising",
    "share_ms": "http_ms - in_process_ms of the same round",
    "front_ms": "processor milliseconds of the server's front process (not the engine's) per step",
    "median": "over rounds; each round runs both, the one that begins changes",
}
TICKS = os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, a .gguf file, or demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def step_ms(arrivals: list[list[float]], tokens: int) -> float:
    """Of the times at which each stream's texts came. A token may add no text, but not all streams' at once."""
    start, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    steps = max(sum(start < at <= end for at in times) for times in arrivals)
    assert tokens / 2 < steps <= tokens, "too few steps in which all streams ran; ask for more tokens"
    return 1000 * (end - start) / steps


class Reading(asyncio.Protocol):
    """One request, and when each event with text came. Not asyncio's streams: a task a piece costs as much as HTTP."""

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.request = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        self.times = list[float]()
        self.head = b""
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.head = self.head or data[:16]
        self.times += [time.perf_counter()] * data.count(b'"text":')

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set_result(None)


async def read_stream(port: int, body: dict[str, Any]) -> list[float]:
    """When each event with text came."""
    _, reading = await asyncio.get_running_loop().create_connection(lambda: Reading(body), "127.0.0.1", port)
    await reading.over
    assert b" 200 " in reading.head, reading.head
    return reading.times


async def through_http(server: Server, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    body = {"stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await asyncio.gather(*(read_stream(server.port, body | {"prompt": prompt}) for prompt in prompts))


async def in_process(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    async def read(prompt: list[int]) -> list[float]:
        with llm.open(prompt, forced(tokens)) as stream:
            return [time.perf_counter() async for delta in stream if delta.text]

    return await asyncio.gather(*(read(prompt) for prompt in prompts))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(llm: LLM, server: Server, flags: argparse.Namespace) -> list[dict[str, float]]:
    ids, rounds, pid = prompt_ids(llm), list[dict[str, float]](), server.process.pid
    for turn in range(-1, flags.rounds):  # the first warms up
        prompts = [random_prompt(ids, flags.input_len, f"share/{turn}/{i}") for i in range(flags.streams)]
        found: dict[str, float] = {}
        for way in ("http", "in_process") if turn % 2 else ("in_process", "http"):
            before = processor_seconds(pid)
            if way == "http":
                times = asyncio.run(through_http(server, prompts, flags.output_len))
                found["front_ms"] = 1000 * (processor_seconds(pid) - before) / flags.output_len
            else:
                times = asyncio.run(in_process(llm, prompts, flags.output_len))
            found[f"{way}_ms"] = step_ms(times, flags.output_len)
        found["share_ms"] = found["http_ms"] - found["in_process_ms"]
        if turn >= 0:
            rounds.append(found)
            say(f"round {turn + 1} of {flags.rounds}: " + ", ".join(f"{k} {v:.2f}" for k, v in sorted(found.items())))
    return rounds


def main() -> None:
    flags = arguments()
    with LLM(flags.model, prefix_caching=False) as llm, serving(flags.model, "--no-prefix-caching") as server:
        rounds, info = measure(llm, server, flags), llm.info
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    report = Report(
        "http_share",
        {"median": median, "rounds": rounds, "streams": flags.streams, "output_len": flags.output_len},
        model={"name": info.model, "parameters": info.parameters, "schemes": info.schemes},
        definitions=DEFINITIONS,
        kernels=dict(info.kernels),
        seeds={},
    )
    Console(stderr=True).print(report.table())
    publish(report, flags.json, ("torch", "uvicorn", "h11"))


if __name__ == "__main__":
    main()
