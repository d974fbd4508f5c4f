"""GGUF Q3_K: 256 numbers q of 3 bits; each 16 have a scale s of 6 bits; a weight is d * (s - 32) * (q - 4).

Bytes: 32 of the q's high bits, 64 of their low two, 8 of the s's low four bits, 4 of their high two, float16 d.
"""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers, scaled


class Q3_K(BlockScheme):
    kind = "Q3_K"
    size = 256
    block_bytes = 110

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        q = numbers(blocks[:, 32:96], 2, 32) | numbers(blocks[:, :32], 1, 32) << 2
        scales = numbers(blocks[:, 96:104], 4, 8) | numbers(blocks[:, 104:108], 2, 4) << 4
        return scaled(q.float().sub_(4), scales.float().sub_(32).mul_(halves(blocks, 108)))


SCHEME = Q3_K()
