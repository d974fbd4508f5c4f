"""Weights to GGUF's blocks, as ggml's quantisers round them: the op `quantize_blocks`.

What the bytes mean: llmx/schemes/gguf_*.py. With importance (the mean square of each input) errors are weighted by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmx.kernels.reference.fits import (
    EMPTY,
    Fit,
    affine_fit,
    divide,
    improved_fit,
    largest,
    level_fit,
    nearest,
    nearest_level,
    positive_fit,
    root,
    symmetric_fit,
    total,
)

CHUNK = 1 << 21  # weights at a time: bounds the temporaries


def quantize_blocks(rows: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """rows (n, inputs), float32, finite; importance (inputs,), float32, >= 0 -> (n, bytes), uint8.

    `inputs` are whole blocks of the GGUF type `kind`, one of KINDS.
    """
    size, quantizer = KINDS[kind]
    inputs = rows.shape[1]
    assert inputs % size == 0, f"{inputs} inputs are not whole blocks of {size}"
    done = []
    for part in rows.split(max(1, CHUNK // inputs)):
        blocks = part.reshape(-1, size)
        if importance is None:
            done.append(quantizer(blocks, None).reshape(len(part), -1))
            continue
        square = divide(total((part * part).T), inputs)  # what the types of 32 weigh with; the others have their own
        each = importance.reshape(-1, size).repeat(len(part), 1)
        weighting = (each, square.repeat_interleave(inputs // size))
        done.append(quantizer(blocks, weighting).reshape(len(part), -1))
    return torch.cat(done)


Weighting = tuple[Tensor, Tensor]  # importance (blocks, size), and the mean square of each block's row (blocks,)


def bits(codes: Tensor, width: int, run: int = 1) -> Tensor:
    """uint8 (n, m * 8 / width), each below 2^width -> bytes (n, m): `run` bytes take one number each, then one more."""
    each = 8 // width
    parts = codes.reshape(codes.shape[0], -1, each, run)
    packed = parts[:, :, 0].clone()
    for index in range(1, each):
        packed |= parts[:, :, index] << index * width
    return packed.flatten(1)


def half(values: Tensor) -> Tensor:
    """float32 (n,) -> the bytes of their float16 (n, 2)."""
    return values.half()[:, None].view(torch.uint8)


def columns(blocks: Tensor, width: int) -> Tensor:
    """(n, size) -> (width, n * size / width): a column for each group."""
    return blocks.reshape(-1, width).T.contiguous()


def importances(x: Tensor, each: Tensor, square: Tensor) -> Tensor:
    """Of a number: its input's importance * sqrt(the mean square around it + its square)."""
    return columns(each, len(x)) * root(square.repeat_interleave(x.shape[1] // len(square)) + x * x)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, divide(1, scale))


def nibbles(codes: Tensor, wide: bool) -> Tensor:
    """Codes (n, 32), uint8 -> what Q4 stores, or Q5: the fifth bits first."""
    low = bits(codes & 15, 4, 16)
    return torch.cat([bits(codes >> 4, 1), low], 1) if wide else low


def q_0(most: int) -> Callable[[Tensor, Weighting | None], Tensor]:
    """Q4_0 and Q5_0: codes around zero."""

    def quantizer(blocks: Tensor, weighting: Weighting | None) -> Tensor:
        x = columns(blocks, 32)
        if weighting is None:
            scale = divide(largest(x), -most)  # so that the largest weight is exactly the lowest code
            codes = (x * inverse(scale) + (most + 0.5)).trunc().clamp(0, 2 * most - 1)
        else:
            fit = symmetric_fit(x, importances(x, *weighting), most)
            scale, codes = fit.scale, fit.codes + most
        return torch.cat([half(scale), nibbles(codes.T.to(torch.uint8), most == 16)], 1)

    return quantizer


def q_1(most: int) -> Callable[[Tensor, Weighting | None], Tensor]:
    """Q4_1 and Q5_1: codes above a minimum."""

    def quantizer(blocks: Tensor, weighting: Weighting | None) -> Tensor:
        x = columns(blocks, 32)
        if weighting is None:
            low = x.amin(0) + 0.0
            scale = divide(x.amax(0) - low, most)
            codes = ((x - low) * inverse(scale) + 0.5).trunc().clamp(0, most)
        else:
            fit = affine_fit(x, importances(x, *weighting), most, -0.9, 0.05, 36)
            scale, low, codes = fit.scale, -fit.minimum, fit.codes
        return torch.cat([half(scale), half(low), nibbles(codes.T.to(torch.uint8), most == 31)], 1)

    return quantizer


def q8_0(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    scale = divide(blocks.abs().amax(1), 127)
    scaled = blocks * inverse(scale)[:, None]
    codes = scaled.sign() * (scaled.abs() + 0.5).floor()  # halves away from zero
    return torch.cat([half(scale), codes.to(torch.int8).view(torch.uint8)], 1)


def whole(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Numbers >= 0 (n, groups) -> whole numbers 0..most, and what they count, as float16 holds it, (n,) float32."""
    peak = numbers.amax(1).clamp(min=0) + 0.0
    factor = torch.where(peak > 0, divide(most, peak), 0.0)
    return nearest(factor[:, None] * numbers, 0, most), divide(peak, most).half().float()


def rounded(blocks: Tensor, step: Tensor, low: Tensor | None, lowest: int, highest: int, else_: Tensor) -> Tensor:
    """Codes (n, size) of blocks by each group's step (n, groups); where the step is 0, `else_`."""
    x = blocks.reshape(*step.shape, -1)
    above = x if low is None else x + low[..., None]
    codes = nearest(divide(above, step[..., None].expand_as(x)), lowest, highest)
    return torch.where(step[..., None] == 0, else_.T.reshape(x.shape), codes).flatten(1)


def k_affine(
    blocks: Tensor, weighting: Weighting | None, width: int, most: int, most_scale: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What Q2_K, Q4_K and Q5_K have in common: codes (n, 256), scales and minima (n, groups), d and e (n,)."""
    x = columns(blocks, width)
    groups = 256 // width
    if weighting is None:
        absolute = most == 3
        w = x.abs() if absolute else root(divide(total(x * x), width)) + x.abs()
        first, tries = (-1.0, 20) if most == 15 else (-0.5, 15)
        fit = affine_fit(x, w, most, first, 0.1, tries, absolute)
        (scales, d), (minima, e) = (whole(part.reshape(-1, groups), most_scale) for part in (fit.scale, fit.minimum))
    else:
        square = total((blocks * blocks).T) * (1 if width == 16 else 2) / 256
        w = importances(x, weighting[0], square)
        fit = affine_fit(x, w, most, -0.9, 0.05, 36)
        of_groups = total(w).reshape(-1, groups).T
        outer = [positive_fit(part.reshape(-1, groups).T, of_groups, most_scale) for part in (fit.scale, fit.minimum)]
        scales, minima = (found.codes.T for found in outer)
        d, e = (found.scale.half().float() for found in outer)
    codes = rounded(blocks, d[:, None] * scales, e[:, None] * minima, 0, most, fit.codes)
    return codes.to(torch.uint8), scales.to(torch.uint8), minima.to(torch.uint8), d, e


def six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits -> 12 bytes."""
    parts = [(part[:, :4] | part[:, 4:] >> 4 << 6) for part in (scales, minima)]
    return torch.cat([*parts, scales[:, 4:] & 15 | minima[:, 4:] << 4], 1)


def q2_k(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    codes, scales, minima, d, e = k_affine(blocks, weighting, 16, 3, 15)
    return torch.cat([scales | minima << 4, bits(codes, 2, 32), half(d), half(e)], 1)


def q4_k(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    codes, scales, minima, d, e = k_affine(blocks, weighting, 32, 15, 63)
    return torch.cat([half(d), half(e), six_bits(scales, minima), bits(codes, 4, 32)], 1)


def q5_k(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    codes, scales, minima, d, e = k_affine(blocks, weighting, 32, 31, 63)
    return torch.cat([half(d), half(e), six_bits(scales, minima), bits(codes >> 4, 1, 32), bits(codes & 15, 4, 32)], 1)


def q3_k(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    x = columns(blocks, 16)
    if weighting is None:
        fit = improved_fit(x, 4)
        of_groups = fit.scale.reshape(-1, 16)
        peak = largest(of_groups.T)
        factor = divide(-32, peak)
        scales = nearest(factor[:, None] * of_groups, -32, 31)
        d, scales = torch.where(peak == 0, 0.0, divide(1, factor)), torch.where(peak[:, None] == 0, -32.0, scales)
    else:
        w = importances(x, weighting[0], total((blocks * blocks).T) * 2 / 256)
        fit = symmetric_fit(x, w, 4)
        outer = symmetric_fit(fit.scale.reshape(-1, 16).T, total(w).reshape(-1, 16).T, 32)
        d, scales = outer.scale, outer.codes.T
    d = d.half().float()
    codes = (rounded(blocks, d[:, None] * scales, None, -4, 3, fit.codes) + 4).to(torch.uint8)
    s = (scales + 32).to(torch.uint8)
    return torch.cat(
        [bits(codes >> 2, 1, 32), bits(codes & 3, 2, 32), bits(s & 15, 4, 8), bits(s >> 4, 2, 4), half(d)], 1
    )


def q6_k(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    x = columns(blocks, 16)
    fit: Fit = symmetric_fit(x, x * x if weighting is None else columns(weighting[0], 16), 32)
    of_groups = fit.scale.reshape(-1, 16)
    peak = largest(of_groups.T)
    factor = divide(-128, peak)
    scales = nearest(factor[:, None] * of_groups, -128, 127)
    d = divide(1, factor).half().float()
    codes = (rounded(blocks, d[:, None] * scales, None, -32, 31, fit.codes) + 32).to(torch.uint8)
    parts = [bits(codes & 15, 4, 64), bits(codes >> 4, 2, 32), scales.to(torch.int8).view(torch.uint8), half(d)]
    return torch.where((peak.abs() < EMPTY)[:, None], 0, torch.cat(parts, 1))


def iq4_nl(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    x = columns(blocks, 32)
    square = total((blocks * blocks).T) * (2 / 32)
    scale = level_fit(x, x * x if weighting is None else importances(x, weighting[0], square))
    return torch.cat([half(scale), bits(nearest_level(inverse(scale) * x).T, 4, 16)], 1)


def iq4_xs(blocks: Tensor, weighting: Weighting | None) -> Tensor:
    x = columns(blocks, 32)
    square = total((blocks * blocks).T) * (2 / 256)
    found = level_fit(x, x * x if weighting is None else importances(x, weighting[0], square)).reshape(-1, 8)
    d = divide(-largest(found.T), 32)
    scales = nearest(inverse(d)[:, None] * found, -32, 31)
    codes = nearest_level(inverse(d[:, None] * scales)[..., None] * blocks.reshape(-1, 8, 32)).flatten(1)
    s = (scales + 32).to(torch.uint8)
    return torch.cat([half(d), bits(s >> 4, 2), bits(s & 15, 4), bits(codes, 4, 16)], 1)


KINDS: dict[str, tuple[int, Callable[[Tensor, Weighting | None], Tensor]]] = {
    "Q4_0": (32, q_0(8)),
    "Q4_1": (32, q_1(15)),
    "Q5_0": (32, q_0(16)),
    "Q5_1": (32, q_1(31)),
    "Q8_0": (32, q8_0),
    "IQ4_NL": (32, iq4_nl),
    "Q2_K": (256, q2_k),
    "Q3_K": (256, q3_k),
    "Q4_K": (256, q4_k),
    "Q5_K": (256, q5_k),
    "Q6_K": (256, q6_k),
    "IQ4_XS": (256, iq4_xs),
}
