"""AWQ as AutoAWQ's GEMM version stores it: 4 bits, inputs down and outputs across, a scale and a zero for each run.

`qweight` int32 (n_in, n_out/8); `qzeros` int32 (groups, n_out/8); `scales` float16 (groups, n_out). A word holds eight
outputs, 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. A weight is (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.base import Axis, Case, Kind, Layout, Tensors
from llmx.schemes.grid import Grid, bytes_of, to_words
from llmx.schemes.whole import Wholes, WholeScheme, around_zero, less

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is where in a word
BITS = 4


def store(grid: Grid) -> dict[str, Tensor]:
    """What AutoAWQ's files hold of a linear. UsageError where the format has no place for it."""
    n_out = grid.codes.shape[0]
    if grid.bits != BITS:
        raise UsageError(f"AWQ files hold weights of 4 bits, not {grid.bits}.")
    if n_out % 8:
        raise UsageError(f"AWQ files store 8 outputs together, so {n_out} do not fit.")
    return {
        "qweight": _across(grid.codes),
        "qzeros": _across(grid.zeros),
        "scales": grid.scales.half().T.contiguous(),
    }


def read(tensors: Mapping[str, Tensor]) -> Grid:
    """The inverse of `store`."""
    scales = tensors["scales"].T.float().contiguous()
    codes, zeros = (_down(tensors[name]) for name in ("qweight", "qzeros"))
    return Grid(codes, scales, zeros, BITS, codes.shape[1] // scales.shape[1])


def _across(numbers: Tensor) -> Tensor:
    """uint8 (n_out, n) -> int32 (n, n_out/8)"""
    return to_words(numbers.T.unflatten(1, (-1, 8))[..., ORDER], BITS).flatten(1)


def _down(packed: Tensor) -> Tensor:
    """int32 (n, n_out/8) -> uint8 (n_out, n)"""
    n, words = packed.shape
    parts = bytes_of(packed.T).reshape(words, n, 4)
    numbers = torch.empty(words, 8, n, dtype=torch.uint8, device=packed.device)
    for place, output in enumerate(ORDER):
        torch.bitwise_and(parts[..., place // 2] >> BITS * (place % 2), (1 << BITS) - 1, out=numbers[:, output])
    return numbers.flatten(0, 1)


class AWQ(WholeScheme):
    """Of any group size: the shapes say it."""

    name = "awq"
    cases = (
        Case("I32", 0.1, stacked=False, config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    )

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        if set(stored) != {"qweight", "qzeros", "scales"} or any(len(one.shape) != 2 for one in stored.values()):
            return False
        return stored["qweight"].shape[1] * 8 == stored["scales"].shape[1]

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["scales"].shape[1], stored["qweight"].shape[0]

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        group = Axis(Kind.IN, 1, max(1, stored["qweight"].shape[0] // stored["scales"].shape[0]), same=True)
        return {
            "qweight": (Axis(Kind.IN), Axis(Kind.OUT, 1, 8)),
            "qzeros": (group, Axis(Kind.OUT, 1, 8)),
            "scales": (group, Axis(Kind.OUT)),
        }

    def wholes(self, tensors: Tensors) -> Wholes:
        codes, zeros = (_down(tensors[name]) for name in ("qweight", "qzeros"))
        return Wholes(less(codes, zeros, None, BITS), tensors["scales"].T, None)

    def limits(self, tensors: Tensors) -> tuple[int, int]:
        zeros = _down(tensors["qzeros"])
        return -int(zeros.max()), (1 << BITS) - 1 - int(zeros.min())

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        return store(around_zero(weight, BITS, 32, torch.float16))


SCHEME = AWQ()
