"""A plan as figures for a report, and as lines to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmx.planning.plans import Choice, Plan
from llmx.planning.roofline import Speed, Term, milli, si

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 8  # layouts of the table
GIB = 2**30
READABLE = ("float32", "float16", "bfloat16")
DEFINITIONS = {
    "weights": "bytes as stored, by kind; parameters counts a tied head once",
    "kv.bytes_per_token": "that the next token of a sequence adds in all layers while every window has room",
    "kv.bytes_per_sequence": "of a sequence as long as the context, with windows at their caps",
    "best": "the layout with the highest predicted throughput of those that fit",
    "best.memory": "bytes of the fullest device; usable is its memory times the utilization less 5 %",
    "best.ttft_ms": "of a prompt of input_len that waits for nobody",
    "best.tbt_ms": "between two tokens of a request, with all others beside it and their prompts in between",
    "best.output_throughput": "output tokens per second of all devices, prefills included",
    "changes": "what would help where nothing fits; saves: bytes of the fullest device",
}


def figures(plan: Plan) -> dict[str, Any]:
    """What a report's `results` holds."""
    anatomy, load, hardware = plan.anatomy, plan.load, plan.hardware
    found: dict[str, Any] = {
        "hardware": {"name": hardware.name, "device": hardware.device, "devices": hardware.count}
        | {"nodes": hardware.nodes, "memory_bytes": hardware.memory, "measured": hardware.rates.measured},
        "load": {"context": load.context, "concurrency": load.concurrency}
        | {"input_len": load.input_len, "output_len": load.output_len},
        "weights": {"parameters": anatomy.parameters, "active_parameters": anatomy.active_parameters}
        | {"stored": anatomy.stored, "bytes": anatomy.weight_bytes() | {"total": sum(anatomy.weight_bytes().values())}},
        "kv": {
            "element_bytes": load.kv_bytes,
            "bytes_per_token": anatomy.kv_kept(1, load.kv_bytes, load.kv_scales),
            "bytes_per_sequence": load.kept(anatomy),
            "bytes": load.kept(anatomy) * load.concurrency,
        },
        "fits": plan.best is not None,
        "best": None if plan.best is None else _choice(plan.best) | {"terms": _terms(plan.best.speed)},
        "layouts": [_choice(choice) for choice in plan.choices],
        "changes": [{"change": c.text, "saves_bytes": c.saves, "fits": c.fits} for c in plan.changes],
        "notes": list(notes(plan)),
    }
    return found


def _choice(choice: Choice) -> dict[str, Any]:
    layout, memory, speed = choice.layout, choice.memory, choice.speed
    found: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "fits": memory.fits}
    found["memory"] = {
        "weights": memory.weights,
        "kv": memory.kv,
        "activations": memory.activations,
        "needed": memory.needed,
        "usable": memory.usable,
    }
    if speed is not None:
        found |= {"ttft_ms": speed.ttft * 1e3, "tbt_ms": speed.tbt * 1e3, "output_throughput": speed.throughput}
    return found


def _terms(speed: Speed | None) -> dict[str, Any]:
    if speed is None:
        return {}
    parts = {"prefill": speed.prefill, "decode": speed.decode}
    return {
        part: [{"name": t.name, "ms": t.seconds * 1e3, "formula": t.formula} for t in terms]
        for part, terms in parts.items()
    }


def notes(plan: Plan) -> Iterator[str]:
    """What this version of llmx can't do of the plan, and what is left out of account."""
    anatomy = plan.anatomy
    yield from anatomy.notes
    if not anatomy.runs:
        yield f"llmx can't run this family yet ({anatomy.architecture}): the plan is for when it can"
    if not readable(anatomy.stored):
        yield f"llmx can't read weights stored as {anatomy.stored} yet"
    if plan.load.kv_bytes == 1 and not plan.load.kv_scales:
        yield "llmx can't store keys and values in fp8 yet, but in int8"
    if (best := plan.best) is not None and best.layout.devices != best.layout.tp:
        same = next((c for c in plan.choices if c.layout.devices == c.layout.tp and c.memory.fits), None)
        instead = f"; the best of TP alone is {same.layout}" if same else ""
        yield f"this version runs TP in one machine, not {best.layout}{instead}"
    if plan.hardware.held is not None:
        yield f"on this CPU the engine holds {plan.hardware.held:.2f} bytes of each weight of a layer"
    elif anatomy.stored not in READABLE and readable(anatomy.stored):
        yield "on CUDA this version unpacks these weights to 16 bits when it loads them; the plan counts them as stored"


