"""The client's own error: an event loop with fine timers that measures how late it is."""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmx.bench.stats import percentile

T = TypeVar("T")
BEAT_SECONDS = 0.01
MOST_LAG = 0.1  # of the time between tokens
MOST_DELAY = 0.01  # seconds between when a request was due and when it was sent


if sys.platform == "linux":

    class FineSelector(selectors.EpollSelector):
        """epoll waits in whole milliseconds, which is the size of what is measured; select(2) waits for it in less."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)
else:
    FineSelector = selectors.DefaultSelector


@dataclass
class Client:
    """What the client cost: seconds by which its loop was late, and by which requests were sent after they were due."""

    lags: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    def add(self, other: Client) -> None:
        self.lags += other.lags
        self.delays += other.delays

    def figures(self, gap: float | None) -> dict[str, Any]:
        """`gap`: mean seconds between tokens (or deltas), None where there were none."""
        lag, delay = _p99(self.lags), _p99(self.delays)
        late = lag is not None and gap is not None and lag > MOST_LAG * gap
        slow = delay is not None and delay > MOST_DELAY
        return {
            "loop_lag_ms_mean": 1e3 * statistics.fmean(self.lags) if self.lags else None,
            "loop_lag_ms_p99": None if lag is None else 1e3 * lag,
            "dispatch_delay_ms_p99": None if delay is None else 1e3 * delay,
            "client_bound": late or slow,
        }


def _p99(values: Sequence[float]) -> float | None:
    return percentile(values, 99) if values else None


async def watch(client: Client) -> None:
    """Writes down how late the loop wakes up, until it is cancelled."""
    while True:
        due = time.perf_counter() + BEAT_SECONDS
        await asyncio.sleep(BEAT_SECONDS)
        client.lags.append(max(0.0, time.perf_counter() - due))


async def until(due: float) -> None:
    """Sleep until time.perf_counter() is `due`."""
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left if math.isfinite(left) else 0)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """asyncio.run on a loop with fine timers."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())) as runner:
        return runner.run(work())
