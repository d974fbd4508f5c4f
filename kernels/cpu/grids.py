"""What group grids cost, in C++ on all threads; `llmx/quantize/grids.py` defines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmx.kernels.cpu import native

LANES, MOST_GROUP = 16, 1024
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def can_group(group: int, dtype: torch.dtype) -> bool:
    """Whether these ops know groups of that many inputs, and scales of that dtype."""
    return 0 < group <= MOST_GROUP and group % LANES == 0 and dtype in DTYPES


def round_groups(
    weight: Tensor, columns: Tensor, group: int, bits: int, symmetric: bool, dtype: torch.dtype, factor: float
) -> Tensor:
    """weight (rows, n_in) f32, columns (n_in,) f32 -> weight - round_to_nearest(weight * columns) / columns.

    factor: 2 / top of symmetric grids, 1 of others.
    """
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    weight, columns = weight.contiguous(), columns.contiguous()
    errors = torch.empty_like(weight)
    rows, n_in = weight.shape
    library.round_groups(
        errors.data_ptr(), weight.data_ptr(), columns.data_ptr(), rows, n_in, group, factor, (1 << bits) - 1,
        int(symmetric), DTYPES[dtype], torch.get_num_threads(),
    )  # fmt: skip
    return errors


def search_groups(
    weight: Tensor,
    metric: Tensor,
    group: int,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    factors: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Scales and zeros, f32 (rows, groups), of the factor with the least loss: see `llmx.quantize.grids.search`."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    weight, metric = weight.contiguous(), metric.contiguous()
    rows, n_in = weight.shape
    scales, zeros = torch.empty(2, rows, n_in // group)
    tried = torch.tensor(factors, dtype=torch.float32)
    library.search_groups(
        scales.data_ptr(), zeros.data_ptr(), weight.data_ptr(), metric.data_ptr(), int(metric.dim() == 3), rows, n_in,
        group, tried.data_ptr(), len(tried), (1 << bits) - 1, int(symmetric), DTYPES[dtype], torch.get_num_threads(),
    )  # fmt: skip
    return scales, zeros


def gptq_sweep(
    left: Tensor, errors: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int
) -> Tensor:
    """Codes, f32 (count, outputs), of some inputs of GPTQ's sweep, at most 128: see `llmx.quantize.gptq`.

    left, errors: (count, outputs) f32, `errors` is written. factor: (count, count).
    scales, zeros: (groups, outputs). groups: (count,) int64.
    """
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    count, outputs = left.shape
    assert all(one.is_contiguous() for one in (left, errors, scales, zeros))
    factor = factor.contiguous()
    codes = torch.empty_like(left)
    library.gptq_sweep(
        left.data_ptr(), codes.data_ptr(), errors.data_ptr(), factor.data_ptr(), factor.stride(0), count, outputs,
        scales.data_ptr(), zeros.data_ptr(), groups.contiguous().data_ptr(), (1 << bits) - 1, torch.get_num_threads(),
    )  # fmt: skip
    return codes
