"""Who gets which tokens of a step: counts only, no tensors."""

from __future__ import annotations

import random

import pytest

from llmx.cache.blocks import BlockManager, GroupShape
from llmx.core import Emitted, Landed, Request, Row, SamplingParams, Sequence
from llmx.scheduler import Limits, Scheduler, take

SIZE = 4


def scheduler(blocks: int | tuple[int, int] = 100, **limits: object) -> Scheduler:
    """blocks: of the full group; or of it and of one with a window of 6. Block 0 is not counted."""
    counts = [blocks] if isinstance(blocks, int) else list(blocks)
    groups = [GroupShape(window, count + 1) for window, count in zip((None, 6), counts, strict=False)]
    wanted = {"budget": 32, "running": 8, "length": 400} | limits
    return Scheduler(Limits(**wanted), BlockManager(SIZE, groups))  # type: ignore[arg-type]


def request(name: str, prompt: int, tokens: int = 8, **more: object) -> Request:
    start = sum(map(ord, name))
    return Request(name, tuple(range(start, start + prompt)), SamplingParams(max_tokens=tokens, seed=0, **more))  # type: ignore[arg-type]


def land(engine: Scheduler, rows: list[Row], accepted: int = 0) -> list[Landed]:
    """As if the model had said 1000, 1001, ... and each row with room had `accepted` drafts right."""
    said = []
    for row in rows:
        count = (1 + (min(accepted, row.room, row.depth) if row.room else 0)) if row.draws else 0
        first = 1000 + row.sequence.output_len
        said.append(Emitted(list(range(first, first + count)), drafted=row.room))
    return engine.commit(rows, said)


def shape(rows: list[Row]) -> list[tuple[str, int, int, bool]]:
    return [(r.sequence.request.id, r.start, r.count, r.draws) for r in rows]


def test_a_prompt_longer_than_the_budget_comes_in_chunks_and_the_young_get_what_is_left() -> None:
    engine = scheduler()
    engine.add(request("a", 70))
    engine.add(request("b", 5))
    seen = []
    for _ in range(5):
        rows, copies = engine.schedule()
        assert not copies
        assert sum(r.count for r in rows) <= 32
        seen.append(shape(rows))
        land(engine, rows)
    assert seen == [
        [("a", 0, 32, False)],
        [("a", 32, 32, False)],
        [("a", 64, 6, True), ("b", 0, 5, True)],
        [("a", 70, 1, True), ("b", 5, 1, True)],
        [("a", 71, 1, True), ("b", 6, 1, True)],
    ]


def test_each_that_runs_keeps_a_right_to_one_token() -> None:
    engine = scheduler(budget=8, running=4)
    young = [engine.add(request(name, 3))[0] for name in "bcd"]
    rows, _ = engine.schedule()
    land(engine, rows)
    rows, _ = engine.schedule()
    land(engine, rows)
    engine.add(Request("old", tuple(range(60)), SamplingParams(max_tokens=2, seed=0), priority=-1))
    rows, _ = engine.schedule()
    assert shape(rows)[-1] == ("old", 0, 5, False)
    land(engine, rows)
    rows, _ = engine.schedule()
    assert shape(rows)[0] == ("old", 5, 5, False), "it is older than they are, by its priority, and leaves each one"
    assert [r.count for r in rows[1:]] == [1, 1, 1]
    assert [s.output_len for s in young] == [3, 3, 2]


def test_only_younger_ones_are_preempted_and_none_that_fly() -> None:
    engine = scheduler(blocks=6)
    a, b, c = (engine.add(request(name, 7, 12))[0] for name in "abc")
    rows, _ = engine.schedule()
    assert [r.sequence for r in rows] == [a, b], "a block stays free for each that runs"
    land(engine, rows)
    while not engine.preemptions:
        rows, _ = engine.schedule()
        land(engine, rows)
    assert (a.preemptions, b.preemptions, c.preemptions) == (0, 1, 0)
    assert engine.waiting == [b, c]
    assert b.computed == 0
    assert len(b.tokens) > 7, "its text is kept"
    assert [r.sequence for r in rows] == [a]
    engine.abort(a)
    rows, _ = engine.schedule()
    assert rows[0].sequence is b
    assert (rows[0].start, rows[0].count) == (8, len(b.tokens) - 8), "its first blocks were still published"
    assert b.cached == 0, "what it finds of its own is no prefix hit"


