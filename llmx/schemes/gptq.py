"""GPTQ as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits, a scale and a zero point for each run of inputs.

`qweight` int32 (n_in * bits/32, n_out), words of inputs; `qzeros` int32 (groups, n_out * bits/32), words of outputs;
`scales` float16 (groups, n_out); `g_idx` int32 (n_in,), the group of each input. A weight is (code - zero) * scale.
Version 1 files hold zero - 1, with 2^bits - 1 for a zero of 0; version 2 files hold the zero itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.grid import Grid, even, from_words, to_words

BITS = (2, 3, 4, 8)


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
    bits = tensors["qzeros"].shape[1] * 32 // n_out
    n_in = tensors["qweight"].shape[0] * 32 // bits
    codes = from_words(tensors["qweight"].T, bits, n_in)
    zeros = from_words(tensors["qzeros"], bits, n_out).T.contiguous()
    return codes, (zeros + 1 & (1 << bits) - 1 if version == 1 else zeros), bits
