"""Two reports of one command, figure by figure: what changed, for better or worse, and what else differs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import CheckFailed, UsageError

# By the path's end. What is in neither is no figure of merit, and isn't compared.
HIGHER = re.compile(
    r"(throughput|goodput|tokens_per_second(\.mean)?|attainment|kv_utilisation|same_top\.share|nll_correlation"
    r"|(acc|acc_norm|exact_match|f1|pass@\d+)(,[\w-]+)?(\.mean)?|acceptance_rate|acceptance_length|lower_by"
    r"|throughput_ratio)$"
)
LOWER = re.compile(
    r"(\w+_ms\.(mean|p\d+|adj_p\d+)|failed|preemptions|peak\w*_memory_bytes|(perplexity|nll|ppl_ratio)\.mean"
    r"|kld\.(mean|median|max|p9[\d.]+)|delta_p\.rms)$"
)
LEFT_OUT = re.compile(r"(^|\.)(sd|client|slo\.limits_ms|ceilings)(\.|$)|icl_ms|ttfb_ms|client_queue_time_ms")
SHOWN_DIFFERENCES = 24


@dataclass(frozen=True)
class Change:
    """One figure in both reports. `worse`: by which share of the old value it got worse; below 0: better.

    sd: of the old and the new value over repetitions, None where they weren't repeated."""

    path: str
    old: float
    new: float
    higher_is_better: bool
    sd: tuple[float | None, float | None]

    @property
    def relative(self) -> float:
        """(new - old) / |old|; infinite where something came of nothing."""
        gap = self.new - self.old
        if gap == 0 or math.isnan(gap):
            return 0.0
        return gap / abs(self.old) if self.old else math.copysign(math.inf, gap)

    @property
    def worse(self) -> float:
        return -self.relative if self.higher_is_better else self.relative


def read_report(path: Path, command: str | None = None) -> dict[str, Any]:
    """A report of llmx, of `command` if that is given. UsageError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON.") from None
    if not isinstance(document, dict) or not isinstance(document.get("results"), dict) or "command" not in document:
        raise UsageError(f"{path} is not a report of llmx.")
    if command is not None and document["command"] != command:
        raise UsageError(f"{path} is a report of `llmx {document['command']}`, not of `llmx {command}`.")
    return document


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """UsageError for reports of different commands, or of versions that name their figures differently."""
    for key, what in (("command", "commands"), ("schema_version", "versions of the report")):
        if old.get(key) != new.get(key):
            raise UsageError(f"These are of different {what}, {old.get(key)} and {new.get(key)}: nothing to compare.")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every figure of merit that both results have, in the order of the new ones."""
    before, after = _by_path(old), _by_path(new)
    found = []
    for path, (value, sd) in after.items():
        higher = bool(HIGHER.search(path))
        if path in before and (higher or LOWER.search(path)):
            found.append(Change(path, before[path][0], value, higher, (before[path][1], sd)))
    return found


def _by_path(results: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    return {path: (value, sd) for path, value, sd in _walk(results, "", {}) if not LEFT_OUT.search(path)}


def _walk(
    values: Mapping[str, Any], above: str, deviations: Mapping[str, Any]
) -> Iterator[tuple[str, float, float | None]]:
    """(path, value, its deviation or standard error). `deviations` has the shape of `values`; an `sd` within them wins.
    A measured value {"mean", "sd" or "se", ..} has its own."""
    own = values.get("sd")
    deviations = own if isinstance(own, Mapping) else deviations
    error = _number(values.get("se", own)) if "mean" in values else None
    for key, value in values.items():
        spread = deviations.get(key)
        if isinstance(value, Mapping):
            yield from _walk(value, f"{above}{key}.", spread if isinstance(spread, Mapping) else {})
        elif (number := _number(value)) is not None:
            yield f"{above}{key}", number, error if key == "mean" and error is not None else _number(spread)


def _number(value: Any) -> float | None:
    if value == "inf":
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What else differs between two reports: machine, versions, model, kernels, flags, seeds; a line each."""
    found = []
    for part in ("tool_version", "environment", "model", "kernels", "seeds"):
        before, after = dict(_flat(old.get(part), part)), dict(_flat(new.get(part), part))
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        found += [f"{key}: {before.get(key)} → {after.get(key)}" for key in keys if not key.endswith("load_seconds")]
    flags = [" ".join(map(str, (report.get("argv") or [""])[1:])) for report in (old, new)]
    if flags[0] != flags[1]:
        found.append(f"flags: {flags[0]} → {flags[1]}")
    rest = len(found) - SHOWN_DIFFERENCES
    return found[:SHOWN_DIFFERENCES] + ([f"and {rest} more"] if rest > 0 else [])


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}")
    else:
        yield path, str(value)


def parse_bound(text: str, flag: str) -> float:
    """`5%` or `0.05` as 0.05. UsageError for anything else, and for `5`, which would be 500 %."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text, re.ASCII)
    if match is None:
        raise UsageError(f"{flag} must be a share like 5% or 0.05, not {text!r}.")
    share = float(match[1]) / (100 if match[2] else 1)
    if share > 1 and not match[2]:
        raise UsageError(f"{flag} {text} is a share of {100 * share:g} %.", f"Write {text.strip()}% if that is meant.")
    return share


def regressions(found: Sequence[Change], bound: float) -> list[str]:
    """A sentence for each figure that is worse by more than `bound`, the worst first."""
    worse = sorted((change for change in found if change.worse > bound), key=lambda change: -change.worse)
    return [
        f"{c.path} went from {c.old:.6g} to {c.new:.6g}: {_percent(c.worse)} worse, the bound is {_percent(bound)}"
        for c in worse
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "infinitely"


def enforce(sentences: Sequence[str]) -> None:
    """CheckFailed where there are any."""
    if sentences:
        raise CheckFailed(f"Worse than before: {'; '.join(sentences)}.")
