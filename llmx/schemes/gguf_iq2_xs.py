"""GGUF IQ2_XS: each 8 weights are a point of a grid of 512, with signs; each 16 have a scale s of 4 bits.

Bytes: float16 d, 32 words of 9 bits of index and 7 of signs, 8 of s; the factor is d * (s + 1/2) / 4.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled, words
from llmx.schemes.grids import even_signs, points


class IQ2_XS(BlockScheme):
    kind = "IQ2_XS"
    size = 256
    block_bytes = 74

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        word = words(blocks[:, 2:66], 2)
        scales = numbers(blocks[:, 66:], 4).float().add_(0.5).mul_(halves(blocks, 0)).mul_(0.25)
        return scaled(points("IQ2_XS", word & 511), scales).mul_(even_signs(word >> 9))


SCHEME = IQ2_XS()
