"""Attention over a block table in C++; `kernels/reference/attention.py` defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.convert import narrowed, wide

TOGETHER = 16  # queries of a row that are one task for each key head
POOLS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


@dataclass(frozen=True)
class Plan:
    """What all layers of a KV group share in one step. All int64, contiguous.

    A lasting plan serves later batches, whose tensors lie where this batch's lie and are no more. It has as many units
    as the batch has tokens, so that it has room for any sharing out of the tokens among the rows.
    """

    units: Tensor  # (units, 3): first token, tokens, row; no tokens: nothing to do
    prefix: Tensor  # (tokens,) logical slots that each sees
    table: Tensor  # (rows, blocks)
    size: int
    base: Tensor  # (rows,) first draft slot
    paths: Tensor | None  # (tokens, depth) draft nodes above a token and itself

    def refill(self, batch: Any) -> int:
        """Make a lasting plan that of another batch, with paths as deep; how many units it has now."""
        found = _units(batch)
        self.units.numpy()[: len(found)] = found
        return len(found)


def plan_attention(batch: Any, group: int, window: int | None, *, lasting: bool = False) -> Plan:
    """Which queries see which slots. `batch` is a llmx.batch.Batch. A token of a draft tree has keys of its own."""
    units, paths = _units(batch), None if batch.paths is None else batch.paths.contiguous()
    if lasting:
        units = np.concatenate([units, np.zeros((len(batch.tokens) - len(units), 3), np.int64)])
    table = batch.tables[group].contiguous()
    return Plan(torch.from_numpy(units), batch.prefix.contiguous(), table, batch.size, batch.base.contiguous(), paths)


def _units(batch: Any) -> np.ndarray:
    if max(batch.lengths, default=0) == 1:
        rows = np.arange(len(batch.lengths))
        return np.stack([rows, np.ones_like(rows), rows], 1)
    units, at = [], 0
    for row, (length, count) in enumerate(zip(batch.lengths, batch.counts, strict=True)):
        shared = length if batch.paths is None else count
        units += [(at + i, min(TOGETHER, shared - i), row) for i in range(0, shared, TOGETHER)]
        units += [(token, 1, row) for token in range(at + shared, at + length)]
        at += length
    return np.array(units, np.int64)


def strides(keys: Tensor, values: Tensor, scales: Tensor | None) -> tuple[int, int]:
    """Bytes from one block to the next and from one head to the next, in pools as llmx.cache.pools.new_pools makes
    them on the CPU."""
    head, block = keys.stride()[:2]
    size, dim, width = keys.shape[2], keys.shape[3], keys.element_size()
    _check(keys, (head, block, 1, size))
    _check(values, (head, block, dim, 1))
    if scales is not None:
        _check(scales, (head * width // 4, block * width // 4, 1, size))
    return block * width, head * width


def _check(pool: Tensor, wanted: tuple[int, ...]) -> None:
    found = zip(pool.shape, pool.stride(), wanted, strict=True)
    assert all(count == 1 or step == steps for count, step, steps in found), "pools lie as new_pools makes them"


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    scale: float,
    window: int | None = None,
    first: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """q (tokens, heads, head_dim); keys, values, scales as new_pools makes them; sinks (heads,) f32 -> q's shape and
    dtype."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    block_bytes, head_bytes = strides(keys, values, scales)
    wide_q = wide(q)
    out = torch.empty_like(wide_q)
    library.attention(
        out.data_ptr(),
        wide_q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        q.shape[1],
        len(keys),
        keys.shape[3],
        block_bytes,
        head_bytes,
        POOLS[keys.dtype],
        plan.units.data_ptr(),
        len(plan.units),
        plan.prefix.data_ptr(),
        plan.table.data_ptr(),
        plan.table.shape[1],
        plan.size,
        plan.base.data_ptr(),
        0 if plan.paths is None else plan.paths.data_ptr(),
        0 if plan.paths is None else plan.paths.shape[1],
        0 if sinks is None else sinks.data_ptr(),
        scale,
        cap,
        window or 0,
        first,
        torch.get_num_threads(),
    )
    return narrowed(out, q.dtype)
