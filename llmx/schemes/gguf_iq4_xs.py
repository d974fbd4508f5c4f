"""GGUF IQ4_XS: 256 indices into IQ4_NL's levels; each 32 have a scale s of 6 bits; a weight is d * (s - 32) * level.

Bytes: float16 d, 2 of the s's high two bits, 4 of their low four, 128 of indices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import PartedScheme, Parts, numbers, stored_halves
from llmx.schemes.grids import uneven


class IQ4_XS(PartedScheme):
    kind = "IQ4_XS"
    size = 256
    block_bytes = 136
    kernel_layout = "q8*s"

    def parts(self, blocks: Tensor) -> Parts:
        levels = uneven(numbers(blocks[:, 8:], 4, 16)).to(torch.int8)
        scales = numbers(blocks[:, 4:8], 4) | numbers(blocks[:, 2:4], 2) << 4
        return Parts(levels, stored_halves(blocks, 0), scales=scales.view(torch.int8) - 32)


SCHEME = IQ4_XS()
