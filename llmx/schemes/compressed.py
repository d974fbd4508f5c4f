"""compressed-tensors' pack-quantized linears: 2 to 8 bits, a scale for each run of inputs or for each output.

`weight_packed` int32 (n_out, words), numbers code of inputs; `weight_scale` (n_out, groups) in the model's dtype;
`weight_zero_point`, where weights are not symmetric, int32 (words of outputs, groups); `weight_shape` int64 (2,). A
weight is (code - zero) * scale, with a zero of 2^(bits - 1) where none is stored. Numbers of 3, 5, 6 or 7 bits lie
across words; in files of older versions they do not. `weight_g_idx`, if there, is the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.quantization import Quantization, Rule
from llmx.schemes.base import Axis, Case, Dims, Kind, Layout, Scheme, Tensors
from llmx.schemes.grid import Grid, from_words, to_words
from llmx.schemes.whole import (
    UNREAD,
    Wholes,
    WholeScheme,
    apart_words,
    around_zero,
    dense_words,
    less,
    order,
    run_size,
    symmetric,
    word_axis,
)

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored

SCALES = {  # strategy -> what its scales look like, for messages
    "tensor": "one",
    "channel": "one for each output",
    "block": "one for each block",
}


def store_packed(grid: Grid, symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """What "pack-quantized" files hold of a linear; scales in `dtype`, numbers densely packed.

    UsageError if it is to be symmetric and its zeros are not all 2^(bits - 1).
    """
    n_out, n_in = grid.codes.shape
    if symmetric and not bool((grid.zeros == 1 << grid.bits - 1).all()):
        raise UsageError("These weights have zero points of their own, so they can't be stored as symmetric ones.")
    stored = {
        "weight_packed": to_words(grid.codes, grid.bits),
        "weight_scale": grid.scales.to(dtype),
        "weight_shape": torch.tensor([n_out, n_in]),
    }
    if not symmetric:
        stored["weight_zero_point"] = to_words(grid.zeros.T, grid.bits).T.contiguous()
    return stored


def store_int8(q: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """What "int-quantized" files hold: q int8 (n_out, n_in), scale (n_out, 1); a weight is q * scale."""
    _check_scale(scale, "channel", (q.shape[0], 1))
    return {"weight": q, "weight_scale": scale}


def store_fp8(weight: Tensor, scale: Tensor, kind: str) -> dict[str, Tensor]:
    """What "float-quantized" files hold: float8_e4m3fn (n_out, n_in); a weight is its number times a scale.

    kind: "tensor", scale (1,); "channel", (n_out, 1); "block", (n_out / 128, n_in / 128), both rounded up.
    """
    n_out, n_in = weight.shape
    shapes = {"tensor": (1,), "channel": (n_out, 1), "block": (-(-n_out // 128), -(-n_in // 128))}
    _check_scale(scale, kind, shapes[kind])
    return {"weight": weight, "weight_scale": scale}


def _check_scale(scale: Tensor, kind: str, shape: tuple[int, ...]) -> None:
    assert scale.shape == shape, f"scales, {SCALES[kind]}, should be {shape}, not {tuple(scale.shape)}"


def _case(bits: int, strategy: str, is_symmetric: bool, error: float) -> Case:
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": is_symmetric}
    weights |= {"group_size": 32} if strategy == "group" else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return Case("I32", error, stacked=False, rows=96 if bits in (4, 8) or is_symmetric else 192, config=config)


class Packed(WholeScheme):
    """In words, as one rule of the config says."""

    name = "compressed-tensors, packed"
    unread = UNREAD
    cases = (
        _case(4, "group", True, 0.1),
        _case(4, "group", False, 0.1),
        _case(8, "channel", True, 0.01),
        _case(3, "group", False, 0.19),
        _case(6, "group", True, 0.03),
    )

    def __init__(self, rule: Rule, quantization: Quantization | None = None) -> None:
        self.rule, self.quantization, self.bits = rule, quantization, rule.bits

    def configured(self, quantization: Quantization) -> Sequence[Scheme]:
        return [Packed(rule, quantization) for rule in quantization.rules if rule.format == "packed"] or [self]

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        needed, more = {"weight_packed", "weight_scale"}, {"weight_zero_point", "weight_g_idx"}
        if set(stored) - UNREAD - more != needed or any(len(stored[name].shape) != 2 for name in needed):
            return False
        module = stored["weight_packed"].name.rpartition(".")[0]
        return self.quantization is None or self.quantization.rule(module) == self.rule

    def _width(self, words: int, groups: int) -> tuple[int, bool]:
        """Inputs of a row of so many words, and whether none of its numbers lies across two."""
        inputs = groups * (self.rule.group or 0)
        if words == dense_words(inputs, self.bits):
            return inputs, False
        if words == apart_words(inputs, self.bits):
            return inputs, True
        return words * 32 // self.bits, False

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        n_out, words = stored["weight_packed"].shape
        return n_out, self._width(words, stored["weight_scale"].shape[1])[0]

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        n_out, n_in = self.shape(stored)
        groups = stored["weight_scale"].shape[1]
        size = run_size(n_in, groups, self.rule.group or n_in)
        fixed = "weight_g_idx" in stored or (groups == 1 and self.rule.group is None)
        group = groups if fixed else Axis(Kind.IN, 1, size, ceil=True, same=True)
        codes = word_axis(Kind.IN, self.bits, n_in, stored["weight_packed"].shape[1])
        layout: dict[str, Dims] = {"weight_packed": (Axis(Kind.OUT), codes), "weight_scale": (Axis(Kind.OUT), group)}
        if (zeros := stored.get("weight_zero_point")) is not None:
            layout["weight_zero_point"] = (word_axis(Kind.OUT, self.bits, n_out, zeros.shape[0]), group)
        if "weight_g_idx" in stored:
            layout["weight_g_idx"] = (Axis(Kind.IN),)
        return layout

    def wholes(self, tensors: Tensors) -> Wholes:
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        n_in, is_apart = self._width(packed.shape[1], scales.shape[1])
        codes = self._numbers(packed, n_in, is_apart)
        index = order(n_in, scales.shape[1], self.rule.group or n_in, tensors.get("weight_g_idx"), packed.device)
        zeros = self._zeros(tensors)
        if zeros is None:
            zeros = torch.full(scales.shape, 1 << self.bits - 1, dtype=torch.uint8, device=packed.device)
        return Wholes(less(codes, zeros, index, self.bits), scales, index)

    def limits(self, tensors: Tensors) -> tuple[int, int]:
        zeros = self._zeros(tensors)
        middle = 1 << self.bits - 1
        low, high = (middle, middle) if zeros is None else (int(zeros.min()), int(zeros.max()))
        return -high, (1 << self.bits) - 1 - low

    def _zeros(self, tensors: Tensors) -> Tensor | None:
        """uint8 (n_out, groups)"""
        n_out = tensors["weight_packed"].shape[0]
        stored = tensors.get("weight_zero_point")
        if stored is None:
            return None
        return self._numbers(stored.T, n_out, stored.shape[0] != dense_words(n_out, self.bits)).T

    def _numbers(self, packed: Tensor, n: int, is_apart: bool) -> Tensor:
        """int32 (rows, words) -> uint8 (rows, n)"""
        if not is_apart:
            return from_words(packed, self.bits, n)
        return from_words(packed[..., None], self.bits, 32 // self.bits).flatten(1)[:, :n]

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        quantise = symmetric if self.rule.symmetric else around_zero
        grid = quantise(weight, self.bits, self.rule.group or weight.shape[1], torch.float16)
        return store_packed(grid, self.rule.symmetric, torch.float16)


SCHEME = Packed(Rule("packed", 4, 32))
