"""GGUF NVFP4: each 16 floating-point numbers f of 4 bits (E2M1) have a scale s (E4M3, no sign); a weight is s * f.

Bytes: 4 of s, 4 times 8 of f. A tensor with a further scale of its own beside it is not this scheme.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, numbers, scaled
from llmx.schemes.grids import e2m1


class NVFP4(BlockScheme):
    kind = "NVFP4"
    size = 64
    block_bytes = 36

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return scaled(e2m1(numbers(blocks[:, 4:], 4, 8)), half_scale(blocks[:, :4]))


def half_scale(stored: Tensor) -> Tensor:
    """uint8, E4M3 without the sign -> half its value, float32; the NaN reads as 0, as ggml has it."""
    exponent, mantissa = (stored >> 3 & 15).int(), (stored & 7).float()
    normal = (exponent + 119 << 23).view(torch.float32) * (1 + mantissa / 8)  # 2^(exponent - 8)
    value = torch.where(exponent == 0, mantissa * 2**-10, normal)
    return torch.where(stored == 0x7F, 0.0, value)


SCHEME = NVFP4()
