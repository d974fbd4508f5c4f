"""GGUF Q5_K: 256 numbers q of 5 bits; each 32 have a scale s and a minimum m of 6 bits; a weight is d * s * q - e * m.

Bytes: float16 d and e, 12 of s and m (see six_bits), 32 of the q's high bits, 128 of their low four.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled, six_bits


class Q5_K(BlockScheme):
    kind = "Q5_K"
    size = 256
    block_bytes = 176

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        scales, minima = six_bits(blocks[:, 4:16])
        q = numbers(blocks[:, 48:], 4, 32) | numbers(blocks[:, 16:48], 1, 32) << 4
        return scaled(q, scales * halves(blocks, 0), minima * halves(blocks, 2))


SCHEME = Q5_K()
