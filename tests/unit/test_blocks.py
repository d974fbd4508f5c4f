"""Blocks: books that balance through any life, what a hit needs, who is evicted, what is copied."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from llmx.batch import Batch, Kept
from llmx.cache.blocks import BlockManager, GroupShape
from llmx.cache.pools import Cache, LayerSpec, block_bytes, windows_of
from llmx.core import Request, SamplingParams, Sequence

SIZE = 4


def manager(*groups: tuple[int | None, int], **options: object) -> BlockManager:
    """groups: (window, blocks beside the one that is nobody's)"""
    return BlockManager(SIZE, [GroupShape(window, count + 1) for window, count in groups], **options)  # type: ignore[arg-type]


def text(tokens: Iterable[int], salt: bytes = b"", scores: int | None = None, arrival: int = 0) -> Sequence:
    prompt = tuple(tokens)
    request = Request("x", prompt, SamplingParams(prompt_logprobs=scores), salt=salt)
    return Sequence(request, 0, arrival, list(prompt))


def compute(blocks: BlockManager, sequence: Sequence, end: int | None = None) -> None:
    """All that a scheduler does to have slots up to `end` computed."""
    end = len(sequence.tokens) if end is None else end
    assert blocks.reserve(sequence, end) is not None
    sequence.computed = end
    blocks.publish(sequence)
    blocks.pass_window(sequence)


def balanced(blocks: BlockManager, live: Iterable[Sequence]) -> None:
    """free + held = total in every group, counted from the tables."""
    live = list(live)
    blocks.check(live)
    for group, pool in enumerate(blocks.pools):
        held = {b for s in live if s.tables for b in s.tables[group] if b}
        assert len(pool.free) + len(held) == pool.count - 1
        assert pool.held == len(held)
        assert 0 not in pool.free
        assert not set(pool.free) & held
        assert set(pool.by_hash.values()) == set(pool.hash_of)
        assert {d: b for b, d in pool.hash_of.items()} == pool.by_hash


GROUPS = {
    "full": ((None, 19),),
    "window": ((6, 12),),
    "mixed": ((None, 19), (6, 14)),
    "three": ((None, 25), (3, 11), (9, 16)),
}


@pytest.mark.parametrize("groups", list(GROUPS))
def test_random_lives_keep_the_books_balanced(groups: str) -> None:
    """Adopt, append, draft, shrink, publish, fork, pass windows, preempt, end: in any order, with eviction."""
    happened: Counter[str] = Counter()
    for seed in range(25):
        live_at_random(groups, seed, happened)
    assert min(happened[what] for what in ("hit", "copied", "refused", "evicted")) > 15, happened


def live_at_random(groups: str, seed: int, happened: Counter[str]) -> None:
    rng, blocks = random.Random(seed), manager(*GROUPS[groups])
    live: list[Sequence] = []
    for arrival in range(300):
        known = [set(pool.by_hash) for pool in blocks.pools]
        what = rng.randrange(7) if live else 0
        if what == 0:
            made = text([seed % 3] * rng.randrange(1, 30), arrival=arrival)
            blocks.adopt(made)
            happened["hit"] += made.computed > 0
            assert made.computed % SIZE == 0
            assert made.computed < len(made.tokens), "the last token is always computed"
            live.append(made)
        elif what in (1, 2):
            sequence = rng.choice(live)
            before = [list(t) for t in sequence.tables], [list(p.free) for p in blocks.pools]
            end = min(len(sequence.tokens), sequence.computed + rng.randrange(1, 9))
            moved = blocks.reserve(sequence, end + rng.randrange(4) * (what == 2))
            if moved is None:
                happened["refused"] += 1
                assert not before[0] or before == (sequence.tables, [list(p.free) for p in blocks.pools])
                continue
            happened["copied"] += len(moved)
            for pool, table in zip(blocks.pools, sequence.tables, strict=True):
                written = table[sequence.computed // SIZE : -(-end // SIZE)]
                assert all(written), "no slot that is written is nobody's"
                assert all(pool.refs[b] == 1 and b not in pool.hash_of for b in written)
            sequence.computed = end
            blocks.publish(sequence)
            blocks.pass_window(sequence)
            if end == len(sequence.tokens):
                sequence.tokens.append(rng.randrange(2))
            blocks.shrink(sequence, len(sequence.tokens))
        elif what == 3:
            parent = rng.choice(live)
            if parent.tables:
                child = Sequence(parent.request, 1, arrival, list(parent.tokens))
                blocks.fork(parent, child)
                live.append(child)
        elif what == 4:
            preempted = rng.choice(live)
            blocks.release(preempted)
            assert preempted.computed == 0
            blocks.adopt(preempted)
        else:
            blocks.release(live.pop(rng.randrange(len(live))))
        happened["evicted"] += any(old - set(pool.by_hash) for old, pool in zip(known, blocks.pools, strict=True))
        balanced(blocks, live)
    for sequence in live:
        blocks.release(sequence)
    balanced(blocks, [])
    assert all(len(pool.free) == pool.count - 1 for pool in blocks.pools)


def test_a_reservation_is_granted_in_all_groups_or_in_none() -> None:
    blocks = manager((None, 10), (100, 3))
    sequence = text(range(20))
    blocks.adopt(sequence)
    assert blocks.reserve(sequence, 13) is None
    assert [pool.held for pool in blocks.pools] == [0, 0]
    assert blocks.reserve(sequence, 12) == []
    assert [pool.held for pool in blocks.pools] == [3, 3]


def test_window_groups_free_what_they_have_passed_and_full_ones_keep_theirs() -> None:
    blocks = manager((None, 20), (6, 20))
    sequence = text(range(40))
    blocks.adopt(sequence)
    for end in range(1, 41):
        compute(blocks, sequence, end)
        full, window = sequence.tables
        assert len(full) == len(window) == -(-end // SIZE)
        assert all(full)
        first = max(0, end - 6 + 1) // SIZE  # the query at position `end` sees from end - 5 on
        assert [bool(b) for b in window] == [i >= first for i in range(len(window))]
    assert [pool.held for pool in blocks.pools] == [10, 2]


def test_a_hit_needs_all_blocks_of_full_groups_and_of_window_groups_those_that_cover_the_window() -> None:
    blocks = manager((None, 20), (6, 8))
    first = text(range(24))
    blocks.adopt(first)
    for end in range(2, 25, 2):
        compute(blocks, first, end)
    blocks.release(first)
    same = text([*range(24), 99])
    blocks.adopt(same)
    assert same.computed == 24
    assert all(same.tables[0])
    assert [bool(b) for b in same.tables[1]] == [False] * 4 + [True] * 2
    blocks.release(same)
    # The window group has eight blocks: a long text takes some of them, and the hit ends where its window still is.
    other = text(range(100, 125))
    blocks.adopt(other)
    for end in range(4, 25, 4):
        compute(blocks, other, end)
    lost = text([*range(24), 99])
    blocks.adopt(lost)
    gone = [i for i in range(6) if blocks._digest(lost, i) not in blocks.pools[1].by_hash]
    assert gone
    assert lost.computed < 24 or not {4, 5} & set(gone)
    balanced(blocks, [other, lost])


def test_a_hole_in_a_full_group_ends_a_hit() -> None:
    blocks = manager((None, 20))
    first = text(range(20))
    blocks.adopt(first)
    compute(blocks, first)
    blocks.release(first)
    pool = blocks.pools[0]
    pool.by_hash.pop(pool.hash_of.pop(pool.by_hash[blocks._digest(first, 2)]))
    again = text([*range(20), 5])
    blocks.adopt(again)
    assert again.computed == 8


def test_a_hit_never_covers_the_last_token() -> None:
    blocks = manager((None, 9))
    first = text(range(8))
    blocks.adopt(first)
    compute(blocks, first)
    for length, hit in ((8, 4), (9, 8), (5, 4), (4, 0), (1, 0)):
        again = text(range(length))
        blocks.adopt(again)
        assert again.computed == hit, length
        blocks.release(again)


def test_salts_parents_and_scores_share_nothing() -> None:
    blocks = manager((None, 30))
    first = text(range(12), salt=b"a")
    blocks.adopt(first)
    compute(blocks, first)
    for other, hit in (
        (text([*range(12), 1], salt=b"a"), 12),
        (text([*range(12), 1], salt=b"b"), 0),
        (text([*range(12), 1]), 0),
        (text([50, *range(1, 12), 1], salt=b"a"), 0),  # blocks 1 and 2 hold the same tokens, after another parent
        (text([*range(4), *range(8, 12), 1], salt=b"a"), 4),
        (text([*range(12), 1], salt=b"a", scores=0), 0),  # prompt logprobs need every position computed
    ):
        blocks.adopt(other)
        assert other.computed == hit
        blocks.release(other)
    keys = [manager((None, 3)).key for _ in range(2)]
    assert keys[0] != keys[1], "hashes are keyed by a secret of the process"


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = manager((None, 9), prefix_caching=False)
    for _ in range(2):
        sequence = text(range(9))
        blocks.adopt(sequence)
        assert sequence.computed == 0
        compute(blocks, sequence)
        blocks.release(sequence)
    assert not blocks.pools[0].by_hash


def test_only_what_is_computed_is_published() -> None:
    blocks = manager((None, 9))
    sequence = text(range(20))
    blocks.adopt(sequence)
    blocks.reserve(sequence, 20)
    blocks.publish(sequence)
    assert not blocks.pools[0].by_hash
    sequence.computed = 7
    blocks.publish(sequence)
    assert list(blocks.pools[0].by_hash) == [blocks._digest(sequence, 0)]


def test_eviction_takes_unpublished_blocks_first_then_the_longest_unused_and_tails_before_prefixes() -> None:
    blocks = manager((None, 6))
    old, new = text([*range(8), 7]), text([*range(50, 58), 7])
    for sequence in (old, new):
        blocks.adopt(sequence)
        compute(blocks, sequence)
    tables = [list(s.tables[0]) for s in (old, new)]
    blocks.release(old)
    blocks.release(new)
    order = list(blocks.pools[0].free)
    assert set(order[:2]) == {tables[0][2], tables[1][2]}, "these hold no published prefix"
    assert order[2:] == [tables[0][1], tables[0][0], tables[1][1], tables[1][0]]
    again = text([*range(8), 7])  # a hit makes it the newest
    blocks.adopt(again)
    blocks.release(again)
    assert list(blocks.pools[0].free)[2:] == [tables[1][1], tables[1][0], tables[0][1], tables[0][0]]
    blocks.adopt(taker := text(range(70, 82)))
    compute(blocks, taker)
    assert set(taker.tables[0]) == {*order[:2], tables[1][1]}
    half = text([*range(50, 58), 7])
    blocks.adopt(half)
    assert half.computed == 4, "its tail was evicted, its beginning was not"
    blocks.release(half)


def test_copy_on_write_only_where_somebody_else_looks() -> None:
    blocks = manager((None, 9), (6, 9))
    parent = text(range(7))
    blocks.adopt(parent)
    compute(blocks, parent, 6)
    child = Sequence(parent.request, 1, 0, list(parent.tokens))
    blocks.fork(parent, child)
    assert child.tables == parent.tables
    moved = blocks.reserve(parent, 7)
    assert [(group, source) for group, source, _ in moved or ()] == [(g, child.tables[g][1]) for g in range(2)]
    assert [to for _, _, to in moved or ()] == [parent.tables[g][1] for g in range(2)]
    assert blocks.reserve(child, 7) == [], "nobody else has its block any more"
    assert parent.tables[0][0] == child.tables[0][0]
    balanced(blocks, [parent, child])


def test_a_copy_needs_a_block_too() -> None:
    blocks = manager((None, 2))
    parent = text(range(7))
    blocks.adopt(parent)
    compute(blocks, parent, 6)
    child = Sequence(parent.request, 1, 0, list(parent.tokens))
    blocks.fork(parent, child)
    assert blocks.reserve(parent, 7) is None
    blocks.release(child)
    assert blocks.reserve(parent, 7) == []


def test_shortage_and_reach_are_exact() -> None:
    """A text that `shortage` lets pass gets through alone, one reach after another; one more token would not."""
    for window in (1, 2, 3, 4, 5, 8, 9):
        for count in range(1, 6):
            for length in (3, 9, 30):
                blocks, sequence = manager((None, 8), (window, count)), text(range(length))
                if short := blocks.shortage(length):
                    assert short[1] == count < short[0]
                    continue
                blocks.adopt(sequence)
                while sequence.computed < length:
                    reach = blocks.reach(sequence)
                    assert reach > sequence.computed
                    assert blocks.reserve(sequence, reach + 1) is None
                    compute(blocks, sequence, min(reach, length))
                blocks.release(sequence)
    assert manager((None, 2), (4, 9)).shortage(9) == (3, 2)
    assert manager((None, 2), (4, 9)).shortage(8) is None
    assert manager((None, 9), (4, 1)).shortage(5) == (2, 1)
    assert manager((None, 9), (4, 1)).shortage(4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copies_move_keys_values_and_taps_of_their_group_alone(dtype: torch.dtype) -> None:
    specs = [LayerSpec(1, 2), LayerSpec(1, 2, window=6), LayerSpec(1, 2)]
    cache = Cache(specs, 3, [4, 4], SIZE, tap_dim=3, dtype=dtype, device=torch.device("cpu"))
    pools = [*cache.keys, *cache.values, *(scales for scales in cache.scales if scales is not None)]
    assert len(pools) == (9 if dtype == torch.int8 else 6)
    for pool in (*pools, cache.taps):
        pool.copy_(torch.randn(pool.shape) * 50)
    before = [pool.clone() for pool in pools]
    taps = cache.taps.clone()
    cache.copy([(0, 1, 3), (1, 2, 1)])
    for old, new, (source, to) in zip(before, pools, [(1, 3), (2, 1), (1, 3)] * (len(pools) // 3), strict=True):
        assert torch.equal(new[:, to], old[:, source])
        rest = [b for b in range(4) if b != to]
        assert torch.equal(new[:, rest], old[:, rest])
    assert torch.equal(cache.taps, taps[[0, 1, 2, 1]])


@pytest.mark.parametrize("seed", range(5))
def test_each_block_keeps_the_tap_of_its_last_kept_position_in_whatever_order_they_are_written(seed: int) -> None:
    """A device may write in any order, so no block may be written twice."""
    cache = Cache([LayerSpec(1, 2)], 1, [6], SIZE, tap_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.tensor([2, 3, 4, 5, 6, 0, 1, 2, 3])
    owner = torch.tensor([0] * 5 + [1] * 4)
    mask = torch.tensor([True] * 4 + [False] + [True] * 4)  # position 6 of the first row was a draft, and wrong
    table = torch.tensor([[3, 4], [5, 0]])
    slots = torch.where(mask, table[owner, positions // SIZE] * SIZE + positions % SIZE, positions % SIZE)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    zeros = torch.zeros(9, dtype=torch.long)
    batch = Batch(
        zeros, positions[order], owner[order], zeros - 1, zeros, [slots[order]], [table], zeros[:2], zeros[:2], zeros,
        SIZE, (5, 4), (5, 4), (2, 0), (7, 4),
    )  # fmt: skip
    kept = Kept(mask[order], positions[order], [slots[order]], torch.tensor([6, 4]))
    cache.settle(batch, kept, (positions + 100 * owner)[order, None].float())
    assert cache.taps[:, 0].tolist() == [0, 0, 0, 3, 5, 103]


def test_groups_and_their_bytes() -> None:
    specs = [LayerSpec(2, 8, 9), LayerSpec(2, 8), LayerSpec(1, 16, 4), LayerSpec(2, 8, 9)]
    assert windows_of(specs) == (None, 4, 9)
    assert block_bytes(specs, 9, SIZE, torch.bfloat16) == 2 * 2 * SIZE * 2 * 8 * 2
    assert block_bytes(specs, None, SIZE, torch.float32) == 2 * SIZE * 2 * 8 * 4
    cache = Cache(specs, 4, [3, 5, 7], SIZE, tap_dim=0, dtype=torch.float32, device=torch.device("cpu"))
    assert [k.shape for k in cache.keys] == [(2, 7, SIZE, 8), (2, 3, SIZE, 8), (1, 5, SIZE, 16), (2, 7, SIZE, 8)]
    counted = sum(block_bytes(specs, w, SIZE, torch.float32) * n for w, n in zip((None, 4, 9), (3, 5, 7), strict=True))
    assert cache.bytes == counted
    assert block_bytes(specs, 9, SIZE, torch.int8) == 2 * 2 * SIZE * 2 * (8 + 4)
    quantized = Cache(specs, 4, [3, 5, 7], SIZE, tap_dim=0, dtype=torch.int8, device=torch.device("cpu"))
    assert quantized.bytes == sum(
        block_bytes(specs, w, SIZE, torch.int8) * n for w, n in zip((None, 4, 9), (3, 5, 7), strict=True)
    )
