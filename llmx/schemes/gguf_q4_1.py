"""GGUF Q4_1: float16 scale d and minimum m, then 32 numbers q of 4 bits; a weight is d * q + m."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, half_bytes, inverse, numbers, pack_numbers, stored_halves


class Q4_1(PartedScheme):
    kind = "Q4_1"
    block_bytes = 20
    error = 0.1
    kernel_layout = "q4+m"

    def parts(self, blocks: Tensor) -> Parts:
        return Parts(numbers(blocks[:, 4:], 4, 16), stored_halves(blocks, 0), stored_halves(blocks, 2))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        low, high = weights.aminmax(dim=-1, keepdim=True)
        scale = torch.div(high - low, torch.full_like(low, 15))
        q = ((weights - low) * inverse(scale) + 0.5).trunc().clamp(0, 15)
        return torch.cat([half_bytes(scale), half_bytes(low), pack_numbers(q.to(torch.uint8), 4, 16)], -1)


SCHEME = Q4_1()
