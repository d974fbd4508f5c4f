"""GGUF IQ4_XS: 256 indices into IQ4_NL's levels; each 32 have a scale s of 6 bits; a weight is d * (s - 32) * level.

Bytes: float16 d, 2 of the s's high two bits, 4 of their low four, 128 of indices.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled
from llmx.schemes.grids import uneven


class IQ4_XS(BlockScheme):
    kind = "IQ4_XS"
    size = 256
    block_bytes = 136

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        scales = numbers(blocks[:, 4:8], 4) | numbers(blocks[:, 2:4], 2) << 4
        return scaled(uneven(numbers(blocks[:, 8:], 4, 16)), scales.float().sub_(32).mul_(halves(blocks, 0)))


SCHEME = IQ4_XS()
