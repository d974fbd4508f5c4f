"""What `llmx inspect` found, as figures for a report and as tables to read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmx.inspect.contents import KINDS, Entry
from llmx.inspect.examine import Examined, Stats
from llmx.inspect.findings import CHECKS, LEVELS, Finding, sorts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NAMED = 3  # findings of one sort that are named beside the first
DEFINITIONS = {
    "tensors.bits": "effective bits of a weight: all that belongs to its linear (scales, zero points, indices) counted",
    "tensors.weights": "weights that a tensor holds; 0 for scales and the like",
    "totals.bits_per_weight": "bytes of the tensors times 8, by the weights in them",
    "ranks": "engine -> number of tensor-parallel ranks -> why not; null: it fits",
    "findings.level": "error: wrong or unreadable; warning: odd, or refused by other engines",
} | {f"findings.check.{name}": text for name, text in CHECKS.items()}


def figures(found: Examined) -> dict[str, Any]:
    """What a report's `results` holds: every tensor, whatever a table shows."""
    entries = found.contents.entries
    counts = Counter(finding.level for finding in found.findings)
    return {
        "format": found.contents.checkpoint.kind,
        "schemes": schemes(entries),
        "settings": dict(found.contents.settings),
        "totals": totals(entries),
        "findings": [vars(finding) for finding in found.findings],
        "errors": counts["error"],
        "warnings": counts["warning"],
        "ranks": {engine: {str(size): why for size, why in sizes.items()} for engine, sizes in found.ranks.items()},
        "unchecked": found.unchecked,
        "tensors": [_figures(entry, found) for entry in entries],
    }


def _figures(entry: Entry, found: Examined) -> dict[str, Any]:
    stored = entry.stored
    facts: dict[str, Any] = {
        "name": stored.name, "shape": list(stored.shape), "dtype": stored.kind, "bytes": stored.nbytes,
        "kind": entry.kind, "scheme": entry.scheme, "weights": entry.weights, "bits": entry.bits,
        "file": found.contents.checkpoint.region(stored.name).file.path.name,
    }  # fmt: skip
    if stored.name in found.stats:
        facts["stats"] = found.stats[stored.name]
    return facts


def schemes(entries: Sequence[Entry]) -> dict[str, int]:
    """Scheme -> matrices that are stored in it, most first."""
    return dict(Counter(entry.scheme for entry in entries if entry.weights and len(entry.shape) > 1).most_common())


