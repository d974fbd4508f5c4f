"""AWQ (Lin et al., 2306.00978): inputs with large activations get finer steps, by scales folded into what comes before.

All losses are tr((W - Q) H (W - Q)^T): the linears' squared output errors over the whole calibration set, at the price
of one product a candidate. Not scaling at all is one of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.quantize.gram import Gram
from llmx.quantize.grids import (
    Rounding,
    better_rows,
    losses_of,
    nearest,
    nearest_errors,
    pieces,
    ranged,
    rows_at_once,
    search,
    stacked,
)
from llmx.schemes.grid import Grid

STEPS, STEP, COARSE = 20, 0.05, 4  # ratios are 0, 0.05 ... 0.95
LEAST, SMALL = 1e-4, 1e-6
PANEL = 128  # columns of a matrix at a time


@dataclass(frozen=True)
class Scaling:
    """scales: (producers,), by which each output of what comes before is divided; all 1: none is better. loss and
    plain: summed squared output errors of the linears behind, with the scales and without."""

    scales: Tensor
    ratio: float
    duo: bool
    loss: float
    plain: float


@dataclass(frozen=True)
class Clipped:
    """losses, nearest: as in gptq.Solved."""

    grid: Grid
    losses: Tensor
    nearest: Tensor


def find_scales(
    weights: Sequence[Tensor], hessian: Gram, activations: Tensor, rounding: Rounding, owner: Tensor, producers: int
) -> Scaling:
    """The scales for linears with one input, by grid search.

    weights: (rows, n_in) each, f32, f16 or bf16; activations: (n_in,) mean |x|; owner: (n_in,) which of the `producers`
    (channels of a norm, rows of a linear) makes each input: under grouped-query attention several heads' inputs of
    o_proj have one. A candidate that makes any one of the linears worse than round-to-nearest is no candidate. Every
    COARSE-th ratio is tried, then those about the best: losses change little from one to the next.
    """
    ones = torch.ones(producers)
    sizes = [len(weight) for weight in weights]
    plain = _losses(weights, torch.ones_like(activations), hessian, rounding, sizes)
    best = Scaling(ones, 0.0, False, sum(plain), sum(plain))
    x = _by_producer(activations, owner, producers)
    w = _by_producer(_weight_means(weights, rounding.group), owner, producers)

    def tried(step: int, duo: bool) -> Scaling:
        scales = _candidate(x, w, step * STEP, duo)
        losses = _losses(weights, scales[owner], hessian, rounding, sizes)
        worse = any(not loss <= without for loss, without in zip(losses, plain, strict=True))
        return Scaling(scales, step * STEP, duo, math.inf if worse else sum(losses), sum(plain))

    coarse = [(step, duo) for duo in (True, False) for step in range(0, STEPS, COARSE) if step or duo]
    best, at = _least(best, [(tried(*one), one) for one in coarse])
    if at is not None:
        step, duo = at
        near = [n for n in range(step - COARSE + 1, step + COARSE) if n != step and 0 < n < STEPS]
        best, _ = _least(best, [(tried(n, duo), (n, duo)) for n in near])
    return best


def _least(best: Scaling, found: Sequence[tuple[Scaling, tuple[int, bool]]]) -> tuple[Scaling, tuple[int, bool] | None]:
    at = None
    for scaling, one in found:
        if scaling.loss < best.loss:
            best, at = scaling, one
    return best, at


def clip(weight: Tensor, scales: Tensor, rows: Tensor, hessian: Gram, rounding: Rounding) -> Clipped:
    """The codes of weight * scales / rows[:, None], each group's range searched; output errors against weight / rows.

    weight: (rows, n_in) f32, f16 or bf16, some rows of which are worked on at a time; scales: (n_in,), of its inputs;
    rows: what its outputs are divided by; hessian: that of the unscaled inputs. Row by row the better of the searched
    and the whole ranges; a row that plain round-to-nearest would do better is left as the scales made it, and shows in
    `losses`.
    """
    grouped, ones = scales.unflatten(0, (-1, rounding.group)), torch.ones_like(scales)
    blocks = hessian.blocks(rounding.group) / (grouped[:, :, None] * grouped[:, None, :])
    grids, losses, plain = list[Grid](), [], []
    step = rows_at_once(weight)
    for part, divided in zip(weight.split(step), rows.split(step), strict=True):
        target = part.float() * scales / divided[:, None]
        searched = nearest(target, *search(target, rounding, blocks), rounding)
        whole = nearest(target, *ranged(target, rounding), rounding)
        grid, found = better_rows(searched, whole, target, hessian, scales)
        grids.append(grid)
        losses.append(found)
        plain.append(losses_of(nearest_errors(part.float() / divided[:, None], ones, rounding), hessian))
    return Clipped(stacked(grids), torch.cat(losses), torch.cat(plain))


def _by_producer(values: Tensor, owner: Tensor, producers: int) -> Tensor:
    """Means over the inputs that one producer makes."""
    total = torch.zeros(producers).index_add_(0, owner, values)
    return total / torch.zeros(producers).index_add_(0, owner, torch.ones_like(values))


def _weight_means(weights: Sequence[Tensor], group: int) -> Tensor:
    """(n_in,): how large each input's weights are within their groups, on average over the rows."""
    whole = math.lcm(group, PANEL)  # inputs at a time
    found = []
    for low in range(0, weights[0].shape[1], whole):
        part = torch.cat([weight[:, low : low + whole].float() for weight in weights]).abs_().unflatten(1, (-1, group))
        found.append((part / (part.amax(-1, keepdim=True) + SMALL)).mean(0).flatten())
    return torch.cat(found)


def _candidate(x: Tensor, w: Tensor, ratio: float, duo: bool) -> Tensor:
    """AWQ's scales: x^r, or x^r / w^(1-r), made symmetric about 1; what is no number is 1."""
    scales = (x**ratio / (w ** (1 - ratio) + LEAST) if duo else x**ratio).clamp(min=LEAST)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)


def _losses(
    weights: Sequence[Tensor], scales: Tensor, hessian: Gram, rounding: Rounding, sizes: list[int]
) -> list[float]:
    """Of each linear, scaled, rounded to nearest and scaled back."""
    parts = [losses_of(nearest_errors(part, scales, rounding), hessian) for part in pieces(weights)]
    return [float(part.sum()) for part in torch.cat(parts).split(sizes)]