def test_a_row_in_flight_is_never_preempted() -> None:
    engine = scheduler(blocks=5, budget=8, running=2)
    old = engine.add(Request("old", tuple(range(12)), SamplingParams(max_tokens=8, seed=0), priority=-1))[0]
    rows, _ = engine.schedule()
    young = engine.add(request("young", 6))[0]
    flying, _ = engine.schedule()
    assert [r.sequence for r in flying] == [young]
    land(engine, rows)
    while old.output_len < 4:
        rows, _ = engine.schedule()
        if not rows:
            break
        land(engine, rows)
    assert young.flying is flying[0]
    assert engine.preemptions == 0
    land(engine, flying)
    for _ in range(30):
        rows, _ = engine.schedule()
        land(engine, rows)
    assert old.finish == young.finish == "length"
    assert engine.preemptions >= 1


def test_siblings_are_born_one_token_before_the_prompts_end() -> None:
    engine = scheduler()
    siblings = engine.add(request("n", 10, n=3))
    rows, _ = engine.schedule()
    assert shape(rows) == [("n", 0, 9, False)]
    land(engine, rows)
    rows, copies = engine.schedule()
    assert [r.sequence for r in rows] == siblings
    assert shape(rows) == [("n", 9, 1, True)] * 3
    assert len(copies) == 2, "the last one has the shared block for itself"
    land(engine, rows)
    again = engine.add(Request("n2", siblings[0].request.prompt[:9], SamplingParams(max_tokens=2, seed=0, n=3)))
    rows, copies = engine.schedule()
    assert [(r.sequence.sibling, r.start, r.count) for r in rows if r.sequence in again] == [(0, 8, 1)], (
        "all but one hit"
    )
    assert len(engine.running) == 6
    for s in (*siblings, *again):
        engine.abort(s)
    land(engine, rows)
    engine.blocks.check()


