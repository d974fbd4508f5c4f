"""GGUF IQ4_NL: float16 scale d, then 32 indices of 4 bits into a table of uneven levels; a weight is d * level."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, stored_halves
from llmx.schemes.grids import uneven


class IQ4_NL(PartedScheme):
    kind = "IQ4_NL"
    block_bytes = 18
    kernel_layout = "q8"

    def parts(self, blocks: Tensor) -> Parts:
        return Parts(uneven(numbers(blocks[:, 2:], 4, 16)).to(torch.int8), stored_halves(blocks, 0))


SCHEME = IQ4_NL()
