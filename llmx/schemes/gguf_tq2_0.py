"""GGUF TQ2_0: 256 numbers t of 2 bits, then a float16 scale d; a weight is d * (t - 1). Made for ternary models."""

from __future__ import annotations

from torch import Tensor

from llmx.schemes.blocks import BlockScheme, halves, numbers


class TQ2_0(BlockScheme):
    kind = "TQ2_0"
    size = 256
    block_bytes = 66

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return numbers(blocks[:, :64], 2, 32).float().sub_(1).mul_(halves(blocks, 64))


SCHEME = TQ2_0()
