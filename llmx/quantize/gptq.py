"""GPTQ (Frantar et al., 2210.17323): inputs rounded one after the other, each one's error made up for by those to come.

Groups are fixed first, in the weights' own order, and the inputs are taken by falling diagonal of the Hessian ("static"
act-order): files need no g_idx beyond the trivial one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.quantize.gram import Gram
from llmx.quantize.grids import (
    Rounding,
    better_rows,
    kernels_for,
    losses_of,
    nearest_errors,
    round_to_nearest,
    rows_at_once,
    search,
    stacked,
)
from llmx.schemes.grid import Grid

BLOCK = 128  # inputs between two updates of the rest of the matrix
MOST_DAMP = 4.0  # times the mean of the diagonal: beyond it the Hessian says nothing


@dataclass(frozen=True)
class Solved:
    """damp: the part of the mean diagonal that was added; None: the Hessian could not be factored at all, and the rows
    are rounded to nearest. dead: inputs that were 0 on every token. losses: (rows,) squared output errors; nearest:
    those of plain round-to-nearest."""

    grid: Grid
    losses: Tensor
    nearest: Tensor
    damp: float | None
    dead: int


def gptq(weight: Tensor, hessian: Gram, rounding: Rounding, *, damp: float = 0.01, act_order: bool = True) -> Solved:
    """weight (rows, n_in) f32, f16 or bf16, hessian (sum of x x^T) -> codes whose output error, row by
    row, is at most that of round-to-nearest. Rows of several linears with the same input may be stacked.

    Works on some rows at a time: beside the weight and the Hessian, one whole matrix (n_in, n_in) is in memory.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    order = _order(diagonal, act_order)
    factor, used = _factor(hessian, order, dead, float(diagonal.mean()), damp)
    metric = diagonal.clamp(min=0.0) + diagonal.mean().clamp(min=1e-30) * 1e-3
    parts = [
        _solve(part.float(), hessian, factor, order, metric, rounding) for part in weight.split(rows_at_once(weight))
    ]
    del factor
    losses, nearest = torch.cat([found for _, found, _ in parts]), torch.cat([found for _, _, found in parts])
    return Solved(stacked([grid for grid, _, _ in parts]), losses, nearest, used, int(dead.sum()))


def _solve(
    weight: Tensor, hessian: Gram, factor: Tensor | None, order: Tensor, metric: Tensor, rounding: Rounding
) -> tuple[Grid, Tensor, Tensor]:
    """Some rows' grid, its losses and those of round-to-nearest."""
    plain = round_to_nearest(weight, rounding)
    nearest = losses_of(nearest_errors(weight, torch.ones_like(metric), rounding), hessian)
    if factor is None:
        return plain, nearest, nearest
    scales, zeros = search(weight, rounding, metric)
    codes = _sweep(weight, factor, order, scales, zeros, rounding)
    made = Grid(codes, scales, zeros.to(torch.uint8), rounding.bits, rounding.group)
    grid, losses = better_rows(made, plain, weight, hessian)
    return grid, losses, nearest


def _order(diagonal: Tensor, act_order: bool) -> Tensor:
    if not act_order:
        return torch.arange(len(diagonal), device=diagonal.device)
    return torch.argsort(diagonal, descending=True, stable=True)


def _factor(hessian: Gram, order: Tensor, dead: Tensor, mean: float, damp: float) -> tuple[Tensor | None, float | None]:
    """L^-1, lower, of J H J = L L^T, and the damping that made it possible. H in the sweep's order, J the reversal.

    GPTQ's upper U with U^T U = H^-1 is J L^-1 J: `_corner` reads it from there. Dead inputs get a diagonal of their
    own, `mean`, so that they neither take nor give errors. Factor and inverse take the place of what they are made
    from.
    """
    if not hessian.is_finite() or mean <= 0:
        return None, None
    back = order.flip(0)
    part = damp
    while part <= MOST_DAMP:
        lower = hessian.arranged(back)
        lower.diagonal()[dead[back]] = mean
        lower.diagonal().add_(part * mean)
        columns, failed = lower.mT, torch.empty(0, dtype=torch.int32, device=lower.device)  # in LAPACK's order: no copy
        torch.linalg.cholesky_ex(columns, out=(columns, failed))
        if not failed:
            invert_lower(columns)
            if _is_finite(columns):
                return columns, part
        del lower, columns
        part = max(2 * part, 1e-4)
    return None, None


def _is_finite(matrix: Tensor) -> bool:
    """As `Gram.is_finite`."""
    return bool(matrix.sum().isfinite())


def invert_lower(lower: Tensor) -> None:
    """A lower triangle (n, n) by its inverse, in place: (A 0; B C)^-1 is (A^-1 0; -C^-1 B A^-1 C^-1)."""
    for low in range(0, len(lower), BLOCK):
        high = min(low + BLOCK, len(lower))
        unit = torch.eye(high - low, device=lower.device)
        corner = torch.linalg.solve_triangular(lower[low:high, low:high], unit, upper=False)
        lower[low:high, :low] = -(corner @ lower[low:high, :low]) @ lower[:low, :low]
        lower[low:high, low:high] = corner


def _corner(inverse: Tensor, low: int, high: int, left: int, right: int) -> Tensor:
    """U[low:high, left:right]"""
    n = len(inverse)
    return inverse[n - high : n - low, n - right : n - left].flip(0, 1)


def _sweep(weight: Tensor, factor: Tensor, order: Tensor, scales: Tensor, zeros: Tensor, rounding: Rounding) -> Tensor:
    """Codes (rows, n_in) uint8. Works on the transpose: an input's weights in all rows are one piece of memory."""
    left = weight.T[order].contiguous()
    groups = order // rounding.group
    steps, offsets = scales.T.contiguous(), zeros.T.contiguous()
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    errors = torch.empty(BLOCK, left.shape[1], device=left.device)
    table = kernels_for(weight, rounding)
    some = sweep_in_torch if table is None else table.get("gptq_sweep")
    n = len(left)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        here = _corner(factor, low, high, low, high), steps, offsets, groups[low:high], rounding.bits
        codes[low:high] = some(left[low:high], errors[: high - low], *here).to(torch.uint8)
        left[high:].addmm_(_corner(factor, low, high, high, n).T, errors[: high - low], alpha=-1)
    result = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    result[:, order] = codes.T
    return result


def sweep_in_torch(
    left: Tensor, errors: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int
) -> Tensor:
    """Codes, f32 (count, outputs), of one block of the sweep; `errors` takes what is left to make up for.

    left: (count, outputs) f32, written over; factor: (count, count); scales, zeros: (groups, outputs).
    """
    codes = torch.empty_like(left)
    for i, group in enumerate(groups.tolist()):
        code = torch.round(left[i] / scales[group]).add_(zeros[group]).clamp_(0, (1 << bits) - 1)
        codes[i] = code
        errors[i] = (left[i] - (code - zeros[group]) * scales[group]) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes
