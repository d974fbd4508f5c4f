"""What was seen of each request, and the figures that follow from it. Pure: no engine, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmx.bench.stats import adjusted, latencies, share

PLATEAU = 0.8  # of the most requests at once: what counts as steady in an open loop
REASONS = 5  # most reasons of failures that are shown


@dataclass
class Record:
    """One request as its client saw it, in seconds.

    `arrivals`: (clock, tokens) of each delta that held tokens; with `sized` False nobody knows how many a delta held,
    and `counted` is the number of all. `due`: when it was to be sent, None in a closed loop. `strict`: another number
    of tokens than `wanted` is a failure. `told`: what the server's usage says, where the tokens were counted as ids.
    `retokenized`: tokens of `text`, None where nobody counted them.
    """

    input_len: int
    wanted: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False
    error: str | None = None
    due: float | None = None
    strict: bool = True
    sized: bool = True
    counted: int | None = None
    told: int | None = None
    cached: int | None = None
    first_byte: float | None = None
    text: str = ""
    retokenized: int | None = None

    @property
    def output_len(self) -> int:
        return sum(tokens for _, tokens in self.arrivals) if self.counted is None else self.counted

    @property
    def completed(self) -> bool:
        whole = self.output_len == self.wanted or not self.strict
        return self.ended and self.error is None and whole and bool(self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def e2el(self) -> float:
        return self.arrivals[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        if self.output_len < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_len - 1)

    @property
    def queued(self) -> float:
        """Seconds that the client held it back."""
        return 0.0 if self.due is None else max(0.0, self.sent - self.due)

    @property
    def chunk_gaps(self) -> list[tuple[float, int]]:
        """(wait, tokens) of each delta but the first."""
        times = self.arrivals
        return [(times[i][0] - times[i - 1][0], times[i][1]) for i in range(1, len(times))]

    @property
    def token_gaps(self) -> list[float]:
        return [wait / tokens for wait, tokens in self.chunk_gaps for _ in range(tokens)] if self.sized else []


def steady(records: Sequence[Record], concurrency: int) -> dict[str, float | None]:
    """Output rate over the time in which `concurrency` requests were in flight: ramp-up and tail cut off."""
    if len(records) < concurrency or not all(record.completed for record in records):
        return {"seconds": None, "output_throughput": None}
    begin = sorted(record.sent for record in records)[concurrency - 1]
    end = sorted(record.arrivals[-1][0] for record in records)[-concurrency]  # no new request takes this one's place
    return _window(records, begin, end)


def plateau(records: Sequence[Record]) -> dict[str, float | None]:
    """The same for an open loop: the longest time in which at least PLATEAU of the peak were in flight."""
    done = [record for record in records if record.completed]
    least = PLATEAU * peak(done)
    inside, since, best = 0, None, (0.0, 0.0)
    for clock, change in _changes(done):
        inside += change
        if inside >= least:
            since = clock if since is None else since
        elif since is not None:
            best = max(best, (since, clock), key=lambda span: span[1] - span[0])
            since = None
    return _window(done, *best)


def _changes(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(clock, +1 or -1) for each request sent and ended, in order; where one follows another, it is no dip."""
    begun = [(record.sent, 1) for record in records]
    return sorted([*begun, *((r.arrivals[-1][0], -1) for r in records)], key=lambda change: (change[0], -change[1]))


def peak(records: Sequence[Record]) -> int:
    """Most requests in flight at once."""
    inside = most = 0
    for _, change in _changes([record for record in records if record.arrivals]):
        inside += change
        most = max(most, inside)
    return most


def _window(records: Sequence[Record], begin: float, end: float) -> dict[str, float | None]:
    if end <= begin:
        return {"seconds": None, "output_throughput": None}
    tokens = sum(n for record in records for when, n in record.arrivals if begin < when <= end)
    known = all(record.sized for record in records)
    return {"seconds": end - begin, "output_throughput": tokens / (end - begin) if known else None}


