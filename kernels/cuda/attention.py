"""Attention over a block table in Triton; `kernels/reference/attention.py` defines it.

A program takes consecutive tokens of a row with all query heads of a kv head, and walks over the row's logical slots in
tiles at fixed places (online softmax, Milakov & Gimelshein 2018). The keys of rows of few tokens are split at multiples
of one length, and a second kernel merges the splits from left to right, so that a long context fills the device (Dao et
al., Flash-Decoding, 2023). A draft tree is a mask over the slots of its nodes, not a list of keys for each node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 64  # tokens of a row whose keys are split
SLOTS = 512  # slots of a split, at least
PIECES = 1024  # tokens times splits of a step: more would not fill the device any better
EVERYTHING = 2**30  # slots: the window where there is none
LOG2E = math.log2(math.e)


@triton.jit
def _segment(block, segments, count, PER: tl.constexpr):
    """Which row block `block` of PER tokens belongs to: a row has one more than its tokens can fill at most."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(segments + middle * 4) // PER + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _in_tree(see, j, low, limit, base, path, real, depth):
    """`see` with slots of draft nodes: a token sees those on its path, whose positions run on from `base`."""
    see = see & (j < base)[None, :]
    for d in range(depth):
        node = tl.load(path + d, mask=real, other=-1).to(tl.int32)
        near = (node >= 0) & (base + d >= low) & (base + d < limit)
        see = see | (near[:, None] & (j[None, :] == (base + node)[:, None]))
    return see


@triton.jit
def _with_sink(best, total, sink):
    """What the values fade by and the weights' new total, with one more score, of no value."""
    sink = sink * 1.4426950408889634
    highest = tl.maximum(best, sink)
    fade = tl.exp2(best - highest)
    return fade, total * fade + tl.exp2(sink - highest)


