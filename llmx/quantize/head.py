"""The head as the last block: what the final norm makes is its input, and AWQ's scales go into that norm.

It is read, quantized and packed some rows at a time: it may be larger than all the linears of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmx.quantize import forms
from llmx.quantize.block import Done, Quantizer, Result, Seen
from llmx.quantize.source import Lazy, Unit
from llmx.quantize.states import Stats

NORM = "model.norm"
SMOOTH = {"norm": ("lm_head",)}
ROWS = 8192  # at a time; whole words and blocks of every format

Read = Callable[[int, int], Tensor]  # rows [low, high) of the weight, f32


@dataclass(frozen=True)
class Made:
    """tensors: by the last component of their names. norm: the final norm's weight, where it took scales. result: of
    all rows together; its `made` is that of the last ones."""

    tensors: dict[str, Tensor]
    norm: Tensor | None
    result: Result


def make(quantizer: Quantizer, unit: Unit, read: Read, stats: Stats, norm: Tensor) -> Made:
    """norm: the final norm's weight, as stored. Where scales make it worse than round-to-nearest, it gets none."""
    done, columns, how = quantizer.fold(Seen([_sample(unit, read)], [stats], {NORM: norm}))
    made = _made(quantizer, unit, read, stats, done, columns.get(unit.name), how.get(unit.name, "no scales"))
    if made.result.worse and done.vectors:
        made = _made(quantizer, unit, read, stats, Done(), None, "no scales")
    return made


def _sample(unit: Unit, read: Read) -> Lazy:
    """A linear of some of the rows, spread over all of them, from which scales are found."""
    parts = 8
    each = min(ROWS, unit.n_out) // parts or unit.n_out
    starts = range(0, unit.n_out, max(each, unit.n_out // parts))
    rows = torch.cat([read(low, min(low + each, unit.n_out)) for low in starts])
    lazy = Lazy([Unit(unit.name, len(rows), unit.n_in)])
    lazy.load(lambda _: (rows, None))
    return lazy


def _made(
    quantizer: Quantizer, unit: Unit, read: Read, stats: Stats, done: Done, columns: Tensor | None, how: str
) -> Made:
    options = quantizer.options
    whole = options.method == "fp8" and forms.fp8_kind(options) == "tensor"  # one scale for all
    step = unit.n_out if whole else ROWS
    results, packed = [], []
    for low in range(0, unit.n_out, step):
        high = min(low + step, unit.n_out)
        part = Unit(unit.name, high - low, unit.n_in)
        result = quantizer.one(part, read(low, high), stats, columns, how)
        packed.append(result.made)
        results.append(result)
    return Made(forms.stacked(packed), done.vectors.get(NORM), _joined(unit, results))


def _joined(unit: Unit, results: list[Result]) -> Result:
    """Errors of all rows as a part of all outputs' squares."""
    energy = max(sum(result.energy for result in results), 1e-30)
    error, nearest = (
        sum((getattr(result, name) or 0.0) * result.energy for result in results) / energy
        for name in ("error", "nearest")
    )
    fell_back = any(result.fell_back for result in results)
    return replace(results[-1], unit=unit, error=error, nearest=nearest, fell_back=fell_back, energy=energy)
