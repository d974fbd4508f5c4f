"""GGUF IQ1_M: each 8 weights are a ternary point of IQ1_S's grid, shifted by 1/8 or -1/8; each 16 have a scale s.

Bytes: 32 of the indices' low eight bits, 16 of their high three and the shift's sign, 4 words of 4 times 3 bits of s
and 4 bits of the float16 d. A weight is d * (2s + 1) * (point + shift).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, numbers, scaled, words
from llmx.schemes.grids import points, ternary_shift


class IQ1_M(BlockScheme):
    kind = "IQ1_M"
    size = 256
    block_bytes = 56

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        high, word = numbers(blocks[:, 32:48], 4).int(), words(blocks[:, 48:], 2)
        grid = points("IQ1_S", blocks[:, :32].int() | (high & 7) << 8).reshape(-1, 32, 8)
        grid += ternary_shift(high >> 3)[..., None]
        scales = torch.stack([word >> at & 7 for at in (0, 3, 6, 9)], -1).flatten(1)
        return scaled(grid.reshape(-1, 256), scales.float().mul_(2).add_(1).mul_(scattered_half(word)))


def scattered_half(word: Tensor) -> Tensor:
    """The float16 whose four bits each are the highest of four words (n, 4), lowest first -> float32 (n, 1)."""
    high = word >> 12
    bits = high[:, 0] | high[:, 1] << 4 | high[:, 2] << 8 | high[:, 3] << 12
    return bits.short().view(torch.float16).float()[:, None]


SCHEME = IQ1_M()