@triton.jit
def _tiles(
    start, stop, acc, best, total, query, keys, values, table, lo, hi, low, limit, real, base, path, depth,
    factor, ceiling, scales,
    DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    MASK: tl.constexpr, TREE: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Tiles of slots from `start` to `stop` go into the running softmax. Without MASK every query sees all of them."""
    d, lanes = tl.arange(0, D), tl.arange(0, N)
    for first in tl.range(start, stop, N):
        j = first + lanes
        inside = (j >= lo) & (j < hi)
        block = tl.load(table + j // SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * SIZE + j % SIZE
        place = slot * DIM
        key = tl.load(keys + place[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        if WIDE:
            score = tl.dot(query, key.to(tl.float32), input_precision="tf32x3") * factor
        else:
            score = tl.dot(query, key.to(query.dtype)) * factor
        if CODES:
            score = score * tl.load(scales + slot * 2, mask=inside, other=0.0)[None, :]
        if CAP:  # ceiling * tanh, from e^2x
            score = ceiling - 2 * ceiling / (tl.exp2(score) + 1)
        if MASK:
            see = (j[None, :] < limit[:, None]) & (j[None, :] >= low[:, None])
            if TREE:
                see = _in_tree(see, j, low, limit, base, path, real, depth)
                inside = inside & (tl.max(see.to(tl.int32), 0) > 0)  # a dead node's value may be anything
            score = tl.where(see, score, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        zero = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - zero[:, None])
        fade = tl.exp2(best - zero)
        value = tl.load(values + place[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        acc = acc * fade[:, None]
        total = total * fade + tl.sum(weight, 1)
        if CODES:
            weight = weight * tl.load(scales + slot * 2 + 1, mask=inside, other=0.0)[None, :]
        if WIDE:
            acc = tl.dot(weight, value.to(tl.float32), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(weight.to(query.dtype), value.to(query.dtype), acc)
        best = highest
    return acc, best, total


VARYING = ["count", "table_width", "depth", "pool_slots", "window", "first", "split_slots", "splits"]


@triton.jit(do_not_specialize=VARYING)  # or there would be a kernel for those that 16 divides, and one for 1
def attention_kernel(
    out, partial, state, q, keys, values, scales, sinks, segments, table, prefix, base, paths,
    count, table_width, depth, pool_slots, q_token, q_head, heads, window, first, split_slots, splits, factor, ceiling,
    GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    LOW: tl.constexpr, TREE: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, THREE: tl.constexpr,
    CODES: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks, kv heads x tiles of their query heads, splits). Long, as it is one walk over the keys.

    SPLIT: acc goes to `partial` and (best, total) to `state`, for merge_kernel. LOW: there is a window or a first
    slot. THREE, without TREE: tiles that every query sees whole get a loop of their own, without masks.
    """
    TOGETHER: tl.constexpr = GROUP if GROUP < M else M  # query heads of a program
    PER: tl.constexpr = M // TOGETHER  # tokens of a program
    HEAD_TILES: tl.constexpr = (GROUP + TOGETHER - 1) // TOGETHER
    index = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    at = _segment(index, segments, count, PER)
    mine = segments + at * 4
    before = tl.load(mine)
    within = (index - before // PER - at) * PER
    left = tl.load(mine + 4) - before - within
    if left <= 0:
        return
    row = tl.load(mine + 2).to(tl.int64)
    m = tl.arange(0, M)
    head = tl.program_id(1) % HEAD_TILES * TOGETHER + m % TOGETHER
    real = (m // TOGETHER < tl.minimum(left, PER)) & (head < GROUP)
    head += kv_head * GROUP
    token = (tl.load(mine + 1) + within + m // TOGETHER).to(tl.int64)
    table += row * table_width
    start = tl.load(base + row).to(tl.int32)
    path = paths + token * depth

    limit = tl.load(prefix + token, mask=real, other=0).to(tl.int32)
    low = tl.zeros_like(limit) + first
    if LOW:
        low = tl.maximum(limit - window, first)
    hi = tl.max(limit, 0)
    if TREE:
        for d in range(depth):
            node = tl.max(tl.load(path + d, mask=real, other=-1), 0).to(tl.int32)
            hi = tl.where(node >= 0, tl.maximum(hi, start + node + 1), hi)
    hi = tl.minimum(hi, table_width * SIZE)
    lo = tl.min(tl.where(limit > 0, low, hi), 0)
    split = tl.program_id(2)
    if SPLIT:
        edge = (tl.load(mine + 3) + split) * split_slots
        lo = tl.maximum(lo, edge)
        hi = tl.minimum(hi, edge + split_slots)

    d = tl.arange(0, D)
    query = tl.load(
        q + (token * q_token + head * q_head)[:, None] + d[None, :],
        mask=real[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    if WIDE:
        query = query.to(tl.float32)
    keys += kv_head.to(tl.int64) * pool_slots * DIM
    values += kv_head.to(tl.int64) * pool_slots * DIM
    scales += kv_head.to(tl.int64) * pool_slots * 2
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    begin = lo // N * N
    if THREE:
        whole = tl.min(tl.where(real, limit, hi), 0)
        middle = begin
        if LOW:
            middle = tl.minimum(tl.cdiv(tl.max(low, 0), N) * N, tl.cdiv(hi, N) * N)
            acc, best, total = _tiles(
                begin, middle, acc, best, total, query, keys, values, table, lo, hi, low, limit, real, start, path,
                depth, factor, ceiling, scales, DIM, D, N, SIZE, True, False, CAP, WIDE, CODES,
            )  # fmt: skip
            middle = tl.maximum(begin, middle)
        end = tl.maximum(whole // N * N, middle)
        acc, best, total = _tiles(
            middle, end, acc, best, total, query, keys, values, table, lo, hi, low, limit, real, start, path, depth,
            factor, ceiling, scales, DIM, D, N, SIZE, False, False, CAP, WIDE, CODES,
        )  # fmt: skip
        begin = end
    acc, best, total = _tiles(
        begin, hi, acc, best, total, query, keys, values, table, lo, hi, low, limit, real, start, path, depth,
        factor, ceiling, scales, DIM, D, N, SIZE, True, TREE, CAP, WIDE, CODES,
    )  # fmt: skip

    if SPLIT:
        place = ((before + within + m // TOGETHER).to(tl.int64) * heads + head) * splits + split
        tl.store(state + place * 2, best, mask=real)
        tl.store(state + place * 2 + 1, total, mask=real)
        if lo < hi:
            tl.store(partial + place[:, None] * D + d[None, :], acc, mask=real[:, None])
    else:
        if SINKS:
            fade, total = _with_sink(best, total, tl.load(sinks + head, mask=real, other=0.0))
            acc = acc * fade[:, None]
        found = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token * heads + head) * DIM
        tl.store(
            out + place[:, None] + d[None, :],
            found.to(out.dtype.element_ty),
            mask=real[:, None] & (d < DIM)[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    out, partial, state, sinks, owners, heads, splits, DIM: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr
):
    """Grid (tokens of rows with few, heads): the splits of each from left to right."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    place = (token * heads + head) * splits + tl.arange(0, 1)
    for _ in range(splits):
        peak, weight = tl.load(state + place * 2), tl.load(state + place * 2 + 1)
        part = tl.load(partial + place * D + d, mask=weight != 0.0, other=0.0)
        highest = tl.maximum(best, peak)
        zero = tl.where(highest == float("-inf"), 0.0, highest)
        fade, share = tl.exp2(best - zero), tl.exp2(peak - zero)
        acc = acc * fade + part * share
        total = total * fade + weight * share
        best = highest
        place += 1
    if SINKS:
        fade, total = _with_sink(best, total, tl.load(sinks + head))
        acc = acc * fade
    found = acc / tl.where(total == 0.0, 1.0, total)
    to = (tl.load(owners + token).to(tl.int64) * heads + head) * DIM
    tl.store(out + to + d, found.to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True)
class Part:
    """Rows of many tokens, or of few, whose keys may be split."""

    segments: Tensor  # (rows + 1, 4) int32: tokens of the part before the row, its first token, itself, its first split
    tokens: int
    longest: int  # tokens of a row
    split_slots: int
    splits: int  # at most, of a row; 1: the keys are not split
    owners: Tensor | None  # (tokens,) int32: which token of the step each of the part's is; None where there are many

    @property
    def rows(self) -> int:
        return len(self.segments) - 1


@dataclass(frozen=True)
class Plan:
    """What all layers of a KV group share in one step. Made from numbers that the host knows."""

    parts: tuple[Part, ...]
    prefix: Tensor  # (tokens,) logical slots that each sees
    table: Tensor  # (rows, blocks)
    size: int
    base: Tensor  # (rows,) first draft slot
    paths: Tensor | None  # (tokens, depth) draft nodes above a token and itself


def plan_attention(batch: Any, group: int, window: int | None) -> Plan:
    """Which queries see which slots. `batch` is a llmx.batch.Batch."""
    rows, at = [], 0
    for row, length in enumerate(batch.lengths):
        if length:
            rows.append((row, at, length))
        at += length
    few, many = [r for r in rows if r[2] <= FEW], [r for r in rows if r[2] > FEW]
    parts = [_part(batch, of, window, split=of is few) for of in (few, many) if of]
    paths = None if batch.paths is None else batch.paths.contiguous()
    table = batch.tables[group].contiguous()
    return Plan(tuple(parts), batch.prefix.contiguous(), table, batch.size, batch.base.contiguous(), paths)


def _part(batch: Any, rows: list[tuple[int, int, int]], window: int | None, split: bool) -> Part:
    """Splits as short as SLOTS, unless the step has plenty to do: then twice as long, until PIECES are enough."""
    first = [0 if window is None else max(0, batch.low[row] - window + 1) for row, _, _ in rows]
    last = [max(0, batch.high[row] - 1) for row, _, _ in rows]
    tokens, slots = sum(length for _, _, length in rows), SLOTS

    def most() -> int:
        return int(max(b // slots - a // slots + 1 for a, b in zip(first, last, strict=True)))

    while tokens * most() > max(PIECES, tokens):
        slots *= 2
    table, before = [], 0
    for (row, at, length), start in zip(rows, first, strict=True):
        table.append((before, at, row, start // slots))
        before += length
    segments = torch.tensor([*table, (before, 0, 0, 0)], dtype=torch.int32, device=batch.tokens.device)
    longest = max(length for _, _, length in rows)
    if not split:
        return Part(segments, tokens, longest, slots, 1, None)
    owners = [at + i for _, at, length in rows for i in range(length)]
    on_device = torch.tensor(owners, dtype=torch.int32, device=segments.device)
    return Part(segments, tokens, longest, slots, most(), on_device)


def shape(
    few: int, group: int, dim: int, wide: bool, *, tree: bool = False, codes: bool = False, major: int = 9
) -> dict[str, Any]:
    """How a program is cut, so that no register is spilled (benchmarks/triton_aot.py says what each shape takes).

    few: tokens of the longest row of a part of few; 0: the other part. wide: f32 products. codes: an int8 cache.
    major: of the compute capability; before 9, warps don't multiply together.
    """
    padded = max(16, triton.next_power_of_2(dim))
    if wide:  # three tf32 products hold all their operands at once
        m, n, stages = 16, 32, 1
    else:
        small = padded > 128 or tree
        m = min(64, max(16, triton.next_power_of_2(few * group))) if few else 64 if small or major < 9 else 128
        n = 32 if small else 64
        stages = 2 if few and not codes and (m == 16 or padded > 128) else 3
    return {
        "DIM": dim,
        "D": padded,
        "M": m,
        "N": n,
        "THREE": not (few or tree or wide),
        "num_warps": 8 if m * padded > 64 * 64 or (wide and padded > 64) else 4,
        "num_stages": stages,
    }


@cache
def _major(device: torch.device) -> int:
    return int(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0


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
    """q (tokens, heads, head_dim); keys, values, scales as new_pools makes them for a CUDA device; sinks (heads,) f32
    -> q's shape and dtype.

    Where q is of 16 bits, and the cache of the same type or of int8, products are of that type, as codes are whole
    numbers in it, and a value's weight with its scale is rounded to it. Else they are f32, each of three tf32 products.
    All sums are f32.
    """
    assert keys.is_contiguous(), "pools are made for a CUDA device"
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        for part in plan.parts:
            _attend(out, q, keys, values, plan, part, scale, window, first, cap, sinks, scales)
    return out


def _attend(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    part: Part,
    scale: float,
    window: int | None,
    first: int,
    cap: float,
    sinks: Tensor | None,
    scales: Tensor | None,
) -> None:
    heads, (kv_heads, blocks, size, dim) = q.shape[1], keys.shape
    group = heads // kv_heads
    wide = q.dtype == torch.float32 or keys.dtype not in (q.dtype, torch.int8)
    held, sunk = q if scales is None else scales, q if sinks is None else sinks
    few = part.longest if part.owners is not None else 0
    cut = shape(few, group, dim, wide, tree=plan.paths is not None, codes=scales is not None, major=_major(q.device))
    together = min(group, cut["M"])
    per, split = cut["M"] // together, part.splits > 1
    partial = state = out
    if split:
        pieces = part.tokens * heads * part.splits
        partial = torch.empty(pieces, cut["D"], dtype=torch.float32, device=q.device)
        state = torch.empty(pieces, 2, dtype=torch.float32, device=q.device)
    paths = plan.prefix if plan.paths is None else plan.paths
    factor, ceiling = (scale / cap * 2 * LOG2E, cap * LOG2E) if cap else (scale * LOG2E, 0.0)
    reach = EVERYTHING if window is None else window
    grid = (part.tokens // per + part.rows, kv_heads * triton.cdiv(group, together), part.splits)
    attention_kernel[grid](
        out, partial, state, q, keys, values, held, sunk, part.segments, plan.table, plan.prefix, plan.base, paths,
        part.rows, plan.table.shape[1], 0 if plan.paths is None else paths.shape[1], blocks * size,
        q.stride(0), q.stride(1), heads, reach, first, part.split_slots, part.splits, factor, ceiling,
        GROUP=group, SIZE=size, SPLIT=split, LOW=window is not None or first > 0, TREE=plan.paths is not None,
        CAP=cap > 0, WIDE=wide, CODES=scales is not None, SINKS=sinks is not None, **cut,
    )  # fmt: skip
    if split:
        merge_kernel[(part.tokens, heads)](
            out,
            partial,
            state,
            sunk,
            part.owners,
            heads,
            part.splits,
            DIM=dim,
            D=cut["D"],
            SINKS=sinks is not None,
            num_warps=1,
        )
