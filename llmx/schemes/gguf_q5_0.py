"""GGUF Q5_0: float16 scale d, 32 high bits, 32 times 4 low bits of numbers q; a weight is d * (q - 16)."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, half_bytes, inverse, numbers, pack_numbers, stored_halves


class Q5_0(PartedScheme):
    kind = "Q5_0"
    block_bytes = 22
    error = 0.06
    kernel_layout = "q5"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 6:], 4, 16) | numbers(blocks[:, 2:6], 1) << 4
        return Parts(q.view(torch.int8) - 16, stored_halves(blocks, 0))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        largest = weights.gather(-1, weights.abs().argmax(-1, keepdim=True))
        scale = largest / -16  # so that the largest weight is exactly q = 0
        q = (weights * inverse(scale) + 16.5).trunc().clamp(0, 31).to(torch.uint8)
        return torch.cat([half_bytes(scale), pack_numbers(q >> 4, 1), pack_numbers(q & 15, 4, 16)], -1)


SCHEME = Q5_0()
