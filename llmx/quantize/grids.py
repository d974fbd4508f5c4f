"""Group grids: which scales and zeros a matrix gets, round-to-nearest, and what that costs in a layer's output.

A grid's weight is (code - zero) * scale, with one scale and zero per row and group of inputs. Scales are rounded to the
dtype they are stored in before codes are chosen, so that what is measured here is what a reader gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from llmx.kernels import Kernels
from llmx.quantize.gram import Gram
from llmx.schemes.grid import Grid

SHRINKS = tuple(1.0 - 0.025 * step for step in range(21))  # of a group's range: what the searches try
NUMBERS = 2**20  # weights that are worked on at a time
TINIEST = 2.0**-24  # least scale: float16's smallest number above 0


@dataclass(frozen=True)
class Rounding:
    """bits: 2 to 8. group: inputs that share a scale. symmetric: zeros are the middle code. dtype: of stored scales."""

    bits: int
    group: int
    symmetric: bool
    dtype: torch.dtype = torch.float16

    @property
    def top(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1


def ranged(weight: Tensor, rounding: Rounding, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scales and zeros, f32 (rows, groups), whose codes span `shrink` of each group's range.

    weight: (rows, n_in) f32. Symmetric: 2 |max| / top, as GPTQ has it. Asymmetric: the range takes in 0.
    """
    parts = weight.unflatten(1, (-1, rounding.group))
    if rounding.symmetric:
        scales = _stored(parts.abs().amax(-1) * (2.0 * shrink / rounding.top), rounding)
        return scales, torch.full_like(scales, 2.0 ** (rounding.bits - 1))
    low, high = parts.amin(-1).clamp(max=0.0) * shrink, parts.amax(-1).clamp(min=0.0) * shrink
    scales = _stored((high - low) / rounding.top, rounding)
    return scales, torch.round(-low / scales).clamp(0, rounding.top)


def _stored(scales: Tensor, rounding: Rounding) -> Tensor:
    return scales.clamp(min=TINIEST).to(rounding.dtype).float()


def nearest(weight: Tensor, scales: Tensor, zeros: Tensor, rounding: Rounding) -> Grid:
    """Each weight's nearest code."""
    parts = weight.unflatten(1, (-1, rounding.group))
    codes = torch.round(parts / scales[:, :, None]).add_(zeros[:, :, None]).clamp_(0, rounding.top)
    return Grid(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8), rounding.bits, rounding.group)


def round_to_nearest(weight: Tensor, rounding: Rounding) -> Grid:
    """Plain round-to-nearest over each group's whole range: what every algorithm must not be worse than."""
    return nearest(weight, *ranged(weight, rounding), rounding)


