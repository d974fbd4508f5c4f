"""GGUF IQ3_XXS: each 4 weights are a point of a grid of 256, with signs; each 32 have a scale s of 4 bits.

Bytes: float16 d, 64 of indices, 8 words of 4 times 7 signs and s; the factor is d * (s + 1/2) / 2.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, scaled, words
from llmx.schemes.grids import even_signs, four_sevens, points


class IQ3_XXS(BlockScheme):
    kind = "IQ3_XXS"
    size = 256
    block_bytes = 98

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        word = words(blocks[:, 66:], 4)
        scales = (word >> 28 & 15).float().add_(0.5).mul_(halves(blocks, 0)).mul_(0.5)
        return scaled(points("IQ3_XXS", blocks[:, 2:66]), scales).mul_(even_signs(four_sevens(word)))


SCHEME = IQ3_XXS()
