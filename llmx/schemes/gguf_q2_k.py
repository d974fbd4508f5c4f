"""GGUF Q2_K: 256 numbers q of 2 bits; each 16 have a scale s and a minimum m of 4 bits; a weight is d * s * q - e * m.

Bytes: 16 of s and m, 64 of q, float16 d and e.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled


class Q2_K(BlockScheme):
    kind = "Q2_K"
    size = 256
    block_bytes = 84

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        scales = (blocks[:, :16] & 15).float().mul_(halves(blocks, 80))
        minima = (blocks[:, :16] >> 4).float().mul_(halves(blocks, 82))
        return scaled(numbers(blocks[:, 16:80], 2, 32), scales, minima)


SCHEME = Q2_K()
