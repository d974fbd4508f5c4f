"""GGUF Q3_K: 256 numbers q of 3 bits; each 16 have a scale s of 6 bits; a weight is d * (s - 32) * (q - 4).

Bytes: 32 of the q's high bits, 64 of their low two, 8 of the s's low four bits, 4 of their high two, float16 d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, stored_halves


class Q3_K(PartedScheme):
    kind = "Q3_K"
    size = 256
    block_bytes = 110
    kernel_layout = "q4*f"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 32:96], 2, 32) | numbers(blocks[:, :32], 1, 32) << 2
        scales = numbers(blocks[:, 96:104], 4, 8) | numbers(blocks[:, 104:108], 2, 4) << 4
        return Parts(q.view(torch.int8) - 4, stored_halves(blocks, 108), scales=scales.view(torch.int8) - 32)


SCHEME = Q3_K()
