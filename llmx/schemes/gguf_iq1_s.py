"""GGUF IQ1_S: each 8 weights are a ternary point of a grid of 2048; each 32 have a shift of 1/8 or -1/8 and a scale s.

Bytes: float16 d, 32 of the indices' low eight bits, 8 words: 4 times their high three, 3 bits of s, the shift's sign. A
weight is d * (2s + 1) * (point + shift).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, scaled, words
from llmx.schemes.grids import points, ternary_shift


class IQ1_S(BlockScheme):
    kind = "IQ1_S"
    size = 256
    block_bytes = 50

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        word = words(blocks[:, 34:], 2)
        high = torch.stack([word >> at & 7 for at in (0, 3, 6, 9)], -1).flatten(1)
        grid = points("IQ1_S", blocks[:, 2:34].int() | high << 8).reshape(-1, 8, 32)
        grid += ternary_shift(word >> 15)[..., None]
        scales = (word >> 12 & 7).float().mul_(2).add_(1).mul_(halves(blocks, 0))
        return scaled(grid.reshape(-1, 256), scales)


SCHEME = IQ1_S()
