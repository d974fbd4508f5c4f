"""GGUF Q5_K: 256 numbers q of 5 bits; each 32 have a scale s and a minimum m of 6 bits; a weight is d * s * q - e * m.

Bytes: float16 d and e, 12 of s and m (see six_bits), 32 of the q's high bits, 128 of their low four.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, six_bits, stored_halves


class Q5_K(PartedScheme):
    kind = "Q5_K"
    size = 256
    block_bytes = 176
    kernel_layout = "q5*s-m"

    def parts(self, blocks: Tensor) -> Parts:
        q = numbers(blocks[:, 48:], 4, 32) | numbers(blocks[:, 16:48], 1, 32) << 4
        return Parts(q, stored_halves(blocks, 0), stored_halves(blocks, 2), *six_bits(blocks[:, 4:16]))


SCHEME = Q5_K()
