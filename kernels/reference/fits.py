"""Scales and whole numbers for groups of weights: the searches behind GGUF's quantised types, as ggml-quants.c does.

A group is a column: x (n, groups), float32, with a weight for each number's squared error. Sums run down the column in
order, and every step is one rounded float32 operation: kernels/cpu/fits.h gives the same bits, a lane for each group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = 1e-15  # groups whose largest number is smaller count as zeros


class Fit(NamedTuple):
    """scale, minimum (what weights lie above, >= 0): (groups,); codes (n, groups), whole numbers as float32."""

    scale: Tensor
    codes: Tensor
    minimum: Tensor


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, correctly rounded: torch multiplies by a reciprocal where one of them is no tensor."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return torch.div(*(part if isinstance(part, Tensor) else torch.full_like(like, part) for part in (a, b)))


def root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's of float32 is not everywhere."""
    return x.double().sqrt().float()


def nearest(x: Tensor, low: float, high: float) -> Tensor:
    """The nearest whole number within low..high, ties to even; `low` where x is no number."""
    return torch.where(x > low, x, low).clamp(max=high).round()


def total(terms: Tensor) -> Tensor:
    """The sum down each column, in order."""
    result = torch.zeros_like(terms[0])
    for term in terms:
        result += term
    return result


def stepped(first: float, step: float, index: int, most: int) -> float:
    """(first + step * index) + most in float32."""
    number = torch.tensor(first) + torch.tensor(step) * index + most
    return float(number)


def largest(x: Tensor) -> Tensor:
    """Of each column, the number that is largest without its sign; the first of equals."""
    result = torch.zeros_like(x[0])
    for row in x:
        result = torch.where(row.abs() > result.abs(), row, result)
    return result


