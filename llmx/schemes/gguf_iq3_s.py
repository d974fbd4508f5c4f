"""GGUF IQ3_S: each 4 weights are a point of a grid of 512, with signs; each 32 have a scale s of 4 bits.

Bytes: float16 d, 64 of the indices' low eight bits, 8 of their high one, 32 of signs, 4 of s; the factor is
d * (2s + 1).
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled
from llmx.schemes.grids import points, signs


class IQ3_S(BlockScheme):
    kind = "IQ3_S"
    size = 256
    block_bytes = 110

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        index = blocks[:, 2:66].int() | numbers(blocks[:, 66:74], 1).int() << 8
        scales = numbers(blocks[:, 106:], 4).float().mul_(2).add_(1).mul_(halves(blocks, 0))
        return scaled(points("IQ3_S", index), scales).mul_(signs(blocks[:, 74:106]))


SCHEME = IQ3_S()