def readable(stored: str) -> bool:
    """Whether this version has the scheme: plain dtypes, GGUF's types, what quantizers write (a test compares)."""
    return stored not in ("mxfp4", "q1_0")


def show(console: Console, plan: Plan, explain: bool) -> None:
    """What a person wants to know: does it fit, how fast, what to change."""
    from rich.table import Table

    load = plan.load
    for line in _facts(plan):
        console.print(line, markup=False, highlight=False)
    table = Table("layout", "weights", "KV", "activations", "of", "TTFT", "TBT", "output tokens/s")
    for choice in plan.choices[:SHOWN]:
        m, s = choice.memory, choice.speed
        sizes = [f"{n / GIB:.2f} GiB" for n in (m.weights, m.kv, m.activations, m.usable)]
        speeds = [milli(s.ttft), milli(s.tbt), f"{s.throughput:,.1f}"] if s else ["does not fit", "", ""]
        table.add_row(str(choice.layout), *sizes, *speeds)
    console.print(table)
    if len(plan.choices) > SHOWN:
        console.print(f"and {len(plan.choices) - SHOWN} other layouts (--json has them all)", markup=False)
    for line in _verdict(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if explain and plan.best is not None and plan.best.speed is not None:
        speed = plan.best.speed
        for part, terms in (
            (f"TTFT: a prompt of {load.input_len} tokens", speed.prefill),
            (f"a decode step at {load.concurrency} requests", speed.decode),
        ):
            for line in _explained(part, terms):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in notes(plan):
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _facts(plan: Plan) -> Iterator[str]:
    anatomy, load, hardware = plan.anatomy, plan.load, plan.hardware
    sizes = anatomy.weight_bytes()
    active = anatomy.active_parameters
    of = f" ({active / 1e9:.3g} B for a token)" if active != anatomy.parameters else ""
    yield f"{anatomy.name}: {anatomy.architecture}, {anatomy.parameters / 1e9:.4g} B parameters{of}"
    parts = ", ".join(f"{kind} {si(size, 'B')}" for kind, size in sizes.items())
    tied = ", head tied to the embedding" if anatomy.tied else ""
    yield f"weights ({anatomy.stored}{tied}): {si(sum(sizes.values()), 'B')}: {parts}"
    token, sequence = anatomy.kv_kept(1, load.kv_bytes, load.kv_scales), load.kept(anatomy)
    yield (
        f"KV: {token:,} B a token, {si(sequence, 'B')} for {load.context} tokens,"
        f" {si(sequence * load.concurrency, 'B')} for {load.concurrency} such"
    )
    rates = hardware.rates
    how = "measured just now" if rates.measured else "what kernels reach of the data sheet"
    yield (
        f"{hardware.name}: {hardware.count} x {hardware.memory / GIB:.1f} GiB; {how}: {si(rates.bandwidth, 'B/s')}, "
        f"{si(rates.flops['bf16'], 'flop/s')}"
        + (f", attention {si(rates.attention_flops, 'flop/s')}" if rates.measured else f", {hardware.link_name}")
    )


def _verdict(plan: Plan) -> Iterator[str]:
    if (best := plan.best) is not None and best.speed is not None:
        s = best.speed
        yield (
            f"It fits. Best: {best.layout}: TTFT {milli(s.ttft)}, TBT {milli(s.tbt)},"
            f" {s.throughput:,.1f} output tokens/s at {plan.load.concurrency} requests"
            f" of {plan.load.input_len} + {plan.load.output_len} tokens."
        )
        return
    need = min(choice.memory.needed for choice in plan.choices)
    room = plan.choices[0].memory.usable
    yield f"It does not fit: at least {need / GIB:.2f} GiB are needed of a device, {room / GIB:.2f} GiB may be used."
    for number, change in enumerate(plan.changes, 1):
        enough = "enough alone" if change.fits else "not enough alone"
        yield f"{number}. {change.text}: saves {change.saves / GIB:.2f} GiB a device, {enough}"


def _explained(title: str, terms: list[Term]) -> Iterator[str]:
    yield f"{title}: {milli(sum(t.seconds for t in terms))}"
    width = max(len(term.name) for term in terms)
    for term in terms:
        yield f"  {term.name:<{width}}  {milli(term.seconds):>9} = {term.formula}"
