"""Refusals, aborts in every state, several steps in flight, padding, and trees as paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.common import (
    CPU,
    SIZE,
    VOCAB,
    Watched,
    build_model,
    engine,
    expect,
    key_of,
    model,
    requests,
    truth,
)
from engine.drafters import Replay

from llmx.batch import Drafts, build, pad, tips_of
from llmx.core import Request, Row, SamplingParams
from llmx.core import Sequence as Text
from llmx.engine.engine import Decided
from llmx.errors import RequestError, UsageError

F32 = torch.float32
PARAMS = SamplingParams(max_tokens=20, seed=1, temperature=1.0)


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match="31 tokens need 4 KV blocks; the cache has 3"):
        engine(blocks=4).run([Request("big", (1,) * 11, PARAMS)])
    run = engine(blocks=5)
    run.run([Request("just", (1,) * 13, PARAMS)])  # the last token's KV is never written: 32 slots
    with pytest.raises(RequestError, match="34 tokens need 5 KV blocks; the cache has 4"):
        run.run([Request("over", (1,) * 14, PARAMS)])
    with pytest.raises(
        RequestError, match="12 prompt tokens and max_tokens 20 are 32 tokens, more than the context of 31"
    ):
        engine(length=31).run([Request("long", (1,) * 12, PARAMS)])
    engine(length=32).run([Request("fits", (1,) * 12, PARAMS)])
    with pytest.raises(RequestError, match="n=5 is more than the 4 sequences"):
        engine(running=4).run([Request("many", (1,), replace(PARAMS, n=5))])
    with pytest.raises(RequestError, match="prompt is empty"):
        engine().run([Request("none", (), PARAMS)])
    with pytest.raises(UsageError, match="9 sequences at once need a step budget of as many tokens, not 8"):
        engine(budget=8, running=9)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_window_group_may_be_smaller_than_the_text(overlap: bool) -> None:
    """Its windows move on as chunks land: the chunks get as short as the group makes them."""
    wanted = [r for r in requests() if r.id == "long_greedy"]
    for windows, blocks in (("window", 3), ("mixed", (60, 6)), ("windows", (7, 23))):
        run = engine(windows, blocks=blocks, overlap=overlap)
        sequences = run.run(wanted)
        expect(run, sequences, truth(windows, F32, requests()))
        small = min(pool.count for pool in run.scheduler.blocks.pools) - 1
        assert max(run.tokens) <= small * SIZE < len(wanted[0].prompt)
        assert run.chunks["long_greedy", 0] > 2
    with pytest.raises(RequestError, match="need 2 KV blocks; the cache has 1"):
        engine("window", blocks=2).run(wanted)


def _steps(run: Watched, count: int) -> None:
    for _ in range(count):
        assert run.step() is not None


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("overlap", "kind"), [(False, "none"), (True, "tree")])
def test_abort_in_every_state(overlap: bool, steps: int, kind: str) -> None:
    """Waiting, in a chunk, before siblings are born, while they run, in flight: the others don't notice."""
    want = truth("mixed", F32, requests())
    drafter = Replay(want.output(), siblings=2, host=False) if kind == "tree" else None
    names = ("choices", "long_choices", "greedy", "seeded", "long_seeded", "stop")
    wanted = [r for r in requests() if r.id in names]
    for victims in ({("choices", 0), ("long_choices", 0)}, {("long_choices", 0), ("long_choices", 1)}, {("seeded", 0)}):
        run = engine("mixed", drafter=drafter, overlap=overlap, budget=70, running=8)
        sequences = [s for r in wanted for s in run.scheduler.add(r)]
        _steps(run, steps)
        ended = {key_of(s) for s in sequences if s.finish}
        for s in sequences:
            if key_of(s) in victims:
                run.scheduler.abort(s)
                run.scheduler.abort(s)  # a second time does nothing
        while any(s.finish is None for s in sequences) or run.flight:
            _steps(run, 1)
        expect(run, [s for s in sequences if key_of(s) not in victims - ended], want)
        for s in sequences:
            assert (s.finish == "abort") == (key_of(s) in victims - ended)
            if s.finish == "abort":
                assert tuple(s.output) == want.said[key_of(s)].tokens[: len(s.output)]


