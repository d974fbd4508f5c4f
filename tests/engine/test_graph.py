"""Forwards that are recorded and replayed give the bits of those that are not, whatever the batch."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine.common import (
    CPU,
    KINDS,
    LENGTH,
    SIZE,
    STD,
    VOCAB,
    Truth,
    Watched,
    computed_in,
    engine,
    expect,
    few,
    key_of,
    requests,
    said,
)
from engine.common import model as reference_model
from engine.drafters import Replay
from tiny_models import every_tiny

from llmx.batch import Batch, Drafts, tips_of
from llmx.batch import build as build_batch
from llmx.core import Request, Row, SamplingParams
from llmx.engine import graph
from llmx.engine.graph import Graphs
from llmx.engine.steady import Steady, SteadyStep
from llmx.formats.fields import Fields
from llmx.kernels import Kernels, cpu
from llmx.loading import RandomWeights
from llmx.models.llama import Model
from llmx.sampler import Points, draw
from llmx.speculative.base import Needs, NoDrafter

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
each_model = pytest.mark.parametrize(("windows", "dtype"), KINDS, ids=[f"{n}-{str(d)[6:]}" for n, d in KINDS])


class Compared(Graphs):
    """Each forward once more without a graph: it writes the same to the cache, and must give the same."""

    compared = 0

    def __init__(self, model: Any, cache: Any, rows: int) -> None:
        super().__init__(model, cache, rows)
        self.shapes: set[tuple[int, int]] = set()  # tokens and rows of what was compared

    def forward(self, batch: Batch, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.replays
        found = super().forward(batch, taps)
        if self.replays > before:
            written = [pool.clone() for pool in (*self.cache.keys, *self.cache.values)]
            for got, want in zip(found, self._eager(batch, taps), strict=True):
                assert torch.equal(got, want)
            for got, want in zip(written, (*self.cache.keys, *self.cache.values), strict=True):
                assert torch.equal(got[:, 1:].isnan(), want[:, 1:].isnan())
                assert torch.equal(got[:, 1:].nan_to_num(), want[:, 1:].nan_to_num())
            self.compared += 1
            self.shapes.add((len(batch.tokens), len(batch.lengths)))
        return found


class ComparedSteady(Steady):
    """Each step once more without a recording."""

    def __init__(self, graphs: Compared, needs: Needs) -> None:
        super().__init__(graphs, needs)
        self.graphs = graphs

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> tuple[SteadyStep, list[int]] | None:
        before = self.runs
        found = super().step(rows)
        if found is not None and self.runs > before:
            step, drawn = found
            model, batch = self.graphs.model, build_batch(tips_of(rows, SIZE, CPU), Drafts.none(len(rows), CPU))
            hidden = step.hidden.clone()
            for name in ("tokens", "positions", "prefix", "base", "start", "sequence", "sample", "lengths", "counts"):
                assert same(getattr(batch, name), getattr(step.batch, name)), name
            assert torch.equal(hidden, self.graphs._eager(batch, ())[0])
            points = Points([row.sequence for row in rows], batch.sample, batch.prefix, batch.node[:, None])
            assert draw(model.head(hidden), points, model.kernels).tokens.tolist() == drawn
            self.graphs.compared += 1
        return found


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@cache
def native(windows: str, dtype: torch.dtype) -> Model:
    """The tests' tiny model on the C++ kernels."""
    return build(Model, reference_model(windows, dtype).config, computed_in(dtype))


def build(of: Any, config: Any, dtype: torch.dtype) -> Any:
    kernels = Kernels("cpu")
    with torch.inference_mode():
        return of(config, RandomWeights(2, dtype, CPU, kernels, std=STD), kernels, length=LENGTH, device=CPU)


def compared(windows: str, dtype: torch.dtype, **options: Any) -> tuple[Watched, Compared]:
    made = engine(windows, dtype, of=native(windows, dtype), **options)
    return made, watch(made)


def watch(run: Watched) -> Compared:
    run.graphs = graphs = Compared(run.model, run.cache, run.scheduler.limits.running)
    run.steady = ComparedSteady(graphs, run.drafter.needs)
    return graphs


@cache
def truth(windows: str, dtype: torch.dtype) -> Truth:
    """Each request alone, and no graphs."""
    found, hidden = {}, {}
    for request in requests():
        alone = engine(windows, dtype, of=native(windows, dtype), prefix_caching=False)
        alone.graphs.recorder = None
        for sequence in alone.run([request]):
            found[key_of(sequence)] = said(alone, sequence)
        hidden |= alone.hidden
    return Truth(found, hidden)


@each_model
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"budget": 24, "running": 8}, {"blocks": 46, "budget": 33, "watermark": False}],
    ids=["batched", "overlapped", "chunked", "preempted"],
)
def test_texts_and_bits_are_those_without_graphs(windows: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    if windows == "window" and "blocks" in options:
        options = options | {"blocks": 10}
    run, graphs = compared(windows, dtype, **options)
    expect(run, run.run(requests()), truth(windows, dtype))
    if "blocks" in options:
        assert run.scheduler.preemptions
    first = graphs.compared
    run.run(requests())  # again: the shapes are known now
    assert graphs.compared > max(first, 4)
    assert not graphs._refused


@each_model
@pytest.mark.parametrize("siblings", [0, 2], ids=["chains", "trees"])
def test_drafts(windows: str, dtype: torch.dtype, siblings: int) -> None:
    want = truth(windows, dtype)
    drafter = Replay(known=want.output(), deep=3 if siblings else 4, siblings=siblings, dead=True, host=False)
    run, graphs = compared(windows, dtype, drafter=drafter, running=6)
    for _ in range(4):
        expect(run, run.run(few()), want)
    assert graphs.compared > 3
    assert any((key[2] is not None) == bool(siblings) for key in graphs._graphs)


def test_one_recording_serves_prompts_and_decodes_however_many_there_are() -> None:
    run, graphs = compared("full", torch.float32, running=12)
    rng = random.Random(2)
    made = [
        Request(str(i), tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))),
                SamplingParams(max_tokens=rng.randrange(1, 20), seed=i))
        for i in range(60)
    ]  # fmt: skip
    run.run(made)
    assert len(graphs.shapes) > 10
    assert any(tokens > rows > 1 for tokens, rows in graphs.shapes), "prompts and decodes in one step"
    assert len(graphs) <= len(graph.ROOMS)


