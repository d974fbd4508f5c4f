"""GGUF Q2_K: 256 numbers q of 2 bits; each 16 have a scale s and a minimum m of 4 bits; a weight is d * s * q - e * m.

Bytes: 16 of s and m, 64 of q, float16 d and e.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, stored_halves


class Q2_K(PartedScheme):
    kind = "Q2_K"
    size = 256
    block_bytes = 84
    kernel_layout = "q4*f-m"

    def parts(self, blocks: Tensor) -> Parts:
        packed = blocks[:, :16]
        q = numbers(blocks[:, 16:80], 2, 32)
        return Parts(q, stored_halves(blocks, 80), stored_halves(blocks, 82), packed & 15, packed >> 4)


SCHEME = Q2_K()
