"""Ops on arrays, which kernels of the CPU do without torch: what the torch version of each gives."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from llmx.kernels.reference import quantize

HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def quantize_blocks(
    rows: NDArray[np.float32], kind: str, importance: NDArray[np.float32] | None = None, threads: int = 1
) -> NDArray[np.uint8]:
    """rows (n, inputs), finite; importance (inputs,), >= 0 -> (n, bytes). threads: torch has its own."""
    given = None if importance is None else torch.from_numpy(importance)
    made: NDArray[np.uint8] = quantize.quantize_blocks(torch.from_numpy(rows), kind, given).numpy()
    return made


def widen_halves(halves: NDArray[np.uint16], kind: str, threads: int = 1) -> NDArray[np.float32]:
    """halves: bits of F16 or BF16, of any shape -> the same numbers."""
    bits = np.require(halves, requirements=["C", "A"]).view(np.int16)  # which every torch has
    made: NDArray[np.float32] = torch.from_numpy(bits).view(HALVES[kind]).float().numpy()
    return made
