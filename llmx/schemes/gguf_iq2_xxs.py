"""GGUF IQ2_XXS: each 8 weights are a point of a grid of 256, with signs; each 32 have a scale s of 4 bits.

Bytes: float16 d, then for each 32 weights 4 indices and a word of 4 times 7 signs and s; the factor is
d * (s + 1/2) / 4.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, scaled, words
from llmx.schemes.grids import even_signs, four_sevens, points


class IQ2_XXS(BlockScheme):
    kind = "IQ2_XXS"
    size = 256
    block_bytes = 66

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        groups = blocks[:, 2:].reshape(-1, 8)
        word = words(groups[:, 4:], 4).reshape(-1, 8)
        scales = (word >> 28 & 15).float().add_(0.5).mul_(halves(blocks, 0)).mul_(0.25)
        grid = points("IQ2_XXS", groups[:, :4].reshape(-1, 32))
        return scaled(grid, scales).mul_(even_signs(four_sevens(word)))


SCHEME = IQ2_XXS()