def affine_fit(x: Tensor, w: Tensor, most: int, first: float, step: float, tries: int, absolute: bool = False) -> Fit:
    """x ~ scale * codes - minimum with codes in 0..most: ggml's make_qkx2_quants and make_qkx3_quants.

    Each try rounds with another scale, fits scale and minimum to that by least squares, and stays if its error
    (squared, or `absolute`) is lower. As there, a try rounds from the best minimum so far, not from the column's.
    """
    low, high = x.amin(0).clamp(max=0) + 0.0, x.amax(0)
    flat = high <= low
    sum_w, sum_x = total(w), total(w * x)

    def rounded(inverse: Tensor, low: Tensor) -> Tensor:
        return nearest(inverse * (x - low), 0, most)

    def error(scale: Tensor, codes: Tensor, low: Tensor) -> Tensor:
        off = scale * codes + low - x
        return total(w * (off.abs() if absolute else off * off))

    inverse = divide(most, high - low)
    scale, best_low = divide(1, inverse), low
    codes = rounded(inverse, low)
    best = error(scale, codes, low)
    for index in range(tries + 1):
        tried = rounded(divide(stepped(first, step, index, most), high - best_low), best_low)
        weighted = w * tried
        sum_l, sum_l2, sum_xl = total(weighted), total(weighted * tried), total(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = divide(sum_w * sum_xl - sum_x * sum_l, determinant)
        new_low = divide(sum_l2 * sum_x - sum_l * sum_xl, determinant)
        above = new_low > 0
        new_scale = torch.where(above, divide(sum_xl, sum_l2), new_scale)
        new_low = torch.where(above, 0.0, new_low)
        new_error = error(new_scale, tried, new_low)
        better = (determinant > 0) & (new_error < best)
        codes, best = torch.where(better, tried, codes), torch.where(better, new_error, best)
        scale, best_low = torch.where(better, new_scale, scale), torch.where(better, new_low, best_low)
    return Fit(torch.where(flat, 0.0, scale), torch.where(flat, 0.0, codes), -torch.where(flat, low, best_low))


def symmetric_fit(x: Tensor, w: Tensor, most: int) -> Fit:
    """x ~ scale * codes with codes in -most..most - 1: ggml's make_qx_quants with weights."""
    peak = largest(x)
    empty = peak.abs() < EMPTY

    def tried(inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = nearest(inverse * x, -most, most - 1)
        return codes, total(w * x * codes), total(w * codes * codes)

    codes, sum_xl, sum_l2 = tried(divide(-most, peak))
    scale = torch.where(sum_l2 > 0, divide(sum_xl, sum_l2), 0.0)
    best = scale * sum_xl
    for index in (*range(-9, 0), *range(1, 10)):
        new_codes, sum_xl, sum_l2 = tried(divide(-stepped(most, 0.1, index, 0), peak))
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2)
        new_scale = divide(sum_xl, sum_l2)
        codes, scale = torch.where(better, new_codes, codes), torch.where(better, new_scale, scale)
        best = torch.where(better, new_scale * sum_xl, best)
    return Fit(torch.where(empty, 0.0, scale), torch.where(empty, float(-most), codes), torch.zeros_like(scale))


def improved_fit(x: Tensor, most: int) -> Fit:
    """x ~ scale * codes with codes in -most..most - 1, each code in turn set to its best: ggml's make_q3_quants."""
    peak = largest(x)
    empty = peak.abs() < EMPTY
    w = x * x
    codes = nearest(divide(-most, peak) * x, -most, most - 1)
    sum_xl, sum_l2 = total(w * x * codes), total(w * codes * codes)
    for _ in range(5):
        for i in range(len(x)):
            part = w[i] * x[i]
            rest_xl, rest_l2 = sum_xl - part * codes[i], sum_l2 - w[i] * codes[i] * codes[i]
            new = nearest(divide(x[i] * rest_l2, rest_xl), -most, most - 1)
            new_xl, new_l2 = rest_xl + part * new, rest_l2 + w[i] * new * new
            better = (rest_xl > 0) & (new != codes[i]) & (new_l2 > 0)
            better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            codes[i] = torch.where(better, new, codes[i])
            sum_xl, sum_l2 = torch.where(better, new_xl, sum_xl), torch.where(better, new_l2, sum_l2)
    scale = torch.where(~empty & (sum_l2 > 0), divide(sum_xl, sum_l2), 0.0)
    return Fit(scale, torch.where(empty, float(-most), codes), torch.zeros_like(scale))


def positive_fit(x: Tensor, w: Tensor, most: int) -> Fit:
    """x ~ scale * codes with x >= 0 and codes in 0..most: ggml's make_qp_quants."""
    peak = x.amax(0).clamp(min=0) + 0.0
    empty = peak < EMPTY

    def rounded(inverse: Tensor) -> Tensor:
        return nearest(inverse * x, 0, most)

    def error(inverse: Tensor) -> Tensor:
        off = x - divide(1, inverse) * rounded(inverse)
        return total(w * off * off)

    inverse = divide(most, peak)
    best = error(inverse)
    for index in (*range(-4, 0), *range(1, 5)):
        tried = divide(stepped(0.0, 0.1, index, most), peak)
        found = error(tried)
        better = found < best
        inverse, best = torch.where(better, tried, inverse), torch.where(better, found, best)
    codes = rounded(inverse)
    sum_xl, sum_l2 = total(w * x * codes), total(w * codes * codes)
    for _ in range(5):
        for i in range(len(x)):
            part = w[i] * x[i]
            rest_xl, rest_l2 = sum_xl - part * codes[i], sum_l2 - w[i] * codes[i] * codes[i]
            new = nearest(divide(x[i] * rest_l2, rest_xl), 0, most)
            new_xl, new_l2 = rest_xl + part * new, rest_l2 + w[i] * new * new
            better = (rest_xl > 0) & (rest_l2 > 0) & (new != codes[i])
            better &= new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            codes[i] = torch.where(better, new, codes[i])
            sum_xl, sum_l2 = torch.where(better, new_xl, sum_xl), torch.where(better, new_l2, sum_l2)
    scale = torch.where(~empty & (sum_l2 > 0), divide(sum_xl, sum_l2), 0.0)
    return Fit(scale, torch.where(empty, 0.0, codes), torch.zeros_like(scale))


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4's


def nearest_level(x: Tensor) -> Tensor:
    """The index of the level nearest to each number, uint8; of two equally near the higher."""
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(LEVELS)])
    return torch.bucketize(torch.where(x == x, x, -torch.inf), between, right=True).to(torch.uint8)


def level_fit(x: Tensor, w: Tensor) -> Tensor:
    """The scale (groups,) by which x comes closest to IQ4's levels: quantize_row_iq4_nl_impl with 15 tries."""
    peak = largest(x)
    levels = torch.tensor(LEVELS, dtype=torch.float32)

    def tried(inverse: Tensor) -> tuple[Tensor, Tensor]:
        level = levels[nearest_level(inverse * x).int()]
        return total(w * level * x), total(w * level * level)

    sum_xl, sum_l2 = tried(divide(1, divide(-peak, LEVELS[0])))
    scale = torch.where(sum_l2 > 0, divide(sum_xl, sum_l2), 0.0)
    best = scale * sum_xl
    for index in range(-7, 8):
        sum_xl, sum_l2 = tried(divide(index + LEVELS[0], peak))
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2)
        new = divide(sum_xl, sum_l2)
        scale, best = torch.where(better, new, scale), torch.where(better, new * sum_xl, best)
    return torch.where(peak.abs() < EMPTY, 0.0, scale)
