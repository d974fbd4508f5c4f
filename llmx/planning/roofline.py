"""Seconds of a step: for each part the larger of bytes / bandwidth and flops / peak, plus communication and overheads.

Williams, Waterman & Patterson, "Roofline", CACM 2009. Ring all-reduce: 2 (p - 1) / p of the bytes pass each link.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from llmx.planning.anatomy import Anatomy, Attention, Layer
from llmx.planning.hardware import LINK_LATENCY, NETWORK_LATENCY, Hardware
from llmx.planning.sizes import Layout, Load, held, share
from llmx.planning.storage import PLAIN


@dataclass(frozen=True)
class Term:
    """A part of a step: its seconds, and how they come about, with the numbers."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class Rows:
    """One step of one replica. tokens: rows computed; sampled: of them, those whose logits are wanted.

    sequences of `context` keys each (those of this step included) that the rows are the last of, evenly.
    """

    tokens: int
    sampled: int
    sequences: int
    context: float

    @property
    def each(self) -> float:
        return self.tokens / self.sequences


def si(value: float, unit: str) -> str:
    """1.34e9 bytes: "1.34 GB"."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def milli(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def step(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load, rows: Rows) -> list[Term]:
    """All parts of a step's time, through every stage one after the other."""
    return [
        *_products(anatomy, layout, hardware, rows),
        _attention(anatomy, layout, hardware, load, rows),
        _between(anatomy, layout, hardware, rows),
        *_communication(anatomy, layout, hardware, rows),
        _overhead(anatomy, layout, hardware, rows),
    ]


def total(terms: list[Term]) -> float:
    return sum(term.seconds for term in terms)


def touched(layer: Layer, rows: float) -> float:
    """Share of the experts that at least one of so many tokens goes to, if they choose evenly."""
    missed: float = (1 - layer.active / layer.experts) ** rows
    return 1 - missed


