"""Rows and draft trees laid flat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmx.batch import Drafts, Tips, build, causal, pad, slots_of, tables_of, tips_of
from llmx.core import Request, Row, SamplingParams, Sequence
from llmx.sampler import Draws
from llmx.speculative.verify import emit, points, verify

CPU = torch.device("cpu")
SIZE = 4
TREE = ([10, 11, 12, 13, 14, 15], [-1, -1, 0, 1, 3, 1])


def row(length: int, start: int, count: int, room: int = 0, blocks: int = 5, first: int = 1, draws: bool = True) -> Row:
    tokens = list(range(100, 100 + length))
    sequence = Sequence(Request("x", tuple(tokens), SamplingParams()), 0, 0, tokens, computed=start)
    sequence.tables = [list(range(first, first + blocks)), [0, *range(first + 50, first + 49 + blocks)]]
    return Row(sequence, start, count, draws, room)


def laid(rows: list[Row], trees: list[tuple[list[int], list[int]]]) -> tuple[Tips, Drafts]:
    return tips_of(rows, SIZE, CPU), Drafts.trees(trees, CPU)


def test_rows_become_flat_tokens_positions_and_slots() -> None:
    rows = [row(7, 2, 3, draws=False), row(6, 5, 1, room=3, first=20), row(9, 0, 9, blocks=3, first=30)]
    batch = build(*laid(rows, [([], []), ([50, 51, 52], [-1, 0, 1]), ([], [])]))
    assert batch.tokens.tolist() == [102, 103, 104, 105, 50, 51, 52, *range(100, 109)]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 7, 8, *range(9)]
    assert batch.sequence.tolist() == [0] * 3 + [1] * 4 + [2] * 9
    assert batch.node.tolist() == [-1, -1, -1, -1, 0, 1, 2, *[-1] * 9]
    assert batch.prefix.tolist() == [3, 4, 5, 6, 7, 8, 9, *range(1, 10)]
    assert batch.slots[0].tolist() == [6, 7, 8, 85, 86, 87, 88, *range(120, 129)]
    assert batch.slots[1].tolist()[3:7] == [4 * 70 + 1, 4 * 70 + 2, 4 * 70 + 3, 4 * 71]
    assert batch.sample.tolist() == [3, 4, 5, 6, 15], "a row that does not reach the end draws nothing"
    assert (batch.lengths, batch.counts, batch.low, batch.high) == ((3, 4, 9), (3, 1, 9), (2, 5, 0), (5, 9, 9))
    assert batch.paths is None
    assert batch.base.tolist() == [5, 6, 9]


def test_a_tree_has_positions_by_depth_slots_by_node_and_a_path_for_each_node() -> None:
    batch = build(*laid([row(6, 5, 1, room=6)], [TREE]))
    assert batch.positions.tolist() == [5, 6, 6, 7, 7, 8, 7]
    assert batch.slots[0].tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert batch.paths is not None
    assert batch.paths.tolist() == [
        [-1, -1, -1], [0, -1, -1], [1, -1, -1], [0, 2, -1], [1, 3, -1], [1, 3, 4], [1, 5, -1],
    ]  # fmt: skip


def test_what_only_the_device_knows_is_not_read_on_the_host() -> None:
    """Behind a row in flight: start and token come from its verdict; a dead node writes to nobody and sees nothing."""
    flying = row(6, 5, 1, room=2)
    behind = Row(flying.sequence, 6, 1, True, room=3, after=flying)
    tips = replace(tips_of([behind], SIZE, CPU), start=torch.tensor([8]), last=torch.tensor([77]))
    drafts = replace(Drafts.chains([[50, 51, 52]], CPU), counts=torch.tensor([1]))
    batch = build(tips, drafts)
    assert batch.tokens[:2].tolist() == [77, 50]
    assert batch.positions.tolist() == [8, 9, 10, 11]
    assert batch.slots[0].tolist() == [12, 13, 2, 3], "dead nodes go to block 0"
    assert batch.prefix.tolist() == [9, 10, 0, 0]
    assert batch.high == (6 + 4 + 2,), "as far as the row in flight may have got"


def test_tables_are_as_wide_as_the_widest_and_padded_with_nobodys_block() -> None:
    full, window = tables_of([row(3, 0, 3, blocks=1), row(9, 0, 9, blocks=3, first=7)], CPU)
    assert full.tolist() == [[1, 0, 0], [7, 8, 9]]
    assert window.tolist() == [[0, 0, 0], [0, 57, 58]]
    assert slots_of(full, torch.tensor([1, 0]), torch.tensor([6, 99]), SIZE).tolist() == [34, 3], "clamped"


def test_trees_know_their_shape() -> None:
    drafts = Drafts.trees([TREE, ([], []), ([1], [-1])], CPU)
    assert (drafts.width, drafts.depth, drafts.chain, drafts.sizes) == (6, 3, False, (6, 0, 1))
    assert drafts.depths.tolist() == [[1, 1, 2, 2, 3, 2], [0] * 6, [1, 0, 0, 0, 0, 0]]
    assert drafts.ancestors[0, 4].nonzero().flatten().tolist() == [1, 3, 4]
    assert not drafts.ancestors[1].any()
    none = Drafts.none(3, CPU)
    assert (none.width, none.depth, none.chain, none.sizes) == (1, 0, True, (0, 0, 0))
    assert Drafts.chains([[1, 2], [3]], CPU).chain


@pytest.mark.parametrize(
    ("tree", "wrong"),
    [
        (([1, 2], [1, -1]), "a child before its parent"),
        (([1, 1], [-1, -1]), "two siblings with one token"),
        (([1, 2, 3], [-1, 0, 1]), "more drafts than room"),
    ],
)
def test_a_tree_that_breaks_the_rules_is_found(tree: tuple[list[int], list[int]], wrong: str) -> None:
    drafts = Drafts(
        torch.tensor([tree[0]]), torch.tensor([tree[1]]), torch.tensor([len(tree[0])]), torch.tensor([0]),
        (len(tree[0]),), 3, False,
    )  # fmt: skip
    with pytest.raises(AssertionError, match=wrong):
        drafts.check([row(6, 5, 1, room=2)])
    drafts.check([row(6, 5, 1, room=3)]) if wrong.startswith("more") else None


def test_padding_tokens_belong_to_padding_rows_and_to_nobodys_block() -> None:
    batch = build(*laid([row(6, 5, 1, room=6)], [TREE]))
    padded = pad(batch, 12, 3)
    assert padded.sequence.tolist() == [0] * 7 + [1] * 3 + [2] * 2
    assert padded.lengths == (7, 3, 2)
    assert not any(slot[7:].any() for slot in padded.slots)
    assert padded.prefix[7:].tolist() == [1] * 5
    assert [table.shape for table in padded.tables] == [(3, 5), (3, 5)]
    assert torch.equal(padded.sample, batch.sample)
    assert pad(batch, 7, 1) is batch
    with pytest.raises(AssertionError):
        pad(batch, 8, 1)


def test_a_drafters_own_forward_has_slots_where_its_positions_are() -> None:
    tips = tips_of([row(6, 5, 1), row(9, 8, 1, first=20)], SIZE, CPU)
    tokens, rows, positions = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([5, 8, 9])
    batch = causal(tokens, rows, positions, tips, (1, 2))
    assert batch.slots[0].tolist() == [9, 88, 89]
    assert batch.prefix.tolist() == [6, 9, 10]
    assert batch.high == (7, 11)
    assert torch.equal(batch.sample, torch.arange(3))


def verified(
    tree: tuple[list[int], list[int]], tokens: list[int], base: int = 6
) -> tuple[list[int], list[int], Tensor]:
    """(emitted tokens, kept positions, where the next row starts and with what) if the target draws `tokens`."""
    tips, drafts = laid([row(base, base - 1, 1, room=8), row(3, 0, 2, draws=False)], [tree, ([], [])])
    batch = build(tips, drafts)
    found = points(tips.rows, drafts, batch)
    assert found.positions.tolist() == [p + 1 for p in batch.positions[batch.sample].tolist()]
    draws = Draws(torch.tensor(tokens))
    verdict = verify(drafts, batch, draws)
    emitted = emit(tips.rows, drafts, verdict, draws, [{}, {}])
    assert emitted[1].tokens == []
    assert int(verdict.start[1]) == 2
    mine = batch.sequence == 0
    assert verdict.kept.slots[0][mine & ~verdict.kept.mask].lt(SIZE).all(), "what is dropped is aimed at block 0"
    kept = batch.positions[mine & verdict.kept.mask].tolist()
    return emitted[0].tokens, kept, torch.stack([verdict.start[0], verdict.last[0]])


@pytest.mark.parametrize(
    ("draws", "said", "kept"),
    [
        # drawn after: root, then nodes 0 .. 5 of TREE
        ([99, 0, 0, 0, 0, 0, 0], [99], [5]),
        ([10, 99, 0, 0, 0, 0, 0], [10, 99], [5, 6]),
        ([11, 0, 99, 0, 0, 0, 0], [11, 99], [5, 6]),
        ([11, 0, 13, 0, 14, 7, 0], [11, 13, 14, 7], [5, 6, 7, 8]),
        ([11, 0, 15, 0, 0, 0, 8], [11, 15, 8], [5, 6, 7]),
        ([12, 0, 0, 0, 0, 0, 0], [12], [5]),  # node 2's token, but not a child of the root
        ([10, 13, 0, 0, 0, 0, 0], [10, 13], [5, 6]),  # node 3's token, but not a child of node 0
    ],
)
def test_a_walk_accepts_what_the_target_draws_and_stops_at_the_first_mismatch(
    draws: list[int], said: list[int], kept: list[int]
) -> None:
    tokens, positions, follows = verified(TREE, draws)
    assert tokens == said
    assert positions == kept
    assert follows.tolist() == [kept[-1] + 1, said[-1]]


def test_a_chain_is_accepted_as_far_as_it_goes() -> None:
    chain = ([1, 2, 3], [-1, 0, 1])
    assert verified(chain, [1, 2, 3, 4])[0] == [1, 2, 3, 4]
    assert verified(chain, [1, 2, 9, 3])[0] == [1, 2, 9]
    assert verified(chain, [2, 2, 3, 4])[0] == [2]
    assert verified(([], []), [5])[:2] == ([5], [5])
