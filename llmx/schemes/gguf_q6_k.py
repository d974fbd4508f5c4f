"""GGUF Q6_K: 256 numbers q of 6 bits; each 16 have a scale s, a signed byte; a weight is d * s * (q - 32).

Bytes: 128 of the q's low four bits, 64 of their high two, 16 of s, float16 d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, stored_halves


class Q6_K(PartedScheme):
    kind = "Q6_K"
    size = 256
    block_bytes = 210
    kernel_layout = "q6*f"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, :128], 4, 64) | numbers(blocks[:, 128:192], 2, 32) << 4
        scales = blocks[:, 192:208].view(torch.int8)
        return Parts(q.view(torch.int8) - 32, stored_halves(blocks, 208), scales=scales)


SCHEME = Q6_K()
