"""GGUF IQ2_S: each 8 weights are a point of a grid of 1024, with signs; each 16 have a scale s of 4 bits.

Bytes: float16 d, 32 of the indices' low eight bits, 32 of signs, 8 of the indices' high two, 8 of s; the factor is
d * (s + 1/2) / 4.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled
from llmx.schemes.grids import points, signs


class IQ2_S(BlockScheme):
    kind = "IQ2_S"
    size = 256
    block_bytes = 82

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        index = blocks[:, 2:34].int() | numbers(blocks[:, 66:74], 2).int() << 8
        scales = numbers(blocks[:, 74:], 4).float().add_(0.5).mul_(halves(blocks, 0)).mul_(0.25)
        return scaled(points("IQ2_S", index), scales).mul_(signs(blocks[:, 34:66]))


SCHEME = IQ2_S()
