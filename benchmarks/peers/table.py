"""What the rounds say: medians, ratios to the peers within rounds, and a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

OURS = "llmx"  # names of our columns begin so
TITLES = {
    "prefill": "prefill 512",
    "decode": "decode, 1 request",
    "batch": "32 × (128 + 128), output tokens/s",
    "http": "the same through HTTP",
}


def by_round(samples: list[dict[str, Any]]) -> dict[int, float]:
    return {sample["round"]: sample["value"] for sample in samples}


def summary(contenders: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of one row: each contender's median and range; ours against each peer, as medians of quotients within rounds."""
    found: dict[str, Any] = {}
    for name, samples in contenders.items():
        values = [sample["value"] for sample in samples]
        if values:
            found[name] = {
                "median": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "rounds": len(values),
            }
    peers = [name for name in found if not name.startswith(OURS)]
    best = max(peers, key=lambda name: found[name]["median"], default=None)
    for name in [name for name in found if name.startswith(OURS)]:
        ours = by_round(list(contenders[name]))
        ratios = {}
        for peer in peers:
            theirs = by_round(list(contenders[peer]))
            quotients = [ours[i] / theirs[i] for i in ours if i in theirs]
            if quotients:
                ratios[peer] = statistics.median(quotients)
        found[name] |= {"ratios": ratios, "best_peer": best, "to_best_peer": ratios.get(best or "")}
    return found


def bandwidth_shares(one: Mapping[str, Any], probes: list[dict[str, Any]]) -> dict[str, Any]:
    """Decode rate x bytes that a pass reads, as a share of the read bandwidth probed in the same round."""
    read = {probe["round"]: probe["read_bandwidth"] for probe in probes}
    found = {}
    for name, samples in one["rows"].get("decode", {}).items():
        rates = {i: value * one["pass_bytes"] for i, value in by_round(samples).items() if i in read}
        if rates:
            found[name] = {
                "bytes_per_second": statistics.median(rates.values()),
                "share": statistics.median(rate / read[i] for i, rate in rates.items()),
            }
    return found


def summaries(state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, one in state["models"].items():
        found[key] = {row: summary(contenders) for row, contenders in one["rows"].items()}
        if one.get("pass_bytes") and "decode" in one["rows"]:
            found[key]["bandwidth"] = bandwidth_shares(one, state["probes"])
    return found


def markdown(state: Mapping[str, Any]) -> str:
    totals = summaries(state)
    lines = ["# llmx and its peers on one machine", "", *_machine(state), ""]
    rows = [row for one in state["models"].values() for row in one["rows"].values()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if names:
        lines += [_line(["tokens/s, median (range)", *names, "llmx / best peer"]), _line(["---"] * (len(names) + 2))]
    for key, one in state["models"].items():
        for row in one["rows"]:
            lines.append(_row(f"{one['title']}, {TITLES[row]}", totals[key][row], names))
    lines += ["", *_shares(state, totals), *_notes(state)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _row(title: str, found: Mapping[str, Any], names: list[str]) -> str:
    cells = [title]
    for name in names:
        if name not in found:
            cells.append("–")
            continue
        one = found[name]
        few = f", {one['rounds']} rounds" if one["rounds"] < max(other["rounds"] for other in found.values()) else ""
        cells.append(f"{_number(one['median'])} ({_number(one['low'])}–{_number(one['high'])}{few})")
    ours = [(name, found[name]) for name in names if name.startswith(OURS) and name in found]
    said = [
        f"{one['to_best_peer']:.2f}× {one['best_peer']}" + (f" ({name.removeprefix(OURS).strip()})" if i else "")
        for i, (name, one) in enumerate(ours)
        if one.get("to_best_peer")
    ]
    return _line([*cells, "; ".join(said) or "–"])


def _shares(state: Mapping[str, Any], totals: Mapping[str, Any]) -> list[str]:
    lines = [
        f"* {state['models'][key]['title']}: {name} reads {one['bytes_per_second'] / 1e9:.1f} GB/s in decoding, "
        f"{100 * one['share']:.0f} % of the read bandwidth measured in the same rounds."
        for key, total in totals.items()
        if key.startswith("1b")
        for name, one in total.get("bandwidth", {}).items()
    ]
    return [*lines, ""] if lines else []


def _machine(state: Mapping[str, Any]) -> list[str]:
    about, probes = state["machine"], state["probes"]
    cpu = f"{about['cpu']['model']} ({', '.join(about['cpu']['isa'])})"
    lines = [f"{cpu}; {about['usable_processors']} processors used; {state['started']}; llmx {state['commit']}.", ""]
    if probes:
        read = [probe["read_bandwidth"] / 1e9 for probe in probes]
        trips = [probe["round_trip_ns"] for probe in probes if probe["round_trip_ns"]]
        loads = [probe["load"] for probe in probes]
        lines.append(
            f"Over {len(probes)} probes: read bandwidth {min(read):.0f}–{max(read):.0f} GB/s, load {min(loads):.1f}–"
            f"{max(loads):.1f}" + (f", line round trip {min(trips):.0f}–{max(trips):.0f} ns" if trips else "") + "."
        )
    return lines


def _notes(state: Mapping[str, Any]) -> list[str]:
    lines = ["How each row is measured:", "", *(f"* {TITLES[row]}: {how}" for row, how in state["how"].items()), ""]
    told = []
    for one in state["models"].values():
        told += [f"* {one['title']}: {one['made']}."]
        told += [f"* {one['title']}, {name}: {_agreement(found)}" for name, found in one["checks"].items()]
        told += [f"* {one['title']}, {name}: not measured: {why}" for name, why in one["missing"].items()]
    return [*lines, "Models, outputs, and what is missing:", "", *told]


def _agreement(found: Mapping[str, Any]) -> str:
    parted = [one for one in found["prompts"] if "parts_at" in one]
    if not parted:
        return f"{found['tokens']} greedy tokens behind each of {len(found['prompts'])} prompts are llmx's."
    said = ", ".join(
        f"{one['margin']:.2f} nats (token {one['parts_at'] + 1})" if one["margin"] is not None else "beyond its 20 best"
        for one in parted
    )
    return (
        f"parts from llmx's greedy text in {len(parted)} of {len(found['prompts'])} prompts, where llmx prefers its "
        f"own token by {said}."
    )
