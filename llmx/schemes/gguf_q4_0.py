"""GGUF Q4_0: float16 scale d, then 32 numbers q of 4 bits; a weight is d * (q - 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, half_bytes, inverse, numbers, pack_numbers, stored_halves


class Q4_0(PartedScheme):
    kind = "Q4_0"
    block_bytes = 18
    error = 0.12
    kernel_layout = "q4"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 2:], 4, 16).view(torch.int8)
        return Parts(q - 8, stored_halves(blocks, 0))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        largest = weights.gather(-1, weights.abs().argmax(-1, keepdim=True))
        scale = largest / -8  # so that the largest weight is exactly q = 0
        q = (weights * inverse(scale) + 8.5).trunc().clamp(0, 15)
        return torch.cat([half_bytes(scale), pack_numbers(q.to(torch.uint8), 4, 16)], -1)


SCHEME = Q4_0()
