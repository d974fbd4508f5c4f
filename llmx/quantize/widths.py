"""8-bit weights: int8 by row with SmoothQuant's scales, and float8 (e4m3) by row, tensor or block of 128 x 128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.quantize.grids import TINIEST

FP8_MOST = 448.0  # e4m3fn's largest number
FP8_BLOCK = 128
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Smoothing:
    """scales: (producers,), all 1 where none is better. alpha: SmoothQuant's. losses, plain: of each linear."""

    scales: Tensor
    alpha: float | None
    losses: tuple[float, ...]
    plain: tuple[float, ...]


def int8_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n_out, n_in) f32 -> int8 codes in [-127, 127] and f32 scales (n_out, 1), rounded to the `dtype` they are stored
    in."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=TINIEST).to(dtype).float()
    return torch.round(weight / scale).clamp_(-127, 127).to(torch.int8), scale


def fp8(weight: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n_out, n_in) f32 -> float8_e4m3fn and f32 scales, the multipliers, rounded to `dtype`.

    kind: "channel": scales (n_out, 1); "tensor": (1,); "block": (ceil(n_out / 128), ceil(n_in / 128)), the last
    blocks filled up with zeros. Clamped before the cast, which not every device saturates.
    """
    rows, columns = weight.shape
    if kind == "block":
        size = FP8_BLOCK
        filled = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
        parts = filled.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scale = _fp8_scale(parts.abs().amax((1, 3)), dtype)
        spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
    else:
        most = weight.abs().amax(1, keepdim=True) if kind == "channel" else weight.abs().amax().reshape(1)
        scale = spread = _fp8_scale(most, dtype)
    return (weight / spread).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale


def _fp8_scale(most: Tensor, dtype: torch.dtype) -> Tensor:
    return (most / FP8_MOST).clamp(min=TINIEST).to(dtype).float()


def smooth(
    weights: Sequence[Tensor], sample: Tensor, most: Tensor, owner: Tensor, producers: int, dtype: torch.dtype
) -> Smoothing:
    """SmoothQuant (Xiao et al., 2211.10438): scales max|x|^a / max|w|^(1-a), the best a of ALPHAS, or none at all.

    weights: (rows, n_in) each, f32, f16 or bf16; sample: (tokens, n_in) f32 inputs on which errors are measured, their
    rows rounded to 8 bits as the kernels do; most: (n_in,) max |x| over all tokens; owner, producers: as in
    awq.find_scales. An alpha that makes any one of the linears worse than none is no candidate.
    """
    plain = _errors(weights, sample, torch.ones_like(most), dtype)
    best = Smoothing(torch.ones(producers), None, plain, plain)
    x = torch.zeros(producers).scatter_reduce_(0, owner, most, "amax")
    largest = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)
    w = torch.zeros(producers).scatter_reduce_(0, owner, largest, "amax")
    for alpha in ALPHAS:
        scales = x**alpha / w ** (1 - alpha)
        scales = torch.where(scales.isfinite() & (scales > 0), scales, 1.0)
        losses = _errors(weights, sample, scales[owner], dtype)
        worse = any(not loss <= without for loss, without in zip(losses, plain, strict=True))
        if not worse and sum(losses) < sum(best.losses):
            best = Smoothing(scales, alpha, losses, plain)
    return best


def rounded_rows(x: Tensor) -> Tensor:
    """Each row of (tokens, n_in) on its own grid of 255 steps: dynamic per-token int8 activations."""
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return torch.round(x / scale) * scale


def _errors(weights: Sequence[Tensor], x: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[float, ...]:
    rounded = rounded_rows(x / scales)
    found = []
    for weight in weights:
        codes, scale = int8_rows(weight * scales, dtype)
        found.append(float((rounded @ (codes.float() * scale).T - x @ weight.float().T).square().sum()))
    return tuple(found)
