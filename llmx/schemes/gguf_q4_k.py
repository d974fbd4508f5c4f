"""GGUF Q4_K: 256 numbers q of 4 bits; each 32 have a scale s and a minimum m of 6 bits; a weight is d * s * q - e * m.

Bytes: float16 d and e, 12 of s and m (see six_bits), 128 of q.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, six_bits, stored_halves


class Q4_K(PartedScheme):
    kind = "Q4_K"
    size = 256
    block_bytes = 144
    kernel_layout = "q4*s-m"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 16:], 4, 32)
        return Parts(q, stored_halves(blocks, 0), stored_halves(blocks, 2), *six_bits(blocks[:, 4:16]))


SCHEME = Q4_K()
