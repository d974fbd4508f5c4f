"""Does a server leak? Random requests, a share of which are left in the middle; memory per request, and the pool.

Counts what the processes hold for themselves (RssAnon + VmSwap) each time a twentieth of the requests is through, and
fits a line after a warm-up. Exit code 3 if the slope is above --most, a request failed, or something is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

from _common import publish, say
from _serving import Answer, Server, request, serving

from llmx.report import Report

WARM_UP = 0.3  # share of the requests before which memory may grow: caches fill, allocators settle
POINTS = 20


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a tiny one of random weights")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--leave", type=float, default=0.2, help="share of the requests whose client leaves")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--most", type=float, default=5.0, help="KiB that a request may leave behind")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Soak:
    """The requests, and the memory after each twentieth of them."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.draw = random.Random(options.seed)
        self.deadline = time.monotonic() + options.seconds
        self.sent = self.left = self.done = 0
        self.statuses: dict[int, int] = {}
        self.points: list[tuple[int, dict[str, int]]] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.options.concurrency)))

    async def _client(self) -> None:
        while self.sent < self.options.requests and time.monotonic() < self.deadline:
            self.sent += 1
            path, body = request(self.draw, self.options.max_tokens)
            if self.draw.random() < self.options.leave:
                self.left += 1
                await self.server.ask(path, body | {"max_tokens": 120}, leave=self.draw.uniform(0.0, 0.2))
            else:
                self._note(await self.server.ask(path, body))
            self.done += 1
            if self.done % max(1, self.options.requests // POINTS) == 0:
                self.points.append((self.done, self.server.memory()))

    def _note(self, answer: Answer) -> None:
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes per request: the least-squares line."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def at_rest(server: Server) -> dict[str, float]:
    """What is still held, once nothing runs any more (or 10 s have passed)."""
    deadline = time.monotonic() + 10
    while True:
        found = server.metrics()
        names = ("llmx:num_requests_running", "llmx:num_requests_waiting", "llmx:kv_cache_usage_perc")
        # A busy engine's figures may be missing for once.
        held = {name.removeprefix("llmx:"): found.get(name, float("inf")) for name in names}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def main() -> int:
    options = flags()
    with serving(options.model, "--max-num-seqs", str(options.concurrency)) as server:
        say(f"{options.requests} requests, {options.leave:.0%} of them left in the middle")
        soak = Soak(server, options)
        began = time.monotonic()
        asyncio.run(soak.run())
        seconds = time.monotonic() - began
        held = at_rest(server)
    settled = [(done, memory) for done, memory in soak.points if done >= WARM_UP * soak.done]
    slopes = {name: slope([(x, m[name]) for x, m in settled]) / 1024 for name in ("front", "engine")}
    results: dict[str, Any] = {
        "requests": soak.done,
        "left": soak.left,
        "statuses": {str(status): count for status, count in sorted(soak.statuses.items())},
        "seconds": round(seconds, 1),
        "kib_per_request": {name: round(value, 3) for name, value in slopes.items()},
        "mib": [{"requests": done, **{k: round(v / 2**20, 1) for k, v in m.items()}} for done, m in soak.points],
        "left_behind": held,
    }
    definitions = {
        "kib_per_request": "slope of RssAnon + VmSwap over the requests, by process, after the warm-up",
        "left_behind": "of the engine's sequences and KV blocks, when all clients have gone",
    }
    report = Report("soak", results, definitions=definitions, seeds={"requests": options.seed})
    publish(report, options.json)
    sound = set(soak.statuses) <= {200} and not any(held.values()) and sum(slopes.values()) < options.most
    return 0 if sound else 3


if __name__ == "__main__":
    sys.exit(main())
