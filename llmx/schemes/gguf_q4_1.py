"""GGUF Q4_1: float16 scale d and minimum m, then 32 numbers q of 4 bits; a weight is d * q + m."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.base import Case
from llmx.schemes.blocks import BlockScheme, half_bytes, halves, inverse, nibbles, pack_nibbles


class Q4_1(BlockScheme):
    name = "Q4_1"
    kind = "Q4_1"
    block_bytes = 20
    cases = (Case("Q4_1", error=0.1),)

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return nibbles(blocks[:, 4:]).mul_(halves(blocks, 0)).add_(halves(blocks, 2))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        low, high = weights.aminmax(dim=-1, keepdim=True)
        scale = torch.div(high - low, torch.full_like(low, 15))
        q = ((weights - low) * inverse(scale) + 0.5).trunc().clamp(0, 15)
        return torch.cat([half_bytes(scale), half_bytes(low), pack_nibbles(q.to(torch.uint8))], -1)


SCHEME = Q4_1()
