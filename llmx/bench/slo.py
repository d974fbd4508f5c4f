"""Service-level objectives: limits on a request's times, those of MLPerf by name, and the share of requests within."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmx.bench.records import Record
from llmx.bench.stats import adjusted, share
from llmx.errors import UsageError

METRICS = ("ttft", "tpot", "e2el")
# MLPerf Inference 6.1 (mlperf.conf): milliseconds of TTFT and TPOT that the 99th percentile must keep, and of qwen3-vl
# the whole time.
MLPERF: dict[str, dict[str, float]] = {
    "llama2-70b": {"ttft": 2000, "tpot": 200},
    "llama2-70b-interactive": {"ttft": 450, "tpot": 40},
    "llama3.1-8b": {"ttft": 2000, "tpot": 100},
    "llama3.1-8b-interactive": {"ttft": 500, "tpot": 30},
    "llama3.1-405b": {"ttft": 6000, "tpot": 175},
    "llama3.1-405b-interactive": {"ttft": 4500, "tpot": 80},
    "mixtral-8x7b": {"ttft": 2000, "tpot": 200},
    "deepseek-r1": {"ttft": 2000, "tpot": 80},
    "deepseek-r1-interactive": {"ttft": 1500, "tpot": 15},
    "gpt-oss-120b": {"ttft": 3000, "tpot": 80},
    "gpt-oss-120b-interactive": {"ttft": 2000, "tpot": 15},
    "qwen3-vl": {"e2el": 12000},
}


def parse_slo(texts: Iterable[str] | None) -> dict[str, float]:
    """`ttft:500,tpot:50` (milliseconds) or `mlperf:llama3.1-8b-interactive`; the last word on a metric counts."""
    limits: dict[str, float] = {}
    for item in re.split(r"[,\s]+", " ".join(texts or ()).strip()):
        name, colon, value = item.partition(":")
        if name == "mlperf":
            limits |= _preset(value)
        elif item:
            limits[name] = _limit(item, name, value if colon else "")
    return limits


def _preset(name: str) -> dict[str, float]:
    found = MLPERF.get(name.removesuffix("-server"))
    if found is None:
        near = difflib.get_close_matches(name, MLPERF, 3)
        raise UsageError(f"--slo mlperf:{name} is not known.", f"There are {', '.join(near or MLPERF)}.")
    return found


def _limit(item: str, name: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if name not in METRICS or not 0 < limit < math.inf:
        raise UsageError(
            f"--slo {item!r} is no limit.", f"Write {', '.join(METRICS)} and milliseconds: ttft:500,tpot:50."
        )
    return limit


def times(record: Record) -> dict[str, float]:
    """Milliseconds of a completed request. One token has no time per token: 0, as vLLM counts it here."""
    return {"ttft": 1e3 * record.ttft, "tpot": 1e3 * (record.tpot or 0.0), "e2el": 1e3 * record.e2el}


def goodput(records: Sequence[Record], limits: Mapping[str, float], duration: float) -> dict[str, Any]:
    """Requests per second that kept all `limits`, and which share of the ended ones kept each. A failure keeps none."""
    ended = [record for record in records if record.ended]
    done = [times(record) for record in ended if record.completed]
    good = sum(all(one[name] <= limit for name, limit in limits.items()) for one in done)
    p99 = {name: adjusted([one[name] / 1e3 for one in done], len(ended) - len(done), 99) for name in limits}
    return {
        "request_goodput": share(good, duration),
        "slo": {
            "limits_ms": dict(limits),
            "attainment": share(good, len(ended)),
            "attainment_by_metric": {
                name: share(sum(one[name] <= limit for one in done), len(ended)) for name, limit in limits.items()
            },
            "kept_at_p99": all(value is not None and value <= limits[name] for name, value in p99.items()),
        },
    }
