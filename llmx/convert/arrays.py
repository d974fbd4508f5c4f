"""Rows of numbers as arrays: what most conversions need, without torch, which takes longer to import than they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
Numbers = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNK = 1 << 20  # weights that are numbers at a time: few enough to stay in a cache


def in_steps(shape: Sequence[int], together: int = 1) -> Iterator[tuple[int, int]]:
    """Rows [first, last) of about CHUNK weights, in order: whole multiples of `together`, except for the last."""
    step = max(1, CHUNK // max(1, prod(shape[1:]) * together)) * together
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def bytes_of(tensor: Tensor) -> Bytes:
    """A tensor's own memory, if it lies in order: (..., bytes of the last axis)."""
    import torch

    made: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return made


def rounded(numbers: Numbers, kind: str) -> Bytes:
    """To F32 (as they are), F16 or BF16, ties to even; what is too large becomes infinite. (..., bytes)"""
    if kind == "F32":
        return numbers.view(np.uint8)
    import torch  # numpy has no bfloat16, and takes thirty times as long for float16

    return bytes_of(torch.from_numpy(numbers).to({"F16": torch.float16, "BF16": torch.bfloat16}[kind]))
