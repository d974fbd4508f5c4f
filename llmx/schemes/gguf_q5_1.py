"""GGUF Q5_1: float16 scale d and minimum m, 32 high bits, 32 times 4 low bits of numbers q; a weight is d * q + m."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, half_bytes, inverse, numbers, pack_numbers, stored_halves


class Q5_1(PartedScheme):
    kind = "Q5_1"
    block_bytes = 24
    error = 0.05
    kernel_layout = "q5+m"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 8:], 4, 16) | numbers(blocks[:, 4:8], 1) << 4
        return Parts(q, stored_halves(blocks, 0), stored_halves(blocks, 2))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        low, high = weights.aminmax(dim=-1, keepdim=True)
        scale = torch.div(high - low, torch.full_like(low, 31))
        q = ((weights - low) * inverse(scale) + 0.5).trunc().clamp(0, 31).to(torch.uint8)
        bits = [pack_numbers(q >> 4, 1), pack_numbers(q & 15, 4, 16)]
        return torch.cat([half_bytes(scale), half_bytes(low), *bits], -1)


SCHEME = Q5_1()
