"""What was seen of each request, and the figures that follow from it. Pure: no engine, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmx.bench.stats import latencies, share


@dataclass
class Record:
    """One request as its client saw it, in seconds. `arrivals`: (clock, tokens) of each delta that held tokens."""

    input_len: int
    wanted: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    @property
    def output_len(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def completed(self) -> bool:
        return self.ended and self.error is None and self.output_len == self.wanted

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
    def chunk_gaps(self) -> list[tuple[float, int]]:
        """(wait, tokens) of each delta but the first."""
        times = self.arrivals
        return [(times[i][0] - times[i - 1][0], times[i][1]) for i in range(1, len(times))]

    @property
    def token_gaps(self) -> list[float]:
        return [wait / tokens for wait, tokens in self.chunk_gaps for _ in range(tokens)]


def steady(records: Sequence[Record], concurrency: int) -> dict[str, float | None]:
    """Output rate over the time in which `concurrency` requests were in flight: ramp-up and tail cut off."""
    if len(records) < concurrency or not all(record.completed for record in records):
        return {"seconds": None, "output_throughput": None}
    begin = sorted(record.sent for record in records)[concurrency - 1]
    end = sorted(record.arrivals[-1][0] for record in records)[-concurrency]  # no new request takes this one's place
    if end <= begin:
        return {"seconds": None, "output_throughput": None}
    tokens = sum(n for record in records for when, n in record.arrivals if begin < when <= end)
    return {"seconds": end - begin, "output_throughput": tokens / (end - begin)}


def serving_figures(records: Sequence[Record], concurrency: int) -> dict[str, object]:
    """The figures of `vllm bench serve`, under its names, over the completed requests."""
    done = [record for record in records if record.completed]
    failed = [record for record in records if record.ended and not record.completed]
    inputs, outputs = sum(r.input_len for r in done), sum(r.output_len for r in done)
    began = min((r.sent for r in records), default=0.0)
    duration = max((r.arrivals[-1][0] for r in records if r.arrivals), default=began) - began
    figures: dict[str, object] = {
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
        "concurrency_mean": share(sum(r.e2el for r in done), duration),
        "steady": steady(records, concurrency),
        "errors": sorted({r.error for r in failed if r.error}),
    }
    figures |= latencies("ttft", [r.ttft for r in done])
    figures |= latencies("tpot", [r.tpot for r in done if r.tpot is not None])
    figures |= latencies("itl", [gap for r in done for gap in r.token_gaps])
    figures |= latencies("icl", [gap for r in done for gap, _ in r.chunk_gaps])
    figures |= latencies("e2el", [r.e2el for r in done])
    return figures
