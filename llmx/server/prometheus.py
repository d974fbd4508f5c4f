"""Prometheus' text format: counters, gauges and histograms, with labels. https://prometheus.io/docs/instrumenting/"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Counter:
    """A family of numbers by label values. As a gauge it is `set`, as a counter it only grows."""

    kind = "counter"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.values: dict[tuple[tuple[str, str], ...], float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self.values[key] = self.values.get(key, 0) + amount

    def lines(self, common: Labels) -> Iterator[str]:
        for key, value in self.values.items():
            yield f"{self.name}{_shown({**common, **dict(key)})} {value:.10g}"


class Gauge(Counter):
    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        self.values[tuple(labels.items())] = value


class Histogram:
    """How often values fell under each of the `bounds`, which ascend, their sum and their number."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, common: Labels) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f"{self.name}_bucket{_shown({**common, 'le': str(bound)})} {total}"
        yield f"{self.name}_sum{_shown(common)} {self.sum:.10g}"
        yield f"{self.name}_count{_shown(common)} {total}"


Family = Counter | Histogram


def exposition(families: Sequence[Family], common: Labels) -> str:
    """All families as Prometheus scrapes them; `common` are labels of every sample."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += family.lines(common)
    return "\n".join(lines) + "\n"


def _shown(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
