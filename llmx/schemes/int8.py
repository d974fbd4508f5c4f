"""INT8 weights as compressed-tensors' "int-quantized" files hold them ("W8A8"): a signed byte for each, and scales.

`weight` int8 (n_out, n_in); `weight_scale` (n_out, 1) in the model's dtype, or one for all, or for each run of inputs;
`weight_zero_point`, where weights are not symmetric, of the same shape. A weight is (number - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmx.schemes.base import Axis, Case, Kind, Layout, Scheme, Tensors
from llmx.schemes.whole import UNREAD, Wholes, WholeScheme, less, order, scale_axes, symmetric

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored
    from llmx.formats.quantization import Quantization


def _case(weights: Mapping[str, Any]) -> Case:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    return Case("I8", 0.01, stacked=False, config=config)


class Int8(WholeScheme):
    """group: inputs that share a scale; None: as the stored shape says."""

    name = "INT8"
    unread = UNREAD
    cases = (_case({"strategy": "channel"}), _case({"strategy": "group", "group_size": 32}))

    def __init__(self, group: int | None = None) -> None:
        self.group = group

    def configured(self, quantization: Quantization) -> Sequence[Scheme]:
        groups = dict.fromkeys(rule.group for rule in quantization.rules if rule.format == "int8")
        return [Int8(group) for group in groups] or [self]

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        if set(stored) - self.unread - {"weight_zero_point"} != {"weight", "weight_scale"}:
            return False
        weight, scales = stored["weight"], stored["weight_scale"].shape
        if weight.kind != "I8" or len(weight.shape) != 2:
            return False
        has_groups = len(scales) == 2 and scales[1] > 1
        return not has_groups or (self.group is not None and scales[1] == -(-weight.shape[1] // self.group))

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        n_out, n_in = stored["weight"].shape
        others = {name: tensor.shape for name, tensor in stored.items() if name not in self.unread | {"weight"}}
        layout = {name: scale_axes(shape, n_out, n_in, (1, self.group or 0)) for name, shape in others.items()}
        return {"weight": (Axis(Kind.OUT), Axis(Kind.IN)), **layout}

    def wholes(self, tensors: Tensors) -> Wholes:
        weight = tensors["weight"]
        n_out, n_in = weight.shape
        scales = _table(tensors["weight_scale"], n_out)
        index = order(n_in, scales.shape[1], self.group or n_in, None, weight.device)
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return Wholes(weight, scales, index)
        return Wholes(less(weight, _table(zeros, n_out).expand_as(scales), index, 8), scales, index)

    def limits(self, tensors: Tensors) -> tuple[int, int]:
        zeros = tensors.get("weight_zero_point")
        low, high = (0, 0) if zeros is None else (int(zeros.min()), int(zeros.max()))
        return -128 - high, 127 - low

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        grid = symmetric(weight, 8, self.group or weight.shape[1], torch.float16)
        return {"weight": (grid.codes.short() - 128).to(torch.int8), "weight_scale": grid.scales.half()}


def _table(values: Tensor, n_out: int) -> Tensor:
    """Of one, or (n_out,), or (n_out, groups) numbers, the last."""
    return values.reshape(1, 1).expand(n_out, 1) if values.numel() == 1 else values.reshape(n_out, -1)


SCHEME = Int8()
