"""Gates: conditions on a report's figures that fail a command, such as `--fail-if 'kld.mean>0.05'`.

gates = parse_gates(expressions)            # before the run: UsageError where one is malformed
verdicts = judge(gates, results)            # after it: UsageError where a figure doesn't exist
... write the report, the verdicts in it ...
enforce(verdicts)                           # CheckFailed, exit code 3, where one of them holds
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmx.errors import CheckFailed, UsageError

OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "seconds": 1.0, "min": 60.0}
FORM = "Write a figure, one of > >= < <= == !=, and a number: kld.mean>0.05, ttft_ms.p99>=0.5s, same_top.share<95%."
_SHAPE = re.compile(
    r"\s*(?P<path>[A-Za-z_][\w.\-]*?)\s*(?P<op>>=|<=|==|!=|>|<)\s*"
    r"(?P<number>[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>%|[A-Za-z]+)?\s*"
)


@dataclass(frozen=True)
class Gate:
    """`text` as it was written; it fails where figure `op` bound holds. A figure is named by its dotted path."""

    text: str
    path: str
    op: str
    bound: float


@dataclass(frozen=True)
class Verdict:
    """A gate and the figure it was held against: `path` in full; `value` None where it wasn't measured."""

    expression: str
    figure: str
    value: float | None
    bound: float
    failed: bool
    says: str


def parse_gates(expressions: Iterable[str] | None) -> tuple[Gate, ...]:
    """UsageError for one that isn't `path op number`. `5%` is 0.05; `0.5s` is 500 for a figure named in `_ms`."""
    return tuple(_parse(text) for text in expressions or ())


def _parse(text: str) -> Gate:
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise UsageError(f"--fail-if {text!r} is not a condition.", FORM)
    path, unit = found["path"], found["unit"]
    if ".." in path or path.endswith("."):
        raise UsageError(f"--fail-if {text!r}: {path!r} is not the path of a figure.", FORM)
    bound = float(found["number"])
    if not math.isfinite(bound):
        raise UsageError(f"--fail-if {text!r}: the bound is not a finite number.", FORM)
    if unit == "%":
        bound /= 100
    elif unit is not None:
        bound *= _factor(text, path, unit)
    return Gate(text, path, found["op"], bound)


def _factor(text: str, path: str, unit: str) -> float:
    """From the bound's unit to the one in the figure's name."""
    if unit not in SECONDS:
        raise UsageError(f"--fail-if {text!r}: the unit {unit!r} is not known.", f"known: %, {', '.join(SECONDS)}")
    named = [part.rpartition("_")[2] for part in path.split(".")]
    own = next((name for name in reversed(named) if name in SECONDS), None)
    if own is None:
        raise UsageError(f"--fail-if {text!r}: {path} is not a time by its name.", "leave the unit out")
    return SECONDS[unit] / SECONDS[own]


def figures(results: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float | None]]:
    """Each number of nested results by its dotted path; a measured value {"mean": .., ..} also by its own path."""
    for key, value in results.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            if "mean" in value:
                yield path, _number(value["mean"])
            yield from figures(value, path + ".")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path, _number(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def require(gates: Sequence[Gate], names: Iterable[str]) -> None:
    """UsageError where a gate names no figure of these: for a command that knows its figures before it runs."""
    every = list(names)
    for gate in gates:
        _resolve(gate, every)


def judge(gates: Sequence[Gate], results: Mapping[str, Any]) -> list[Verdict]:
    """Each gate against its figure. UsageError where there is no such figure, or several.

    A path may leave out leading parts as long as one figure alone ends with it. A figure that wasn't measured, or isn't
    a finite number, fails its gate: it can't be shown to hold.
    """
    known = dict(figures(results))
    return [_verdict(gate, path, known[path]) for gate in gates for path in [_resolve(gate, list(known))]]


def _resolve(gate: Gate, names: Sequence[str]) -> str:
    if gate.path in names:
        return gate.path
    ends = [name for name in names if name.endswith(f".{gate.path}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise UsageError(f"--fail-if {gate.text!r}: {gate.path} is any of {', '.join(ends)}.", "write the whole path")
    last = gate.path.rpartition(".")[2]
    near = difflib.get_close_matches(gate.path, names, 5, 0.5) or [n for n in names if n.endswith(last)][:5]
    tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = (f"close: {', '.join(near)}; " if near else "") + f"the report's parts: {tops or 'none'}"
    raise UsageError(f"--fail-if {gate.text!r}: this report has no figure {gate.path}.", hint)


def _verdict(gate: Gate, path: str, value: float | None) -> Verdict:
    if value is None:
        return Verdict(gate.text, path, None, gate.bound, True, f"{path} was not measured ({gate.text})")
    failed = bool(OPERATORS[gate.op](value, gate.bound))
    return Verdict(gate.text, path, value, gate.bound, failed, _says(gate, path, value, failed))


def _says(gate: Gate, path: str, value: float, failed: bool) -> str:
    """`kld.mean is 0.0612: 0.0112 (22.4 %) above the bound 0.05 (kld.mean>0.05)`."""
    gap = value - gate.bound
    near = gate.bound and abs(gap / gate.bound) < 10
    share = f" ({100 * abs(gap / gate.bound):.3g} %)" if near else ""
    where = f"{abs(gap):.4g}{share} {'above' if gap > 0 else 'below'}" if gap else "at"
    return f"{path} is {value:.6g}: {where} the bound {gate.bound:.6g} ({gate.text})"


def enforce(verdicts: Sequence[Verdict]) -> None:
    """CheckFailed that names each failed gate's figure, its bound, and by how much it is off."""
    failed = [verdict.says for verdict in verdicts if verdict.failed]
    if failed:
        what = "A gate" if len(failed) == 1 else f"{len(failed)} of {len(verdicts)} gates"
        raise CheckFailed(f"{what} failed: {'; '.join(failed)}.")
