"""What `llmx diff` found, as figures for a report and as lines to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmx.inspect.compare import Difference, named
from llmx.inspect.probe import Error
from llmx.inspect.tensors import Differs

SHOWN = 12  # of faults, tensors and settings; a report holds all
DEFINITIONS = {
    "tolerance": "largest relative error, |b - a| / |a| of a token's row, that counts as equal",
    "growth": "largest relative error over all tokens of the residual stream after each layer, errors inherited",
    "faults": "ops that give something else than in A when they are given A's own inputs",
    "crossing": "first op of B's own run beyond the tolerance, with an input within it",
    "token": "first position whose likeliest token in B, after A's text, is not A's",
    "tensors": "stored tensors whose values differ, unpacked as the layers compute with them",
}


def figures(found: Difference) -> dict[str, Any]:
    """What a report's `results` holds."""
    kernels = {}
    if found.seen is not None:
        a, b = (seen.kernels for seen in found.seen)
        kernels = {op: [a.get(op), b.get(op)] for op in sorted({*a, *b}) if a.get(op) != b.get(op)}
    return {
        "differs": found.differs,
        "says": found.sentence(),
        "a": found.a.name(),
        "b": found.b.name(),
        "tolerance": found.tolerance,
        "tokens": found.ids,
        "prompt_tokens": found.prompt_len,
        "tokenizer": None if found.tokenizer is None else vars(found.tokenizer),
        "config": [{"setting": key, "a": a, "b": b} for key, a, b in found.config],
        "sizes": found.sizes,
        "kernels": kernels,
        "token": None if found.token is None else vars(found.token),
        "growth": [{"place": place, "relative_error": error} for place, error in found.growth],
        "faults": [_error(found, error) for error in found.faults],
        "crossing": None if found.crossing is None else _error(found, found.crossing),
        "one_sided": [str(place) for place in found.one_sided],
        "tensors": [vars(one) for one in found.tensors],
    }


def _error(found: Difference, error: Error) -> dict[str, Any]:
    return {
        "layer": error.place.layer,
        "op": error.place.name,
        "part": error.part,
        "kernel": error.place.op,
        "relative_error": error.worst(),
        "first_token": error.first_token(found.tolerance),
        "tokens": int((error.outputs > found.tolerance).sum()),
        "input_error": float(error.inputs.max()),
    }


def lines(found: Difference) -> Iterator[str]:
    """First tokens, then layers, then ops, then what is stored."""
    yield f"A: {found.a.name()}"
    yield f"B: {found.b.name()}"
    yield from (f"setting {key}: {a} in A, {b} in B" for key, a, b in found.config[:SHOWN])
    if (one := found.tokenizer) is not None:
        a, b = f"{one.a!r} ({one.a_id}) in A", f"{one.b!r} ({one.b_id}) in B"
        yield f"tokenizers: token {one.position} of the prompt is {a}, {b}"
    if found.seen is not None:
        yield from _ran(found)
    yield from (f"only one of them has {place}" for place in found.one_sided[:SHOWN])
    for error in found.faults[:SHOWN]:
        yield f"op {named(error)}: {_far(found, error)}{_kernel(found, error)}"
    if len(found.faults) > SHOWN:
        yield f"and {len(found.faults) - SHOWN} other ops (--json has them all)"
    if found.crossing is not None and not found.faults:
        far = _far(found, found.crossing)
        yield f"with what it inherits, {named(found.crossing)} is the first op beyond the tolerance: {far}"
    for tensor in found.tensors[:SHOWN]:
        yield _tensor(tensor)
    if len(found.tensors) > SHOWN:
        yield f"and {len(found.tensors) - SHOWN} other tensors (--json has them all)"
    yield found.sentence()


def _ran(found: Difference) -> Iterator[str]:
    new = len(found.ids) - found.prompt_len
    yield f"tokens: {found.prompt_len} of the prompt and {new} that A continues it with; tolerance {found.tolerance:g}"
    if (token := found.token) is not None:
        yield (
            f"first diverging token: {token.index} of the output (position {token.position}): {token.a!r} in A, "
            f"{token.b!r} in B; A's best two logits are {token.margin:.3g} apart"
        )
    steps = found.growth if len(found.growth) <= SHOWN else [*found.growth[: SHOWN // 2], *found.growth[-SHOWN // 2 :]]
    yield "relative error as it grows: " + ", ".join(f"{place} {error:.2g}" for place, error in steps)


def _far(found: Difference, error: Error) -> str:
    count = int((error.outputs > found.tolerance).sum())
    first = error.first_token(found.tolerance)
    return f"relative error {error.worst():.2g}, on {count} tokens, the first at position {first}"


def _kernel(found: Difference, error: Error) -> str:
    if found.seen is None or not error.place.op:
        return ""
    a, b = (seen.kernels.get(error.place.op, "none") for seen in found.seen)
    return f"; kernel {error.place.op}: {a} in A, {b} in B" if a != b else f"; kernel {error.place.op}: {a}"


def _tensor(one: Differs) -> str:
    name = one.a if one.a == one.b else f"{one.a} (A), {one.b} (B)"
    if one.why:
        return f"tensor {name}: {one.why}"
    at = ", ".join(map(str, one.at))
    return (
        f"tensor {name}: {one.count:,} of {one.of:,} values differ, relative error {one.relative:.2g}; "
        f"the largest at [{at}]: {one.was:.6g} in A, {one.now:.6g} in B"
    )
