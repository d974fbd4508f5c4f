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

from llmx.quantize.grids import (
    Rounding,
    better_rows,
    blocks_of,
    losses_of,
    nearest,
    nearest_errors,
    ranged,
    search,
)
from llmx.schemes.grid import Grid

STEPS, STEP, COARSE = 20, 0.05, 4  # ratios are 0, 0.05 ... 0.95
LEAST, SMALL = 1e-4, 1e-6


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
    weights: Sequence[Tensor], hessian: Tensor, activations: Tensor, rounding: Rounding, owner: Tensor, producers: int
) -> Scaling:
    """The scales for linears with one input, by grid search.

    weights: (rows, n_in) f32 each; activations: (n_in,) mean |x|; owner: (n_in,) which of the `producers` (channels of
    a norm, rows of a linear) makes each input: under grouped-query attention several heads' inputs of o_proj have one.
    A candidate that makes any one of the linears worse than round-to-nearest is no candidate. Every COARSE-th ratio is
    tried, then those about the best: losses change little from one to the next.
    """
    ones = torch.ones(producers)
    sizes = [len(weight) for weight in weights]
    whole = torch.cat(list(weights))
    plain = _losses(whole, torch.ones_like(activations), hessian, rounding, sizes)
    best = Scaling(ones, 0.0, False, sum(plain), sum(plain))
    x = _by_producer(activations, owner, producers)
    w = _by_producer(_weight_means(whole, rounding.group), owner, producers)

    def tried(step: int, duo: bool) -> Scaling:
        scales = _candidate(x, w, step * STEP, duo)
        losses = _losses(whole, scales[owner], hessian, rounding, sizes)
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


def clip(weight: Tensor, original: Tensor, scales: Tensor, hessian: Tensor, rounding: Rounding) -> Clipped:
    """The codes of a scaled linear (rows, n_in), each group's range searched; output errors against the original.

    weight = original * scales but for rounding; hessian: that of the unscaled inputs. Row by row the better of the
    searched and the whole ranges; a row that plain round-to-nearest would do better is left as the scales made it,
    and shows in `losses`.
    """
    scaled = hessian / (scales[:, None] * scales[None, :])
    searched = nearest(weight, *search(weight, rounding, blocks_of(scaled, rounding.group)), rounding)
    whole = nearest(weight, *ranged(weight, rounding), rounding)
    grid, losses = better_rows(searched, whole, weight, scaled)
    return Clipped(grid, losses, losses_of(nearest_errors(original, torch.ones(original.shape[1]), rounding), hessian))


def _by_producer(values: Tensor, owner: Tensor, producers: int) -> Tensor:
    """Means over the inputs that one producer makes."""
    total = torch.zeros(producers).index_add_(0, owner, values)
    return total / torch.zeros(producers).index_add_(0, owner, torch.ones_like(values))


def _weight_means(weight: Tensor, group: int) -> Tensor:
    """(n_in,): how large each input's weights are within their groups, on average over the rows."""
    parts = weight.abs().unflatten(1, (-1, group))
    means: Tensor = (parts / (parts.amax(-1, keepdim=True) + SMALL)).mean(0).flatten()
    return means


def _candidate(x: Tensor, w: Tensor, ratio: float, duo: bool) -> Tensor:
    """AWQ's scales: x^r, or x^r / w^(1-r), made symmetric about 1; what is no number is 1."""
    scales = (x**ratio / (w ** (1 - ratio) + LEAST) if duo else x**ratio).clamp(min=LEAST)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)


def _losses(weight: Tensor, scales: Tensor, hessian: Tensor, rounding: Rounding, sizes: list[int]) -> list[float]:
    """Of each linear (they are stacked), scaled, rounded to nearest and scaled back."""
    losses = losses_of(nearest_errors(weight, scales, rounding), hessian)
    return [float(part.sum()) for part in losses.split(sizes)]