def totals(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """By kind, and of all."""
    return {
        kind: _total(some)
        for kind in (*KINDS, "all")
        if (some := [entry for entry in entries if kind in (entry.kind, "all")])
    }


def _total(entries: Sequence[Entry]) -> dict[str, Any]:
    weights, size = sum(entry.weights for entry in entries), sum(entry.stored.nbytes for entry in entries)
    bits = 8 * size / weights if weights else None
    return {"tensors": len(entries), "weights": weights, "bytes": size, "bits_per_weight": bits}


def show(console: Console, found: Examined, pattern: str | None) -> None:
    """pattern: list the stored tensors whose names match it, one by one; None: matrices and vectors, those of alike
    layers in one line."""
    entries = found.contents.entries
    if entries and pattern is None:
        console.print(_overview(entries, found.stats))
        console.print("--tensors '*' lists every stored tensor.", style="dim")
    elif pattern is not None:
        console.print(_each(found.contents.matching(pattern), found.stats))
    if entries:
        console.print(_totals(entries))
    for line in _facts(found):
        console.print(line, highlight=False, markup=False)
    for line in findings(found.findings):
        console.print(line, highlight=False, markup=False)


def _table(title: str, *columns: str, stats: bool = False) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in (*columns, *(("min", "max", "rms") if stats else ())):
        left = name in ("tensor", "stored as", "kind")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


def _overview(entries: Sequence[Entry], stats: Stats) -> Table:
    """Entries that hold weights; those of layers that differ in nothing but their number together."""
    same: dict[tuple[str, str, tuple[int, ...], float | None], list[Entry]] = {}
    for entry in entries:
        if entry.weights:
            name = entry.stored.name if entry.bits is None or entry.part in ("weight", "bias") else entry.module
            key = (re.sub(r"\.\d+\.", ".*.", name, count=1), entry.scheme, entry.shape, entry.bits)
            same.setdefault(key, []).append(entry)
    table = _table("tensors", "tensor", "layers", "shape", "stored as", "MB", "bits", stats=bool(stats))
    sizes = Counter[tuple[str, ...]]()
    for entry in entries:
        sizes[(entry.module, "bias" if entry.part == "bias" else "")] += entry.stored.nbytes
    for (name, scheme, shape, bits), some in same.items():
        size = sum(sizes[(entry.module, "bias" if entry.part == "bias" else "")] for entry in some)
        cells = [name, _layers(some) if ".*." in name else "", _by(shape), scheme, _mb(size), _bits(bits)]
        table.add_row(*cells, *(_joined(some, stats) if stats else ()))
    return table


def _each(entries: Sequence[Entry], stats: Stats) -> Table:
    table = _table("tensors", "tensor", "shape", "stored as", "MB", "bits", stats=bool(stats))
    for entry in entries:
        stored = entry.stored
        how = stored.kind if entry.scheme == stored.kind else f"{stored.kind} ({entry.scheme})"
        cells = [stored.name, _by(stored.shape), how, _mb(stored.nbytes), _bits(entry.bits)]
        table.add_row(*cells, *(_joined([entry], stats) if stats else ()))
    return table


def _joined(entries: Sequence[Entry], stats: Stats) -> tuple[str, str, str]:
    """Least, largest and root mean square of several tensors of one size."""
    known = [stats[entry.stored.name] for entry in entries if entry.stored.name in stats]
    least = [float(one["min"]) for one in known if one["min"] is not None]
    most = [float(one["max"]) for one in known if one["max"] is not None]
    squares = [float(one["rms"]) ** 2 for one in known if one["rms"] is not None]
    if not least:
        return "", "", ""
    return f"{min(least):.4g}", f"{max(most):.4g}", f"{(sum(squares) / len(squares)) ** 0.5:.4g}"


def _layers(entries: Sequence[Entry]) -> str:
    """ "0-29", or "0-3, 7"."""
    numbers = sorted({int(match[1]) for entry in entries if (match := re.search(r"\.(\d+)\.", entry.stored.name))})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _totals(entries: Sequence[Entry]) -> Table:
    table = _table("totals", "kind", "tensors", "weights", "MB", "bits")
    for kind, total in totals(entries).items():
        if kind == "all":
            table.add_section()
        table.add_row(kind, f"{total['tensors']:,}", f"{total['weights']:,}", _mb(total["bytes"]),
                      _bits(total["bits_per_weight"]))  # fmt: skip
    return table


def _facts(found: Examined) -> Iterator[str]:
    known = schemes(found.contents.entries)
    if known:
        yield "matrices: " + ", ".join(f"{count:,} in {name}" for name, count in known.items())
    settings = {key: value for key, value in found.contents.settings.items() if isinstance(value, str | int | float)}
    if settings:
        yield "quantization_config: " + ", ".join(f"{key} {value}" for key, value in settings.items())
    for engine, sizes in found.ranks.items():
        fits = [str(size) for size, why in sizes.items() if why is None]
        yield f"tensor-parallel ranks in {engine}: {', '.join(fits) or 'none'} of {', '.join(map(str, sizes))} fit"
        reasons: dict[str, list[str]] = {}
        for size, why in sizes.items():
            if why is not None:
                reasons.setdefault(why, []).append(str(size))
        yield from (f"  not {', '.join(some)}: {why}" for why, some in reasons.items())
    yield from (f"not checked: {what}" for what in found.unchecked)


def findings(found: Sequence[Finding]) -> Iterator[str]:
    """Each sort once, with the tensors that have it, errors first; then how many there are."""
    for same in sorts(found):
        first = same[0]
        yield f"{first.level} ({first.check}): {first.message}"
        if len(same) > 1:
            others = list(dict.fromkeys(one.tensor for one in same[1:]))
            more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
            yield f"  the same of {', '.join(others[:NAMED])}{more}"
        if first.hint:
            yield f"  hint: {first.hint}"
    counts = [(sum(one.level == level for one in found), level) for level in reversed(LEVELS)]
    yield ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for count, level in counts)


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}" if size >= 50_000 else f"{size / 1e6:.4f}"


def _bits(bits: float | None) -> str:
    return "" if bits is None else f"{bits:.2f}"