def test_all_choices_can_be_aborted_before_they_are_born() -> None:
    run = engine(budget=16, running=4)
    sequences = run.scheduler.add(Request("n", tuple(range(60)), replace(PARAMS, n=4)))
    _steps(run, 2)
    assert not sequences[1].tables
    for s in sequences:
        run.scheduler.abort(s)
    assert run.step() is None


def test_prompt_logprobs_come_though_the_first_choice_is_aborted() -> None:
    request = Request("n", tuple(range(40)), replace(PARAMS, n=2, prompt_logprobs=0))
    want = engine()
    want.run([request])
    run = engine(budget=16, running=4)
    first, second = run.scheduler.add(request)
    _steps(run, 1)
    run.scheduler.abort(first)
    while second.finish is None:
        _steps(run, 1)
    assert run.prompt_logprobs["n"] == want.prompt_logprobs["n"]
    assert len(want.prompt_logprobs["n"]) == 39


def test_siblings_share_their_prompt() -> None:
    run = engine()
    sequences = run.scheduler.add(Request("n", tuple(range(2 * SIZE + 1)), replace(PARAMS, n=4)))
    _steps(run, 2)
    assert all(s.output_len == 1 for s in sequences)
    assert run.scheduler.blocks.pools[0].held == 2 + 4  # the two whole blocks once; the rest is each one's own
    for s in sequences:
        run.scheduler.abort(s)


@pytest.mark.parametrize("windows", ["full", "mixed"])
@pytest.mark.parametrize("kind", ["none", "chain", "tree"])
def test_three_steps_in_flight(windows: str, kind: str) -> None:
    """As in a pipeline: three launches, on sequences that no other flight has, before the first one lands."""
    want = truth(windows, F32, requests())
    drafter = None if kind == "none" else Replay(want.output(), siblings=2 * (kind == "tree"))
    for blocks in (400, 60) if kind == "tree" else (60,):
        run = engine(windows, drafter=drafter, blocks=blocks, budget=24, running=8)
        sequences = [s for r in requests() for s in run.scheduler.add(r)]
        flights: list[Decided] = []
        most = 0
        while any(s.finish is None for s in sequences):
            if len(flights) < 3 and (launched := run.launch()):
                flights.append(run.decide(launched))
                aloft = [id(row.sequence) for flight in flights for row in flight.rows]
                assert len(aloft) == len(set(aloft))
                most = max(most, len(flights))
                continue
            run.land(flights.pop(0))
        for flight in flights:
            run.land(flight)
        assert most == 3
        expect(run, sequences, want)


def test_admission_keeps_a_block_for_each_that_runs() -> None:
    """The watermark: eight texts that fit, but not all grown, are not admitted just to be thrown out again."""
    texts = [Request(str(i), tuple(range(i, i + 3 * SIZE - 2)), replace(PARAMS, max_tokens=40)) for i in range(8)]
    run = engine(blocks=30)
    sequences = run.run(texts)
    assert max(run.rows) >= 3
    assert run.scheduler.preemptions <= 4
    assert sum(run.tokens) < 1.4 * sum(len(s.tokens) for s in sequences)


def test_the_old_go_first_and_all_get_on() -> None:
    run = engine(budget=6, running=6)
    old = run.scheduler.add(Request("old", tuple(range(8)), PARAMS))[0]
    _steps(run, 2)
    young = [run.scheduler.add(Request(f"young{i}", (i,) * 40, PARAMS))[0] for i in range(5)]
    _steps(run, 1)
    assert old.output_len == 2
    for step in range(10):
        _steps(run, 1)
        assert old.output_len == 3 + step, "decodes while others' prompts are computed"
        assert run.tokens[-1] == 6
    while any(s.finish is None for s in (old, *young)):
        _steps(run, 1)


def test_priority_goes_before_arrival() -> None:
    run = engine(budget=8, running=1)
    late = run.scheduler.add(Request("late", (1, 2), PARAMS, priority=1))[0]
    soon = run.scheduler.add(Request("soon", (1, 2), PARAMS, priority=0))[0]
    _steps(run, 1)
    assert (late.output_len, soon.output_len) == (0, 1)
    for s in (late, soon):
        run.scheduler.abort(s)


def rows_of(run: Watched, texts: list[tuple[int, int]], room: int) -> list[Row]:
    """One row per (length, drafts): the prompt is computed but for its last token where there are drafts."""
    made = []
    for i, (length, drafts) in enumerate(texts):
        tokens = [(7 * i + 3 * j) % 90 for j in range(length)]
        s = Text(Request(str(i), tuple(tokens), PARAMS), 0, i, tokens)
        run.scheduler.blocks.reserve(s, length + room)
        made.append(Row(s, 0, length, True, drafts))
    return made


