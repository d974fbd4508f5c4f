"""GGUF IQ4_NL: float16 scale d, then 32 indices of 4 bits into a table of uneven levels; a weight is d * level."""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers
from llmx.schemes.grids import uneven


class IQ4_NL(BlockScheme):
    kind = "IQ4_NL"
    block_bytes = 18

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return uneven(numbers(blocks[:, 2:], 4, 16)).mul_(halves(blocks, 0))


SCHEME = IQ4_NL()
