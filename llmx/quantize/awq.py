"""AWQ (Lin et al., 2306.00978): inputs with large activations get finer steps, by scales folded into what comes before.

All losses are tr((W - Q) H (W - Q)^T): the linears' squared output errors over the whole calibration set, at the price
of one product a candidate. Not scaling at all is one of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.quantize.grids import (
    Rounding,
    better_rows,
    blocks_of,
    nearest,
    ranged,
    round_to_nearest,
    row_losses,
    search,
)
from llmx.schemes.grid import Grid

RATIOS = tuple(step / 20 for step in range(20))
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
    A candidate that makes any one of the linears worse than round-to-nearest is no candidate.
    """
    ones = torch.ones(producers)
    sizes = [len(weight) for weight in weights]
    whole = torch.cat(list(weights))
    plain = _losses(whole, torch.ones_like(activations), hessian, rounding, sizes)
    best = Scaling(ones, 0.0, False, sum(plain), sum(plain))
    x = _by_producer(activations, owner, producers)
    w = _by_producer(_weight_means(whole, rounding.group), owner, producers)
    for duo in (True, False):
        for ratio in RATIOS:
            scales = _candidate(x, w, ratio, duo)
            losses = _losses(whole, scales[owner], hessian, rounding, sizes)
            worse = any(not loss <= without for loss, without in zip(losses, plain, strict=True))
            if not worse and sum(losses) < best.loss:
                best = Scaling(scales, ratio, duo, sum(losses), sum(plain))
    return best


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
    return Clipped(grid, losses, row_losses(original, round_to_nearest(original, rounding).weight(), hessian))


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
    made = round_to_nearest(weight * scales, rounding).weight() / scales
    return [float(part.sum()) for part in row_losses(weight, made, hessian).split(sizes)]