TREES = {
    "tree": [([1, 2, 3], [-1, -1, 0]), ([], []), ([4], [-1])],
    "chain": [([1, 2, 3], [-1, 0, 1]), ([], []), ([4], [-1])],
}


@pytest.mark.parametrize("windows", ["full", "window", "mixed"])
@pytest.mark.parametrize("kind", list(TREES))
@pytest.mark.parametrize("more", [(0, 0), (1, 1), (9, 2), (40, 5)])
def test_a_padded_batch_gives_equal_bits(windows: str, kind: str, more: tuple[int, int]) -> None:
    """A captured graph's fixed shapes: real rows' results don't change, and nobody's slots are written."""
    run, of = engine(windows), model(windows)
    rows = rows_of(run, [(9, 3), (5, 0), (140, 1)], 6)
    batch = build(tips_of(rows, SIZE, CPU), Drafts.trees(TREES[kind], CPU))
    plain = of.forward(batch, run.cache)[0]
    before = [pool.clone() for pool in (*run.cache.keys, *run.cache.values)]
    padded = pad(batch, len(batch.tokens) + more[0], 3 + more[1])
    assert len(padded.tokens) == len(batch.tokens) + more[0]
    again = of.forward(padded, run.cache)[0]
    assert torch.equal(again[: len(plain)], plain)
    assert not again.isnan().any()
    for old, new in zip(before, (*run.cache.keys, *run.cache.values), strict=True):
        assert torch.equal(old[:, 1:].nan_to_num(7), new[:, 1:].nan_to_num(7))
    for row in rows:
        run.scheduler.blocks.release(row.sequence)


@pytest.mark.parametrize("windows", ["full", "window", "windows", "mixed"])
@pytest.mark.parametrize("length", [1, 11, 125, 260])
def test_tree_attention_is_attention_over_the_path(windows: str, length: int) -> None:
    """Bit for bit, with a window and over a tile's edge too: ancestors stand where they would stand in plain text."""
    tokens, parents = [3, 4, 5, 6, 7, 8, 9, 10], [-1, -1, 0, 1, 3, 4, 5, 4]
    of, run = model(windows), engine(windows)
    rows = rows_of(run, [(length, 8)], 8)
    tips = tips_of(rows, SIZE, CPU)
    hidden = of.forward(build(tips, Drafts.trees([(tokens, parents)], CPU)), run.cache)[0]
    for path in ([1, 3, 4, 5, 6], [1, 3, 4, 7], [0, 2]):
        chain = [tokens[node] for node in path]
        straight = of.forward(build(tips, Drafts.chains([chain], CPU)), run.cache)[0]
        assert torch.equal(hidden[[length + node for node in path]], straight[length:])
        plain = engine(windows)
        text = [*rows[0].sequence.tokens, *chain]
        whole = Text(Request("p", tuple(text), PARAMS), 0, 0, text)
        plain.scheduler.blocks.reserve(whole, len(text))
        alone = of.forward(
            build(tips_of([Row(whole, 0, len(text), True)], SIZE, CPU), Drafts.none(1, CPU)), plain.cache
        )
        assert torch.equal(alone[0][length:], straight[length:])
        plain.scheduler.blocks.release(whole)
    run.scheduler.blocks.release(rows[0].sequence)


@pytest.mark.parametrize(("heads", "chunks"), [(1, (5, 6, 7)), (3, (2, 3))])
def test_rows_do_not_see_their_neighbours_when_torch_has_two_threads(heads: int, chunks: tuple[int, ...]) -> None:
    """With one key-value head torch splits the rows of a product among its threads: 5 to 9 of them here."""
    of = build_model(replace(model("full").config, heads=heads, kv_heads=1))
    request, found = Request("x", tuple((5 * i + i * i) % VOCAB for i in range(14)), replace(PARAMS, max_tokens=1)), []
    for threads, chunk in ((1, 14), *((2, n) for n in chunks)):
        torch.set_num_threads(threads)
        run = engine(of=of, budget=chunk, running=1)
        run.run([request])
        found.append(torch.stack([run.hidden[("x", 0), p] for p in range(14)]))
        assert torch.equal(found[0], found[-1]), (threads, chunk)
