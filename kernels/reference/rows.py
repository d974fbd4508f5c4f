"""Sums and copies of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_scaled(x: Tensor, scale: float, y: Tensor | None) -> Tensor:
    """x (rows, width) * scale + y, each rounded to x's dtype; y None: x * scale."""
    scaled = x if scale == 1.0 else x * scale
    return scaled if y is None else scaled + y


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (n, width), index (rows,) at least 0 -> (rows, width): what is past the last row takes the last."""
    return x[index.clamp(max=len(x) - 1)]


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (rows, any) of one dtype -> (rows, sum of their widths), side by side."""
    return torch.cat(list(parts), -1)


def to_float32(x: Tensor) -> Tensor:
    """x in float32: itself where it is that already."""
    return x.float()