def rows_at_once(weight: Tensor) -> int:
    """How many rows of a matrix the algorithms take at a time: a dozen copies of them are in memory at once."""
    return max(64, NUMBERS // weight.shape[1])


def rows_of(weights: Sequence[Tensor], low: int, high: int) -> Tensor:
    """Rows of matrices (rows, n_in), counted as if they lay one below the other, f32 (high - low, n_in)."""
    found, first = [], 0
    for weight in weights:
        part = weight[max(low - first, 0) : max(high - first, 0)]
        if len(part):
            found.append(part)
        first += len(weight)
    return found[0].float() if len(found) == 1 else torch.cat(found).float()


def pieces(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """All their rows, `rows_at_once` at a time, f32."""
    step, count = rows_at_once(weights[0]), sum(map(len, weights))
    return (rows_of(weights, low, min(low + step, count)) for low in range(0, count, step))


def stacked(grids: Sequence[Grid]) -> Grid:
    """Grids of some rows each, one below the other."""
    return replace(
        grids[0],
        codes=torch.cat([grid.codes for grid in grids]),
        scales=torch.cat([grid.scales for grid in grids]),
        zeros=torch.cat([grid.zeros for grid in grids]),
    )


@cache
def _table() -> Kernels:
    return Kernels("cpu")


def kernels_for(weight: Tensor, rounding: Rounding) -> Kernels | None:
    """Those that do this in C++; None where torch has to."""
    table = _table()
    known = weight.device.type == "cpu" and table.has("can_group")
    return table if known and table.get("can_group")(rounding.group, rounding.dtype) else None


def nearest_errors(weight: Tensor, columns: Tensor, rounding: Rounding) -> Tensor:
    """weight - round_to_nearest(weight * columns) / columns, (rows, n_in) f32; columns: (n_in,)."""
    kernels = kernels_for(weight, rounding)
    if kernels is None:
        return weight - round_to_nearest(weight * columns, rounding).weight() / columns
    factor = 2.0 / rounding.top if rounding.symmetric else 1.0
    done: Tensor = kernels.get("round_groups")(
        weight, columns, rounding.group, rounding.bits, rounding.symmetric, rounding.dtype, factor
    )
    return done


def search(weight: Tensor, rounding: Rounding, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros whose range, of SHRINKS, gives each row and group the least error in `metric`.

    metric: (n_in,) weighs each input's squared error; (groups, group, group) is the quadratic form of a group's errors,
    the diagonal blocks of a Hessian: then this is AWQ's clip search, with the whole calibration set in it.
    """
    kernels = kernels_for(weight, rounding)
    if kernels is None:
        return search_in_torch(weight, rounding, metric)
    factors = [2.0 * shrink / rounding.top if rounding.symmetric else shrink for shrink in SHRINKS]
    found: tuple[Tensor, Tensor] = kernels.get("search_groups")(
        weight, metric, rounding.group, rounding.bits, rounding.symmetric, rounding.dtype, factors
    )
    return found


def search_in_torch(weight: Tensor, rounding: Rounding, metric: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `search`, on any device."""
    best: Tensor | None = None
    scales = zeros = weight
    for shrink in SHRINKS:
        found = ranged(weight, rounding, shrink)
        error = nearest(weight, *found, rounding).weight().sub_(weight).unflatten(1, (-1, rounding.group))
        if metric.dim() == 1:
            loss = (error.square_() * metric.unflatten(0, (-1, rounding.group))).sum(-1)
        else:
            loss = (torch.einsum("rgi,gij->rgj", error, metric) * error).sum(-1)
        if best is None:
            best, (scales, zeros) = loss, found
            continue
        better = loss < best
        best = torch.where(better, loss, best)
        scales, zeros = torch.where(better, found[0], scales), torch.where(better, found[1], zeros)
    return scales, zeros


def row_losses(weight: Tensor, made: Tensor, hessian: Gram, columns: Tensor | None = None) -> Tensor:
    """(rows,): (w - q) H (w - q)^T: the squared error of each row's outputs, summed over the calibration tokens.

    columns: (n_in,), by which both matrices were multiplied, and the inputs of the Hessian were not divided.
    """
    errors = weight - made
    return losses_of(errors if columns is None else errors.div_(columns), hessian)


def losses_of(errors: Tensor, hessian: Gram) -> Tensor:
    """(rows,): e H e^T of each row."""
    return torch.cat([hessian.losses(part.float()) for part in errors.split(rows_at_once(errors))])


def better_rows(
    first: Grid, second: Grid, weight: Tensor, hessian: Gram, columns: Tensor | None = None
) -> tuple[Grid, Tensor]:
    """Row by row the grid with the smaller output error, ties to `first`; and those errors, (rows,). As `row_losses`
    has them."""
    one, two = (row_losses(weight, grid.weight(), hessian, columns) for grid in (first, second))
    take = (two < one) | ~one.isfinite()

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(take[:, None], b, a)

    merged = replace(
        first,
        codes=pick(first.codes, second.codes),
        scales=pick(first.scales, second.scales),
        zeros=pick(first.zeros, second.zeros),
    )
    return merged, torch.where(take, two, one)
