"""GGUF Q4_1: float16 scale d and minimum m, then 32 numbers q of 4 bits; a weight is d * q + m."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, half_bytes, halves, inverse, numbers, pack_numbers


class Q4_1(BlockScheme):
    kind = "Q4_1"
    block_bytes = 20
    error = 0.1

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return numbers(blocks[:, 4:], 4, 16).float().mul_(halves(blocks, 0)).add_(halves(blocks, 2))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        low, high = weights.aminmax(dim=-1, keepdim=True)
        scale = torch.div(high - low, torch.full_like(low, 15))
        q = ((weights - low) * inverse(scale) + 0.5).trunc().clamp(0, 15)
        return torch.cat([half_bytes(scale), half_bytes(low), pack_numbers(q.to(torch.uint8), 4, 16)], -1)


SCHEME = Q4_1()
