"""FP8 weights, e4m3, with a scale for all of a linear, for each output, or for each block of 128 x 128 weights.

`weight` float8_e4m3fn (n_out, n_in); `weight_scale` (1,) or (n_out, 1), or `weight_scale_inv`, float32, (n_out / 128,
n_in / 128), both rounded up, which in spite of its name is a factor too. A weight is its number times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from llmx.schemes.base import Axis, Case, Kind, Layout, Scheme, Tensors
from llmx.schemes.whole import UNREAD, scale_axes, spread

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored
    from llmx.formats.quantization import Quantization

BLOCK = 128
LARGEST = 448.0


def store_blocks(weight: Tensor, scale_inv: Tensor) -> dict[str, Tensor]:
    """What DeepSeek's block FP8 files hold: weight float8_e4m3fn (n_out, n_in), scale_inv float32 (blocks, blocks)."""
    blocks = tuple(-(-n // BLOCK) for n in weight.shape)
    assert scale_inv.shape == blocks, f"scales should be {blocks}, not {tuple(scale_inv.shape)}"
    return {"weight": weight, "weight_scale_inv": scale_inv.float()}


def _case(config: dict[str, Any], **options: Any) -> Case:
    return Case("F8_E4M3", 0.04, stacked=False, config=config, **options)


_ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


class FP8(Scheme):
    """block: outputs and inputs of a block with a scale; (0, 0): the stored shape says whose scales they are."""

    name = "FP8"
    unread = UNREAD
    cases = (
        _case({"quant_method": "fp8"}, merges=False),
        _case(_ROWS),
        _case({"quant_method": "fp8", "weight_block_size": [128, 128]}, rows=768, head_dim=128, inner=768, hidden=320),
    )

    def __init__(self, block: tuple[int, int] = (0, 0), method: str = "fp8") -> None:
        self.block, self.method = block, method

    def configured(self, quantization: Quantization) -> Sequence[Scheme]:
        rules = [rule for rule in quantization.rules if rule.format == "fp8"]
        return [FP8(block, quantization.method) for block in dict.fromkeys(r.block or (0, 0) for r in rules)] or [self]

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        names = set(stored) - self.unread
        if names not in ({"weight", "weight_scale"}, {"weight", "weight_scale_inv"}):
            return False
        weight = stored["weight"]
        if weight.kind != "F8_E4M3" or len(weight.shape) != 2:
            return False
        n_out, n_in = weight.shape
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (n_out,), (n_out, 1)]
        if self.block != (0, 0):
            shapes = [(-(-n_out // self.block[0]), -(-n_in // self.block[1]))]
        return stored[min(names - {"weight"})].shape in shapes

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        n_out, n_in = stored["weight"].shape
        scales = {name: tensor for name, tensor in stored.items() if name.startswith("weight_scale")}
        layout = {name: scale_axes(tensor.shape, n_out, n_in, self.block) for name, tensor in scales.items()}
        return {"weight": (Axis(Kind.OUT), Axis(Kind.IN)), **layout}

    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"].float()
        scales = next(t for name, t in tensors.items() if name != "weight").float()
        if scales.dim() == 2:
            for axis in (0, 1):
                scales = spread(scales, weight.shape[axis], axis, self.block[axis])
        elif scales.shape == weight.shape[:1]:
            scales = scales[:, None]
        return weight.mul_(scales).to(dtype)

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        """Scales are such that numbers come out again as they were, if packed once more: they have few bits."""
        n_out, n_in = weight.shape
        height, width = self.block if self.block != (0, 0) else (n_out if self.method == "fp8" else 1, n_in)
        filled = functional.pad(weight.float(), (0, -n_in % width, 0, -n_out % height))
        blocks = filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # (blocks, height, blocks, width)
        scales = (blocks.abs().amax((1, 3)) / LARGEST).bfloat16().float()
        safe = torch.where(scales == 0, 1.0, scales)[:, None, :, None]
        numbers = torch.div(blocks, safe).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        held = numbers.flatten(2).flatten(0, 1)[:n_out, :n_in].contiguous()
        if self.block != (0, 0):
            return store_blocks(held, scales)
        return {"weight": held, "weight_scale": scales.flatten() if self.method == "fp8" else scales}


SCHEME = FP8()