def test_drafts_are_granted_after_all_known_tokens_and_only_to_rows_of_one() -> None:
    engine = scheduler(budget=12, draft_tokens=5, draft_slots=9)
    a = engine.add(request("a", 4, 9))[0]
    land(engine, engine.schedule()[0])
    rows, _ = engine.schedule()
    assert (rows[0].room, rows[0].depth) == (5, 7), "8 more tokens: 7 drafts and what follows them"
    assert len(a.tables[0]) == -(-(4 + 1 + 9) // SIZE), "as many slots as the drafter writes"
    land(engine, rows, accepted=5)
    assert (len(a.tokens), a.computed, a.accepted, a.drafted) == (4 + 1 + 6, 10, 5, 5)
    assert len(a.tables[0]) == 3, "what drafts did not use is given back"
    engine.add(request("b", 30))
    rows, _ = engine.schedule()
    assert [(r.count, r.room) for r in rows] == [(1, 0), (11, 0)]
    land(engine, rows)
    assert a.output_len == 8
    rows, _ = engine.schedule()
    assert rows[0].room == 0, "one token is left: nothing to draft"
    land(engine, rows)
    assert a.finish == "length"


def test_drafts_never_cost_anybody_a_block() -> None:
    engine = scheduler(blocks=5, draft_tokens=6)
    a, b = (engine.add(request(name, 6, 8))[0] for name in "ab")
    land(engine, engine.schedule()[0])
    while not (a.finish and b.finish):
        rows, _ = engine.schedule()
        for row in rows:
            assert len(row.sequence.tables[0]) * SIZE >= row.start + row.count + row.room
        land(engine, rows, accepted=6)
        engine.blocks.check(s for s in (a, b) if not s.finish)
    assert engine.preemptions <= 1


def test_overlap_follows_a_row_in_flight_without_knowing_its_end() -> None:
    engine = scheduler(overlap=True, draft_tokens=3)
    a = engine.add(request("a", 6, 20))[0]
    first, _ = engine.schedule()
    second, _ = engine.schedule()
    assert shape(second) == [("a", 6, 1, True)]
    assert second[0].after is first[0]
    assert (second[0].room, second[0].depth) == (3, 18)
    land(engine, first)
    third, _ = engine.schedule()
    assert third[0].after is second[0]
    assert third[0].start == 7, "at least: from what is computed, not from a guess"
    assert len(a.tables[0]) * SIZE >= 7 + 3 + 1 + 3, "and slots for the drafts of both"
    land(engine, second, accepted=3)
    assert a.computed == 6 + 4
    land(engine, third)
    engine.abort(a)


def test_overlap_stops_where_the_end_is_certain() -> None:
    engine = scheduler(overlap=True)
    a = engine.add(request("a", 6, 2))[0]
    rows = [engine.schedule()[0] for _ in range(2)]
    assert [len(r) for r in rows] == [1, 1]
    land(engine, rows[0])
    assert engine.schedule()[0] == [], "the token in flight is the last; nothing can follow it"
    land(engine, rows[1])
    assert a.finish == "length"


def test_a_host_drafter_gets_no_room_behind_a_row_in_flight() -> None:
    for host in (False, True):
        engine = scheduler(overlap=True, draft_tokens=3, host_drafter=host)
        engine.add(request("a", 6, 20))
        engine.schedule()
        assert bool(engine.schedule()[0][0].room) != host


def test_text_is_taken_token_by_token() -> None:
    sequence = Sequence(
        Request("x", (1,), SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(9,), seed=0)), 0, 0, [1]
    )
    assert take(sequence, Emitted([9, 9, 9, 9, 4])) == 4, "no stop within min_tokens; nothing after a stop was said"
    assert (sequence.finish, sequence.stopped_by, sequence.output) == ("stop", 9, [9, 9, 9, 9])
    assert sequence.accepted == 4
    other = Sequence(sequence.request, 0, 0, [1])
    assert take(other, Emitted([1, 2, 3, 4, 5, 6, 7])) == 6
    assert (other.finish, other.output_len) == ("length", 6)
    both = Sequence(sequence.request, 0, 0, [1])
    take(both, Emitted([1, 2, 3, 4, 5, 9]))
    assert both.finish == "stop", "the last token allowed is a stop: that is why it ends"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("overlap", [False, True])
def test_random_traffic_ends_and_leaves_the_pool_whole(seed: int, overlap: bool) -> None:
    """Arrivals, aborts, forks, drafts, small pools, several steps in flight: all that was not aborted is complete."""
    rng = random.Random(seed)
    tight = rng.choice([13, 20, (14, 5), (30, 9)])
    engine = scheduler(
        tight, budget=rng.choice([6, 17, 64]), running=6, overlap=overlap, draft_tokens=rng.choice([0, 3])
    )
    made: list[Sequence] = []
    flights: list[list[Row]] = []
    for step in range(3000):
        if step < 120 and rng.random() < 0.3:
            n = rng.choice([1, 1, 1, 3])
            made += engine.add(request(f"r{rng.randrange(5)}", rng.randrange(1, 30), rng.randrange(1, 16), n=n))
        if step < 120 and made and rng.random() < 0.1:
            engine.abort(rng.choice(made))
        most = 1 if overlap else 2
        if len(flights) <= most and (rows := engine.schedule()[0]):
            known = {id(r.sequence) for flight in flights for r in flight}
            assert overlap or not known & {id(r.sequence) for r in rows}, "a sequence is in one flight at a time"
            assert sum(r.count + r.room for r in rows) <= engine.limits.budget
            assert all(r.sequence.flying is r for r in rows)
            flights.append(rows)
            if len(flights) <= most and rng.random() < 0.7:
                continue
        if flights:
            land(engine, flights.pop(0), accepted=rng.randrange(4))
        engine.blocks.check(s for s in made if not s.finish)
        assert len(engine.running) <= 6
        if step >= 120 and all(s.finish for s in made) and not flights:
            break
    assert all(s.finish for s in made), "something never ended"
    assert all(s.output_len == s.request.max_tokens for s in made if s.finish == "length")
    assert sum(s.finish == "length" for s in made) > 10
    engine.blocks.check()
    assert all(len(pool.free) == pool.count - 1 for pool in engine.blocks.pools)
