"""GGUF TQ1_0: 256 ternary numbers t, five to a byte; a weight is d * (t - 1).

Bytes: 32 and 16 with five numbers each, 4 with four, float16 d. A byte is a fraction of 256: times 3, what is above
8 bits is a digit in base 3, and the rest is the next fraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves


class TQ1_0(BlockScheme):
    kind = "TQ1_0"
    size = 256
    block_bytes = 54

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        parts = [digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)]
        return torch.cat(parts, 1).float().sub_(1).mul_(halves(blocks, 52))


def digits(packed: Tensor, count: int) -> Tensor:
    """Bytes (n, m) -> their first `count` digits in base 3, uint8 (n, m * count): the first of all, then the next."""
    rest, found = packed.short(), []
    for _ in range(count):
        rest = rest * 3
        found.append((rest >> 8).byte())
        rest = rest & 255
    return torch.cat(found, 1)


SCHEME = TQ1_0()
