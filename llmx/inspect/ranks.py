"""Over how many tensor-parallel ranks vLLM 0.32 loads quantised linears, by the rules that its own loaders check.

Heads and the MLP's width are divided evenly; a rank's inputs are whole groups; blocks of FP8 are not cut, and not
shared by two linears that are read as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmx.formats.quantization import Quantization, Rule
from llmx.inspect.asked import SIZES, Unit

AWQ_TOGETHER = 8  # outputs in a word


def vllm_ranks(
    units: Mapping[str, Unit], shape: Any, quantization: Quantization | None, packed: set[str]
) -> dict[int, str | None]:
    """Number of ranks -> why vLLM can't, None where it can. shape: the model's Shape. packed: quantised linears."""
    return {size: next(_reasons(units, shape, quantization, packed, size), None) for size in SIZES}


def _reasons(
    units: Mapping[str, Unit], shape: Any, quantization: Quantization | None, packed: set[str], size: int
) -> Iterator[str]:
    heads, kv_heads = shape.heads, shape.kv_heads
    if heads % size:
        yield f"{heads} attention heads can't be split over {size} ranks"
    if kv_heads % size and size % kv_heads:
        yield f"{kv_heads} key-value heads can't be split over {size} ranks"
    for unit in units.values():
        if unit.cut == "column" and unit.heads is None and unit.n_out % size:
            yield f"{unit.name} has {unit.n_out} outputs, which can't be split over {size} ranks"
        rule = quantization.rule(unit.name) if quantization is not None and unit.name in packed else None
        if rule is not None:
            yield from _linear(units, unit, rule, size)


def _linear(units: Mapping[str, Unit], unit: Unit, rule: Rule, size: int) -> Iterator[str]:
    """What keeps one quantised linear from being cut."""
    inputs = unit.n_in // size if unit.cut == "row" else unit.n_in
    each = f"{unit.name} has {inputs} inputs" + (" a rank" if size > 1 and unit.cut == "row" else "")
    if rule.group is not None and rule.format in ("awq", "gptq", "packed") and inputs % rule.group:
        yield f"{each}, no whole groups of {rule.group}"
    together = [units[name] for name in unit.fused if name in units] or [unit]
    if rule.format == "awq" and sum(_outputs(one, size) for one in together) % AWQ_TOGETHER:
        yield f"{unit.name}'s outputs on a rank are no multiple of {AWQ_TOGETHER}, which AWQ stores together"
    if rule.block is None:
        return
    if size > 1 and unit.cut == "row" and inputs % rule.block[1]:
        yield f"{each}, no whole blocks of {rule.block[1]}"
    last = len(together) == 1 or unit == together[-1]
    if unit.cut == "column" and (size > 1 or not last) and _outputs(unit, size) % rule.block[0]:
        yield f"{unit.name} has {_outputs(unit, size)} outputs a rank, no whole blocks of {rule.block[0]}"


def _outputs(unit: Unit, size: int) -> int:
    """On one rank. Heads fewer than ranks are held more than once."""
    if unit.cut != "column":
        return unit.n_out
    return unit.n_out // min(size, unit.heads or size)
