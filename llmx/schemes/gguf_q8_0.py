"""GGUF Q8_0: float16 scale d, then 32 signed bytes q; a weight is d * q."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, half_bytes, inverse, stored_halves


class Q8_0(PartedScheme):
    kind = "Q8_0"
    block_bytes = 34
    error = 0.01
    kernel_layout = "q8"

    def parts(self, blocks: Tensor) -> Parts:
        return Parts(blocks[:, 2:].view(torch.int8), stored_halves(blocks, 0))

    def pack_blocks(self, weights: Tensor) -> Tensor:
        largest = weights.abs().amax(-1, keepdim=True)
        scale = torch.div(largest, torch.full_like(largest, 127))
        scaled = weights * inverse(scale)
        q = scaled.sign() * (scaled.abs() + 0.5).floor()  # halves away from zero, as ggml rounds
        return torch.cat([half_bytes(scale), q.to(torch.int8).view(torch.uint8)], -1)


SCHEME = Q8_0()
