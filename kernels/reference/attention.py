"""Attention over a block table, as a definition: any number of queries per sequence, any draft tree, any window.

Keys are taken in tiles of KEY_TILE at absolute positions and merged from left to right (online softmax, Milakov &
Gimelshein 2018), the same for a prefill chunk, a decode and a verification. A query in a draft tree gets its ancestors'
slots in order of depth, so that its keys stand in the very lanes where they would stand in plain text. So a query's
result does not depend on its batch, its chunk or its tree, bit for bit on CPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KEY_TILE = 128  # a multiple of every block size
ROWS = 16  # torch's f32 products of these sizes give a row equal bits in any multiple of so many rows, not in others
LOWEST = -1e30


@dataclass(frozen=True)
class Unit:
    """Queries that share one list of keys, before they are stacked: host numbers only."""

    row: int
    tokens: tuple[int, ...]
    first_tile: int
    tiles: int  # one past the last


@dataclass(frozen=True)
class Bucket:
    """Units of similar size, stacked. U units of at most C queries, most tiles first."""

    queries: Tensor  # (U, C) token; the last one repeated where a unit has fewer
    index: Tensor  # (U, entries) blocks (paged) or slots (private) in logical order
    entry: int  # slots per entry of `index`
    first: Tensor  # (U,) tile
    prefix: Tensor  # (U, C)
    tiles: tuple[int, ...]  # per unit: how many, on the host
    write: Tensor  # (sum of real queries,) flat index into (U, C)
    tokens: Tensor  # (sum of real queries,) the token of each


def plan_attention(batch: Any, group: int, window: int | None) -> list[Bucket]:
    """What all layers of a KV group share in one step: which queries see which slots. `batch` is a llmx.batch.Batch."""
    buckets: dict[tuple[int, bool], list[Unit]] = defaultdict(list)
    for unit, private in _units(batch, window):
        buckets[(len(unit.tokens) - 1).bit_length(), private].append(unit)
    return [_stack(batch, group, sorted(units, key=lambda u: u.first_tile - u.tiles), private)
            for (_, private), units in sorted(buckets.items())]  # fmt: skip


def _units(batch: Any, window: int | None) -> list[tuple[Unit, bool]]:
    found, at = [], 0
    for row, (length, count) in enumerate(zip(batch.lengths, batch.counts, strict=True)):
        first = 0 if window is None else max(0, batch.low[row] - window + 1) // KEY_TILE
        tiles = -(-batch.high[row] // KEY_TILE)
        shared = length if batch.paths is None else count
        found.append((Unit(row, tuple(range(at, at + shared)), first, tiles), False))
        found += [(Unit(row, (t,), first, tiles), True) for t in range(at + shared, at + length)]
        at += length
    return found


def _stack(batch: Any, group: int, units: list[Unit], private: bool) -> Bucket:
    device, table = batch.tokens.device, batch.tables[group]

    def put(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    width = max(len(u.tokens) for u in units)
    queries = put([[*u.tokens, *[u.tokens[-1]] * (width - len(u.tokens))] for u in units])
    write = put([i * width + j for i, u in enumerate(units) for j in range(len(u.tokens))])
    rows = put([u.row for u in units])
    slots = max(u.tiles for u in units) * KEY_TILE
    index = _private(batch, table, rows, queries[:, 0], slots) if private else _paged(batch, table, rows, slots)
    return Bucket(
        queries, index, 1 if private else batch.size, put([u.first_tile for u in units]), batch.prefix[queries],
        tuple(u.tiles - u.first_tile for u in units), write, put([t for u in units for t in u.tokens]),
    )  # fmt: skip


def _paged(batch: Any, table: Tensor, rows: Tensor, slots: int) -> Tensor:
    """(U, blocks), block 0 past the end of a table."""
    blocks = slots // batch.size
    padded: Tensor = torch.nn.functional.pad(table, (0, max(0, blocks - table.shape[1])))[:, :blocks]
    return padded[rows]


def _private(batch: Any, table: Tensor, rows: Tensor, tokens: Tensor, slots: int) -> Tensor:
    """(U, slots): the row's own below `base`, then those of the query's ancestors in order of depth."""
    logical = torch.arange(slots, device=table.device).expand(len(rows), slots)
    above, base = batch.paths[tokens], batch.base[rows, None]  # (U, depth)
    step = logical - base
    node = above.gather(1, step.clamp(0, above.shape[1] - 1))
    in_tree = (step >= 0) & (step < above.shape[1]) & (node >= 0)
    logical = torch.where(in_tree, base + node, logical)
    block = (logical // batch.size).clamp(max=table.shape[1] - 1)
    slots_seen: Tensor = table[rows[:, None], block] * batch.size + logical % batch.size
    return slots_seen


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: list[Bucket],
    scale: float,
    window: int | None = None,
    first: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """q (tokens, heads, head_dim); keys, values (kv_heads, blocks, size, head_dim) -> q's shape and dtype.

    A query at position p sees keys j with first <= j <= p and, with a window w, j > p - w. Computed in f32. A query
    that sees nothing gives zeros. cap: scores become cap * tanh(score / cap) (Gemma 2); 0: they don't.
    sinks (heads,) f32: a score that each head always sees, of no value (gpt-oss). scales (kv_heads, blocks, size, 2)
    f32: of int8 keys and values.
    """
    out = torch.empty_like(q)
    for bucket in plan:
        found = _attend(q, keys, values, bucket, scale, window, first, cap, sinks, scales)  # (U, C, heads, head_dim)
        out.index_copy_(0, bucket.tokens, found.flatten(0, 1)[bucket.write].to(q.dtype))
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: Bucket,
    scale: float,
    window: int | None,
    first: int,
    cap: float,
    sinks: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    width, heads, kv_heads = bucket.queries.shape[1], q.shape[1], keys.shape[0]
    group = heads // kv_heads
    padding = -(width * group) % ROWS
    query = (q[bucket.queries].float() * scale).unflatten(2, (kv_heads, group))  # (U, C, kv_heads, group, head_dim)
    query = query.permute(2, 0, 1, 3, 4).flatten(2, 3)  # (kv_heads, U, C * group, head_dim)
    query = torch.nn.functional.pad(query, (0, 0, 0, padding))
    prefix = torch.nn.functional.pad(bucket.prefix.repeat_interleave(group, 1), (0, padding))  # (U, C * group)
    low = torch.full_like(prefix, first) if window is None else (prefix - window).clamp(min=first)
    best = torch.full((*query.shape[:3], 1), LOWEST, device=q.device)
    total, acc = torch.zeros_like(best), torch.zeros_like(query)
    offsets = torch.arange(KEY_TILE, device=q.device)
    for tile in range(max(bucket.tiles)):
        live = sum(tiles > tile for tiles in bucket.tiles)  # units are sorted: the first so many
        position = (bucket.first[:live, None] + tile) * KEY_TILE + offsets  # (live, KEY_TILE)
        see = (position[:, None] < prefix[:live, :, None]) & (position[:, None] >= low[:live, :, None])
        # No query of the unit sees it: it may hold anything, also what another request overflowed to.
        nobody = ~see.any(1)[None, :, :, None]
        k, v = (_gather(pool, bucket, live, tile) for pool in (keys, values))
        if scales is not None:
            factors = _gather(scales, bucket, live, tile)
            k, v = k * factors[..., :1], v * factors[..., 1:]
        scores = torch.bmm(query[:, :live].flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).unflatten(
            0, (kv_heads, live)
        )
        if cap:
            scores = torch.tanh(scores / cap) * cap
        scores.masked_fill_(~see, -torch.inf)
        highest = torch.maximum(best[:, :live], scores.amax(-1, keepdim=True))
        weights = torch.exp(scores.sub_(highest))
        fade = torch.exp(best[:, :live] - highest)
        best[:, :live] = highest
        total[:, :live] = total[:, :live] * fade + weights.sum(-1, keepdim=True)
        v = v.masked_fill_(nobody, 0)
        part = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (kv_heads, live))
        acc[:, :live] = acc[:, :live] * fade + part
    if sinks is not None:
        sink = sinks.view(kv_heads, 1, 1, group).expand(-1, -1, width, -1).flatten(2)
        sink = torch.nn.functional.pad(sink, (0, padding)).unsqueeze(-1)
        highest = torch.maximum(best, sink)
        fade = torch.exp(best - highest)
        total, acc = total * fade + torch.exp(sink - highest), acc * fade
    found = (acc / total.clamp(min=1e-30))[:, :, : width * group].unflatten(2, (width, group))
    stacked: Tensor = found.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return stacked


def _gather(pool: Tensor, bucket: Bucket, live: int, tile: int) -> Tensor:
    """(kv_heads, live, KEY_TILE, what a slot holds) f32: each unit's tile number `tile` of those it looks at."""
    kv_heads, _, size, held = pool.shape
    per_tile = KEY_TILE // bucket.entry
    at = (bucket.first[:live, None] + tile) * per_tile + torch.arange(per_tile, device=pool.device)
    entries = bucket.index[:live].gather(1, at).flatten()
    found = pool[:, entries] if bucket.entry == size else pool[:, entries // size, entries % size]
    return found.reshape(kv_heads, live, KEY_TILE, held).float()