class Taps(NoDrafter):
    """Drafts nothing, and wants hidden states."""

    needs = Needs(taps=(0, 2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_that_a_drafter_asks_for(dtype: torch.dtype) -> None:
    run, graphs = compared("full", dtype, drafter=Taps())
    for _ in range(2):
        expect(run, run.run(few()), truth("full", dtype))
    assert graphs.compared > 5
    assert {key[3] for key in graphs._graphs} == {(0, 2, -1)}


def test_a_text_that_outgrows_its_table_gets_a_wider_graph() -> None:
    run, graphs = compared("mixed", torch.float32, running=2)
    made = [Request(str(i), tuple(range(1, 9 + i)), SamplingParams(max_tokens=300, seed=i)) for i in range(2)]
    run.run(made)
    assert {key[1] for key in run.steady._steps if key[0] == 2} == {16, 32, 64}
    assert graphs.compared > 250


def test_every_count_of_rows_up_to_32() -> None:
    run, graphs = compared("full", torch.float32)
    run.run([Request(str(i), (1 + i, 2, 3), SamplingParams(max_tokens=4 + 4 * i, seed=i)) for i in range(32)])
    assert {key[0] for key in run.steady._steps} >= set(range(1, 33))
    assert graphs.compared > 50


@pytest.mark.parametrize("tiny", every_tiny(), ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_of_every_family_is_recorded(tiny: Any, dtype: torch.dtype) -> None:
    config = tiny.family.Config.from_hf(Fields(tiny.config_json(), "config.json"))
    run = engine(of=build(tiny.family.Model, config, dtype), dtype=dtype)
    graphs = watch(run)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, 150) for _ in range(length)) for length in (40, 7, 3)]
    run.run([Request(str(i), p, SamplingParams(max_tokens=24, temperature=0.0, seed=0)) for i, p in enumerate(prompts)])
    assert not graphs._refused, graphs.recorder.refused if graphs.recorder else None
    assert (run.steady.runs > 15) == (not config.logit_cap)
    assert graphs.compared > 15


@pytest.fixture
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(graph, "MOST_GRAPHS", 4)
    return 4


def test_many_shapes_take_no_more_memory_than_a_few(few_graphs: int) -> None:
    run, graphs = compared("full", torch.float32, running=32)
    assert graphs.recorder is not None

    def serve(seed: int) -> int:
        rng = random.Random(seed)
        made = [
            Request(f"{seed}-{i}", tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))),
                    SamplingParams(max_tokens=rng.randrange(1, 30), seed=i))
            for i in range(32)
        ]  # fmt: skip
        run.run(made)
        assert len(run.steady) == few_graphs
        return int(graphs.recorder.arena.bytes)

    first = [serve(seed) for seed in range(3)][-1]
    assert [serve(seed) for seed in range(3, 6)][-1] <= 1.5 * first


def test_a_forward_with_a_torch_op_runs_without_graphs() -> None:
    of = native("full", torch.float32)
    run, graphs = compared("full", torch.float32)
    layer = of.layers[1]

    class Odd:
        def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
            return layer(x * 2 / 2, step)

    of.layers[1] = Odd()
    try:
        expect(run, run.run(few()), truth("full", torch.float32))
    finally:
        of.layers[1] = layer
    assert graphs._refused == {((), True)}
    assert len(graphs) == graphs.replays == len(run.steady) == run.steady.runs == 0


def test_graphs_are_off_on_request_and_among_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine("full", of=native("full", torch.float32))
    assert run.graphs.recorder is not None
    of = native("full", torch.float32)

    class Two:
        kernels = of.kernels
        group = type("Group", (), {"size": 2})

    assert Graphs(Two(), run.cache).recorder is None
    monkeypatch.setenv("LLMX_GRAPH", "0")
    assert Graphs(of, run.cache).recorder is None
    assert engine("full").graphs.recorder is None, "the reference records nothing"


def test_logits_after_a_replay_do_not_change_with_the_next_one() -> None:
    run = engine("full", of=native("full", torch.float32), drafter=Taps())
    kept = []

    class Keeping(Graphs):
        def forward(self, batch: Batch, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
            found = super().forward(batch, taps)
            kept.append((found[0], found[0].clone()))
            return found

    run.graphs = Keeping(run.model, run.cache)
    run.run([replace(request, id=request.id + "x") for request in few()])
    assert run.graphs.replays > 5
    assert all(torch.equal(now, then) for now, then in kept)


def test_recording_does_not_import_torchs_compiler() -> None:
    """It takes seconds, and the first request would wait for it."""
    program = """
import sys
from llmx import LLM, SamplingParams
with LLM("random:tiny", device="cpu") as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm._client.core.engine.steady.runs > 0
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
