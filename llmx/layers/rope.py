"""Rotary embedding tables: default and Llama 3's scaling, from either style of Hugging Face config or from GGUF."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """`kind`: "default", "linear" or "llama3". `rotated`: dimensions of a head that turn. `divisors`: per frequency, if stored."""

    theta: float
    rotated: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()


def frequencies(config: RopeConfig) -> Tensor:
    """(rotated / 2,) f64 angles per position. The llama3 rule is that of Llama 3.1's release (a smooth step between the
    frequencies that are kept and those divided by `factor`)."""
    exponent = torch.arange(0, config.rotated, 2, dtype=torch.float64) / config.rotated
    inverse = config.theta**-exponent
    if config.divisors:
        return inverse / torch.tensor(config.divisors, dtype=torch.float64)
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = ((config.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse * (smooth + (1 - smooth) / config.factor)
    return inverse


class Rope:
    """cos and sin for every position below `length`: tables (length, rotated / 2) f32 on the device."""

    def __init__(self, config: RopeConfig, length: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(config))
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, rotated / 2) each. Positions past the table (guesses of a step in flight) are clamped: dropped anyway."""
        positions = positions.clamp(max=len(self.cos) - 1)
        return self.cos[positions], self.sin[positions]
