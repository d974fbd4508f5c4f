"""compressed-tensors' pack-quantized linears: 2 to 8 bits, a scale for each run of inputs or for each output.

`weight_packed` int32 (n_out, words), numbers code of inputs; `weight_scale` (n_out, groups) in the model's dtype;
`weight_zero_point`, where weights are not symmetric, int32 (words of outputs, groups); `weight_shape` int64 (2,). A
weight is (code - zero) * scale, with a zero of 2^(bits - 1) where none is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.grid import Grid, to_words

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