def _products(anatomy: Anatomy, layout: Layout, hardware: Hardware, rows: Rows) -> list[Term]:
    """Linears by kind. With EP the experts on a rank see the tokens of all replicas."""
    read: dict[tuple[str, str], float] = defaultdict(float)
    flops: dict[tuple[str, str], float] = defaultdict(float)
    padded = -(-rows.tokens // hardware.rates.rows) * hardware.rates.rows
    for layer, where in anatomy.alike.items():
        for m in layer.matrices:
            if m.n_in == 1:
                continue
            arithmetic = "bf16" if m.storage is None or hardware.held else m.storage.arithmetic
            key, part = (m.kind, arithmetic), share(m, anatomy, layout)
            size, work = held(m, anatomy, hardware) * part, 2.0 * m.n_out * m.n_in * m.count * part * padded
            if m.kind == "experts":
                many = rows.tokens * (layout.dp if layout.ep > 1 else 1)
                size *= touched(layer, many)
                work *= layer.active / layer.experts * many / rows.tokens
            read[key] += size * len(where)
            flops[key] += work * len(where)
    terms = [
        _roof(key[0], read[key], hardware.rates.bandwidth, flops[key], hardware.rates.flops[key[1]]) for key in read
    ]
    top = anatomy.head
    if rows.sampled:
        size = top.parameters * hardware.held if hardware.held else top.nbytes(PLAIN[anatomy.dtype])
        sampled = -(-rows.sampled // hardware.rates.rows) * hardware.rates.rows
        work = 2.0 * top.n_out * top.n_in * sampled / layout.tp
        rates = hardware.rates
        terms.append(_roof("head", size / layout.tp, rates.head_bandwidth, work, rates.flops["bf16"]))
    return terms


def _roof(name: str, size: float, bandwidth: float, work: float, peak: float) -> Term:
    seconds = max(size / bandwidth, work / peak)
    formula = f"max({si(size, 'B')} / {si(bandwidth, 'B/s')}, {si(work, 'flop')} / {si(peak, 'flop/s')})"
    return Term(name, seconds, formula)


def pairs(attention: Attention, each: float, context: float) -> float:
    """(query, key) pairs of the last `each` tokens of a sequence of `context`: causal, within the window."""
    before = context - each
    if attention.window is None or context <= attention.window:
        return each * (before + (each + 1) / 2)
    window = attention.window
    growing = max(0.0, window - before)  # queries that do not have a whole window behind them yet
    return growing * (before + (growing + 1) / 2) + (each - growing) * window


def _attention(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load, rows: Rows) -> Term:
    size = work = 0.0
    for layer, where in anatomy.alike.items():
        a, count = layer.attention, len(where)
        seen = rows.context if a.window is None else min(rows.context, a.window + rows.each - 1)
        size += count * rows.sequences * seen * a.kept(load.kv_bytes, load.kv_scales, layout.tp)
        work += count * rows.sequences * 2.0 * a.score * a.heads / layout.tp * pairs(a, rows.each, rows.context)
    rates = hardware.rates
    if rows.each > 1:  # a prompt's keys serve many queries at once: arithmetic, and one read
        return _roof("attention scores", size, rates.bandwidth, work, rates.attention_flops)
    return _roof("attention scores", size, rates.attention_bandwidth, work, rates.flops["bf16"])


def _between(anatomy: Anatomy, layout: Layout, hardware: Hardware, rows: Rows) -> Term:
    """Norms, rotary turns, activations, residuals: each reads and writes rows."""
    each = (len(where) * row_bytes(layer, anatomy, layout, hardware) for layer, where in anatomy.alike.items())
    size = rows.tokens * sum(each)
    bandwidth = hardware.rates.elementwise
    formula = f"{si(size, 'B')} / {si(bandwidth, 'B/s')}"
    return Term("between the products", size / bandwidth, formula)


def row_bytes(layer: Layer, anatomy: Anatomy, layout: Layout, hardware: Hardware) -> float:
    """Of activations that one token moves in a layer: two for each norm and residual sum, three for the activation."""
    width = 4 if hardware.held else 2
    a = layer.attention
    wide = (2 * anatomy.norms + 4) * anatomy.hidden
    heads = 2 * (a.heads * a.key / layout.tp + a.elements(layout.tp))
    return width * (wide + heads + 3 * layer.inner / (layout.tp if layout.ep == 1 else 1))


def _communication(anatomy: Anatomy, layout: Layout, hardware: Hardware, rows: Rows) -> list[Term]:
    found = []
    rates, row = hardware.rates, anatomy.hidden * 2
    size = rows.tokens * row
    if (p := layout.tp) > 1:
        count = 2 * len(anatomy.layers) + 1  # after attention and after the MLP; and the embedding's
        if layout.ep > 1:
            count -= sum(layer.experts > 0 for layer in anatomy.layers)  # their sum is the all-to-all's way back
        each = 2 * (p - 1) / p * size / rates.link + 2 * (p - 1) * LINK_LATENCY
        formula = (
            f"{count} all-reduces x (2 x {p - 1}/{p} x {si(size, 'B')} / {si(rates.link, 'B/s')} + {2 * (p - 1)} hops)"
        )
        found.append(Term("all-reduce", count * each, formula))
    if (p := layout.ep) > 1:
        inside = p <= hardware.per_node
        link, latency = (rates.link, LINK_LATENCY) if inside else (rates.network, NETWORK_LATENCY)
        routed = [layer for layer in anatomy.layers if layer.experts]
        sent = rows.tokens / layout.tp * max(layer.active for layer in routed) * row * (p - 1) / p
        count = 2 * len(routed)
        formula = f"{count} all-to-alls x ({si(sent, 'B')} / {si(link, 'B/s')} + {latency * 1e6:.0f} us)"
        found.append(Term("all-to-all", count * (sent / link + latency), formula))
    if (p := layout.pp) > 1:
        apart = layout.tp * layout.dp * p > hardware.per_node
        link, latency = (rates.network, NETWORK_LATENCY) if apart else (rates.link, LINK_LATENCY)
        sent = size / layout.tp
        formula = f"{p - 1} sends x ({si(sent, 'B')} / {si(link, 'B/s')} + {latency * 1e6:.0f} us)"
        found.append(Term("pipeline sends", (p - 1) * (sent / link + latency), formula))
    return found


def _overhead(anatomy: Anatomy, layout: Layout, hardware: Hardware, rows: Rows) -> Term:
    rates, layers = hardware.rates, len(anatomy.layers)
    each = rates.step_seconds / layout.pp if layout.pp > 1 else rates.step_seconds
    seconds = layers * rates.layer_seconds + each + rows.sampled * rates.token_seconds
    formula = (
        f"{layers} layers x {milli(rates.layer_seconds)} + {milli(each)} a step"
        f" + {rows.sampled} x {milli(rates.token_seconds)} a sampled token"
    )
    return Term("overheads", seconds, formula)


@dataclass(frozen=True)
class Speed:
    """Predicted. ttft: seconds to the first token of a prompt that waits for nobody; tbt: between two tokens of one
    request among all; throughput: output tokens a second of all devices, prefills included."""

    ttft: float
    tbt: float
    throughput: float
    prefill: list[Term]
    decode: list[Term]


def predict(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load) -> Speed:
    """The life of `concurrency` equal requests that begin one after the other."""
    requests = load.on(layout)
    prefill = _prefill(anatomy, layout, hardware, load)
    flights = min(layout.pp, requests)  # micro-batches under way in the pipeline, one in each stage
    context = load.input_len + load.output_len / 2
    batch = -(-requests // flights)
    decode = step(anatomy, layout, hardware, load, Rows(batch, batch, batch, context))
    # A token of a micro-batch takes its way through all stages; meanwhile the other micro-batches take theirs.
    ttft, pace = total(prefill), total(decode)
    steps = max(0, load.output_len - 1)  # the first token comes with the prefill
    busy = requests * ttft / flights + steps * pace
    # While others' prompts are computed in between, a request waits for them.
    tbt = pace + (requests - 1) * ttft / flights / load.output_len if requests > 1 else pace
    return Speed(ttft, tbt, layout.dp * requests * load.output_len / busy, prefill, decode)


def _prefill(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load) -> list[Term]:
    """All chunks of a prompt, each a step, summed part by part."""
    chunks = [
        (start, min(hardware.budget, load.input_len - start)) for start in range(0, load.input_len, hardware.budget)
    ]
    sums: dict[str, Term] = {}
    shown = len(chunks) > 1
    for start, count in chunks:
        last = start + count == load.input_len
        for term in step(anatomy, layout, hardware, load, Rows(count, int(last), 1, start + count)):
            before = sums.get(term.name)
            seconds = term.seconds + (before.seconds if before else 0.0)
            formula = f"{len(chunks)} chunks; the last: {term.formula}" if shown else term.formula
            sums[term.name] = Term(term.name, seconds, formula)
    return list(sums.values())
