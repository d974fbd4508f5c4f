"""GPTQ (Frantar et al., 2210.17323): inputs rounded one after the other, each one's error made up for by those to come.

Groups are fixed first, in the weights' own order, and the inputs are taken by falling diagonal of the Hessian ("static"
act-order): files need no g_idx beyond the trivial one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.quantize.grids import Rounding, better_rows, kernels_for, losses_of, nearest_errors, round_to_nearest, search
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


def gptq(weight: Tensor, hessian: Tensor, rounding: Rounding, *, damp: float = 0.01, act_order: bool = True) -> Solved:
    """weight (rows, n_in) f32, hessian (n_in, n_in) f32 (sum of x x^T) -> codes whose output error, row by row, is at
    most that of round-to-nearest. Rows of several linears with the same input may be stacked."""
    plain = round_to_nearest(weight, rounding)
    nearest = losses_of(nearest_errors(weight, torch.ones_like(hessian[0]), rounding), hessian)
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    factor, used = _factor(hessian, dead, damp, act_order)
    if factor is None:
        return Solved(plain, nearest, nearest, None, int(dead.sum()))
    scales, zeros = search(weight, rounding, diagonal.clamp(min=0.0) + diagonal.mean().clamp(min=1e-30) * 1e-3)
    codes = _sweep(weight, factor, _order(diagonal, act_order), scales, zeros, rounding)
    made = Grid(codes, scales, zeros.to(torch.uint8), rounding.bits, rounding.group)
    grid, losses = better_rows(made, plain, weight, hessian)
    return Solved(grid, losses, nearest, used, int(dead.sum()))


def _order(diagonal: Tensor, act_order: bool) -> Tensor:
    if not act_order:
        return torch.arange(len(diagonal), device=diagonal.device)
    return torch.argsort(diagonal, descending=True, stable=True)


def _factor(hessian: Tensor, dead: Tensor, damp: float, act_order: bool) -> tuple[Tensor | None, float | None]:
    """Upper U with U^T U = (H + damp)^-1 in the order of the sweep, and the damping that made it possible.

    With J the reversal, J H J = L L^T makes M = J L J upper with H = M M^T, and U = M^-1: one Cholesky factor and one
    triangular inverse. Dead inputs get a diagonal of their own, so that they neither take nor give errors.
    """
    if not hessian.isfinite().all():
        return None, None
    order = _order(hessian.diagonal(), act_order)
    ordered = hessian[order][:, order]
    mean = float(hessian.diagonal().mean())
    unit = torch.eye(len(ordered), device=hessian.device)
    if mean <= 0:
        return None, None
    ordered.diagonal()[dead[order]] = mean
    part = damp
    while part <= MOST_DAMP:
        damped = ordered.clone()
        damped.diagonal().add_(part * mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            inverse = torch.linalg.solve_triangular(lower.flip(0, 1), unit, upper=True)
            if inverse.isfinite().all():
                return inverse, part
        part = max(2 * part, 1e-4)
    return None, None


def _sweep(weight: Tensor, factor: Tensor, order: Tensor, scales: Tensor, zeros: Tensor, rounding: Rounding) -> Tensor:
    """Codes (rows, n_in) uint8. Works on the transpose: an input's weights in all rows are one piece of memory."""
    left = weight[:, order].T.contiguous()
    groups = order // rounding.group
    steps, offsets = scales.T.contiguous(), zeros.T.contiguous()
    codes = torch.empty_like(left)
    errors = torch.empty(BLOCK, left.shape[1], device=left.device)
    table = kernels_for(weight, rounding)
    some = sweep_in_torch if table is None else table.get("gptq_sweep")
    for low in range(0, len(left), BLOCK):
        high = min(low + BLOCK, len(left))
        here = factor[low:high, low:high], steps, offsets, groups[low:high], rounding.bits
        codes[low:high] = some(left[low:high], errors[: high - low], *here)
        left[high:].addmm_(factor[low:high, high:].T, errors[: high - low], alpha=-1)
    result = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    result[:, order] = codes.T.to(torch.uint8)
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
