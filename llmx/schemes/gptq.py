"""GPTQ as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits, a scale and a zero point for each run of inputs.

`qweight` int32 (n_in * bits/32, n_out), words of inputs; `qzeros` int32 (groups, n_out * bits/32), words of outputs;
`scales` float16 (groups, n_out); `g_idx` int32 (n_in,), the group of each input. A weight is (code - zero) * scale.
Version 1 files hold zero - 1, with 2^bits - 1 for a zero of 0; version 2 files hold the zero itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.base import Axis, Case, Dims, Kind, Layout, Scheme, Tensors
from llmx.schemes.grid import Grid, even, from_words, to_words
from llmx.schemes.whole import Wholes, WholeScheme, around_zero, less, order, run_size, symmetric, word_axis

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored
    from llmx.formats.quantization import Quantization

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


def store(grid: Grid, version: int) -> dict[str, Tensor]:
    """What GPTQ files of version 1 or 2 hold of a linear. UsageError where the format has no place for it.

    A version 1 file can't hold a zero of 0 safely: writers and kernels disagree about what is stored for it.
    """
    n_out, n_in = grid.codes.shape
    if grid.bits not in BITS:
        raise UsageError(f"GPTQ files hold weights of 2, 3, 4 or 8 bits, not {grid.bits}.")
    together = even(grid.bits)[1]
    for n, what in ((n_out, "outputs"), (n_in, "inputs")):
        if n % together:
            raise UsageError(f"GPTQ files store {together} {what} of {grid.bits} bits together, so {n} do not fit.")
    if version == 1 and not grid.zeros.all():
        raise UsageError(
            "GPTQ files of version 1 have no certain way to store a zero point of 0.",
            hint="write version 2, or symmetric weights",
        )
    zeros = grid.zeros - 1 if version == 1 else grid.zeros
    return {
        "qweight": to_words(grid.codes, grid.bits).T.contiguous(),
        "qzeros": to_words(zeros.T, grid.bits),
        "scales": grid.scales.half().T.contiguous(),
        "g_idx": torch.arange(n_in, dtype=torch.int32) // grid.group,
    }


def read(tensors: Mapping[str, Tensor], version: int) -> Grid:
    """The inverse of `store`. The inputs must lie in the order of their groups."""
    codes, zeros, bits = numbers(tensors, version)
    scales = tensors["scales"].T.float().contiguous()
    return Grid(codes, scales, zeros, bits, codes.shape[1] // scales.shape[1])


def numbers(tensors: Mapping[str, Tensor], version: int) -> tuple[Tensor, Tensor, int]:
    """codes (n_out, n_in) and zeros (n_out, groups), uint8, and their bits."""
    n_out = tensors["scales"].shape[1]
    bits = _bits(tensors["qzeros"].shape, n_out)
    n_in = tensors["qweight"].shape[0] * 32 // bits
    codes = from_words(tensors["qweight"].T, bits, n_in)
    zeros = from_words(tensors["qzeros"], bits, n_out).T.contiguous()
    return codes, (zeros + 1 & (1 << bits) - 1 if version == 1 else zeros), bits


def _case(bits: int, version: int, **options: Any) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": FORMATS[version - 1]}
    return Case("I32", 0.19 if bits < 4 else 0.1, stacked=False, config=config, **options)


class GPTQ(WholeScheme):
    """Bits are seen from the shapes. With a `g_idx` all groups' scales stay with every part of the inputs."""

    name = "gptq"
    cases = (_case(4, 1), _case(4, 2), _case(8, 1), _case(3, 2, rows=192))

    def __init__(self, version: int = 1, bits: int = 4, group: int | None = 32) -> None:
        self.version, self.bits, self.group = version, bits, group

    def configured(self, quantization: Quantization) -> Sequence[Scheme]:
        rules = [rule for rule in quantization.rules if rule.format == "gptq"]
        return [GPTQ(rule.version, rule.bits, rule.group) for rule in rules] or [self]

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        needed = {"qweight", "qzeros", "scales"}
        if set(stored) - {"g_idx"} != needed or any(len(stored[name].shape) != 2 for name in needed):
            return False
        return stored["qweight"].shape[1] == stored["scales"].shape[1]

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        n_out = stored["scales"].shape[1]
        return n_out, stored["qweight"].shape[0] * 32 // _bits(stored["qzeros"].shape, n_out)

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        n_out, n_in = self.shape(stored)
        groups = stored["scales"].shape[0]
        bits = _bits(stored["qzeros"].shape, n_out)
        codes = word_axis(Kind.IN, bits, n_in, stored["qweight"].shape[0])
        zeros = word_axis(Kind.OUT, bits, n_out, stored["qzeros"].shape[1])
        size = run_size(n_in, groups, self.group or n_in)
        group = groups if "g_idx" in stored else Axis(Kind.IN, 1, size, ceil=True, same=True)
        layout: dict[str, Dims] = {"qweight": (codes, Axis(Kind.OUT)), "qzeros": (group, zeros)}
        layout["scales"] = (group, Axis(Kind.OUT))
        if "g_idx" in stored:
            layout["g_idx"] = (Axis(Kind.IN),)
        return layout

    def wholes(self, tensors: Tensors) -> Wholes:
        codes, zeros, bits = numbers(tensors, self.version)
        n_in, groups = codes.shape[1], zeros.shape[1]
        index = order(n_in, groups, self.group or n_in, tensors.get("g_idx"), codes.device)
        return Wholes(less(codes, zeros, index, bits), tensors["scales"].T, index)

    def limits(self, tensors: Tensors) -> tuple[int, int]:
        none = tensors["qweight"][:0]
        _, zeros, bits = numbers({**tensors, "qweight": none}, self.version)
        return -int(zeros.max()), (1 << bits) - 1 - int(zeros.min())

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        quantise = symmetric if self.version == 1 else around_zero
        return store(quantise(weight, self.bits, self.group or weight.shape[1], torch.float16), self.version)


def _bits(zeros: tuple[int, ...], n_out: int) -> int:
    return max(1, zeros[1] * 32 // max(1, n_out))


SCHEME = GPTQ()
