"""FP8 weights, e4m3, with a scale for all of a linear, for each output, or for each block of 128 x 128 weights.

`weight` float8_e4m3fn (n_out, n_in); `weight_scale` (1,) or (n_out, 1), or `weight_scale_inv`, float32, (n_out / 128,
n_in / 128), both rounded up, which in spite of its name is a factor too. A weight is its number times its scale.
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 128


def store_blocks(weight: Tensor, scale_inv: Tensor) -> dict[str, Tensor]:
    """What DeepSeek's block FP8 files hold: weight float8_e4m3fn (n_out, n_in), scale_inv float32 (blocks, blocks)."""
    blocks = tuple(-(-n // BLOCK) for n in weight.shape)
    assert scale_inv.shape == blocks, f"scales should be {blocks}, not {tuple(scale_inv.shape)}"
    return {"weight": weight, "weight_scale_inv": scale_inv.float()}