def busiest_second(records: Sequence[Record], began: float) -> int | None:
    """Most tokens in one of the seconds since the start; None where deltas hold unknown numbers of them."""
    if not all(record.sized for record in records):
        return None
    seconds = Counter[int]()
    for record in records:
        for when, tokens in record.arrivals:
            seconds[int(when - began)] += tokens
    return max(seconds.values(), default=0)


def reasons(failed: Sequence[Record]) -> list[str]:
    """Why requests failed, the commonest first, with how often."""
    counts = Counter(record.error or f"wrong number of tokens (of {record.wanted})" for record in failed)
    shown = [f"{text} ({times} times)" if times > 1 else text for text, times in counts.most_common(REASONS)]
    return shown + ([f"and {len(counts) - REASONS} more"] if len(counts) > REASONS else [])


def serving_figures(records: Sequence[Record], concurrency: int | None) -> dict[str, Any]:
    """The figures of `vllm bench serve`, under its names, over the completed requests, and some of ours."""
    done = [record for record in records if record.completed]
    failed = [record for record in records if record.ended and not record.completed]
    inputs, outputs = sum(r.input_len for r in done), sum(r.output_len for r in done)
    began = min((r.sent if r.due is None else r.due for r in records), default=0.0)
    duration = max((r.arrivals[-1][0] for r in records if r.arrivals), default=began) - began
    open_loop = any(record.due is not None for record in records)
    figures: dict[str, Any] = {
        "max_concurrency": concurrency,
        "num_prompts": len(records),
        "completed": len(done),
        "failed": len(failed),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": share(len(done), duration),
        "output_throughput": share(outputs, duration),
        "total_token_throughput": share(inputs + outputs, duration),
        "max_output_tokens_per_s": busiest_second(done, began),
        "max_concurrent_requests": peak(records),
        "rtfx": 0.0,
        "concurrency_mean": share(sum(r.e2el for r in done), duration),
        "steady": plateau(records) if concurrency is None or open_loop else steady(records, concurrency),
        "osl_mismatch": sum(record.output_len != record.wanted for record in done),
        "errors": reasons(failed),
    }
    return figures | _latencies(done, len(failed), open_loop)


def detailed(records: Sequence[Record]) -> dict[str, list[Any]]:
    """What `vllm bench serve --save-detailed` writes of each request, in seconds, in the order of sending. A failed one
    has no times, and says why in `errors`."""
    whole = [record.completed for record in records]
    return {
        "input_lens": [r.input_len for r in records],
        "output_lens": [r.output_len for r in records],
        "ttfts": [r.ttft if ok else 0.0 for r, ok in zip(records, whole, strict=True)],
        "itls": [[gap for gap, _ in r.chunk_gaps] if ok else [] for r, ok in zip(records, whole, strict=True)],
        "latencies": [r.e2el if ok else 0.0 for r, ok in zip(records, whole, strict=True)],
        "start_times": [r.sent for r in records],
        "queue_times": [r.queued for r in records],
        "generated_texts": [r.text for r in records],
        "errors": ["" if ok else reasons([r])[0] for r, ok in zip(records, whole, strict=True)],
    }


def _latencies(done: Sequence[Record], failures: int, open_loop: bool) -> dict[str, float | None]:
    each = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "e2el": [r.e2el for r in done],
    }
    figures = latencies("itl", [gap for r in done for gap in r.token_gaps])
    figures |= latencies("icl", [gap for r in done for gap, _ in r.chunk_gaps])
    for name, seconds in each.items():
        figures |= latencies(name, seconds)
        figures[f"adj_p99_{name}_ms"] = adjusted(seconds, failures, 99)
    if any(record.first_byte is not None for record in done):
        figures |= latencies("ttfb", [r.first_byte - r.sent for r in done if r.first_byte is not None])
    if open_loop:
        figures |= latencies("client_queue_time", [r.queued for r in done])
        figures |= latencies("e2el_including_client_queue", [r.e2el + r.queued for r in done])
    return figures
