"""GGUF MXFP4: an exponent e of 8 bits, then 32 floating-point numbers f of 4 bits (E2M1); a weight is 2^(e - 127) * f.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.schemes.blocks import BlockScheme, numbers
from llmx.schemes.grids import e2m1


class MXFP4(BlockScheme):
    kind = "MXFP4"
    block_bytes = 17

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return e2m1(numbers(blocks[:, 1:], 4, 16)).mul_(half_power(blocks[:, :1]))


def half_power(exponent: Tensor) -> Tensor:
    """uint8 e -> 2^(e - 128), float32, as bits: e = 0 and 1 are subnormal."""
    e = exponent.int()
    return torch.where(e < 2, 0x200000 << e.clamp(max=1), e - 1 << 23).view(torch.float32)


SCHEME = MXFP4()
