"""Ten times the requests that a server can take: are rejects quick, do accepted requests keep their pace, does it grow?

First as many clients as the server has places (running and waiting), each sending its next request when the last was
answered: that is what it can take. Then the same requests at --factor times that rate, whatever comes back. Exit code 3
if rejects take longer than --reject-ms (their 99th percentile), accepted requests become slower than --slower times,
anything but 200 and 429 comes back, a 429 has no Retry-After, or places are left behind.
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
from _serving import Answer, Server, percentiles, request, serving

from llmx.report import Report


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a tiny one of random weights")
    parser.add_argument("--seats", type=int, default=8, help="sequences at once")
    parser.add_argument("--queue", type=int, default=16, help="texts that may wait")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each of the two parts")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--reject-ms", type=float, default=50.0)
    parser.add_argument("--slower", type=float, default=1.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Load:
    """Requests of one text each, and their answers."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.draw = random.Random(options.seed)
        self.answers: list[Answer] = []

    async def one(self) -> None:
        path, body = request(self.draw, self.options.max_tokens)
        self.answers.append(await self.server.ask(path, body | {"n": 1, "ignore_eos": True}))

    async def some(self, count: int) -> None:
        """One after the other."""
        for _ in range(count):
            await self.one()

    async def closed(self, clients: int) -> float:
        """Requests a second, of so many clients that wait for their answers."""
        began = time.monotonic()

        async def client() -> None:
            while time.monotonic() < began + self.options.seconds:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return len(self.answers) / (time.monotonic() - began)

    async def open(self, rate: float) -> float:
        """The rate that was kept, of requests sent at `rate` whatever comes back."""
        began, tasks = time.monotonic(), []
        while (now := time.monotonic() - began) < self.options.seconds:
            while len(tasks) < rate * now:
                tasks.append(asyncio.create_task(self.one()))
            await asyncio.sleep(0.005)
        sent = len(tasks) / (time.monotonic() - began)
        await asyncio.gather(*tasks)
        return sent

    def times(self, status: int) -> dict[str, dict[str, float]]:
        chosen = [answer for answer in self.answers if answer.status == status]
        return {
            "first_byte_ms": percentiles([answer.first for answer in chosen]),
            "whole_ms": percentiles([answer.whole for answer in chosen]),
        }

    def statuses(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for answer in self.answers:
            found[str(answer.status)] = found.get(str(answer.status), 0) + 1
        return found


def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    full, over = Load(server, options), Load(server, options)
    asyncio.run(Load(server, options).some(8))  # the first of each kind may have something to prepare
    rate = asyncio.run(full.closed(options.seats + options.queue))
    say(f"{rate:.1f} requests a second fill it; now {options.factor:g} times as many")
    before = server.memory()
    sent = asyncio.run(over.open(rate * options.factor))
    time.sleep(1.0)
    after, metrics = server.memory(), server.metrics()
    return {
        "capacity_per_second": round(rate, 2),
        "sent_per_second": round(sent, 2),
        "full": {"statuses": full.statuses(), "accepted": full.times(200)},
        "overloaded": {"statuses": over.statuses(), "accepted": over.times(200), "rejected": over.times(429)},
        "grown_mib": {name: round((after[name] - before[name]) / 2**20, 2) for name in after},
        "left_behind": metrics["llmx:num_requests_running"] + metrics["llmx:num_requests_waiting"],
    }


def main() -> int:
    options = flags()
    queue = ("--max-num-seqs", str(options.seats), "--max-num-queued-reqs", str(options.queue))
    with serving(options.model, *queue) as server:
        results = measure(server, options)
    over = results["overloaded"]
    slower = over["accepted"]["whole_ms"]["p99"] / results["full"]["accepted"]["whole_ms"]["p99"]
    results["accepted_p99_ratio"] = round(slower, 3)
    definitions = {
        "capacity_per_second": "what as many clients as there are places get, one request at a time each",
        "accepted_p99_ratio": "whole_ms p99 of accepted requests, overloaded by full",
        "grown_mib": "RssAnon + VmSwap, by process, over the overload",
    }
    publish(Report("overload", results, definitions=definitions, seeds={"requests": options.seed}), options.json)
    sound = (
        set(over["statuses"]) <= {"200", "429"}
        and over["rejected"]["whole_ms"].get("p99", 0.0) <= options.reject_ms
        and slower <= options.slower
        and not results["left_behind"]
    )
    return 0 if sound else 3


if __name__ == "__main__":
    sys.exit(main())
