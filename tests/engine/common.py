"""Tiny models, an engine that remembers what it computed, requests of every kind, and a naive model to compare with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from letters import Letters
from torch import Tensor

from llmx.cache.pools import windows_of
from llmx.core import Landed, Logprob, Request, SamplingParams
from llmx.core import Sequence as Text
from llmx.engine.engine import Decided, Engine, Launched
from llmx.kernels import Kernels
from llmx.layers.rope import RopeConfig
from llmx.loading import RandomWeights
from llmx.models.llama import Config, Model
from llmx.scheduler import Limits
from llmx.speculative.base import Drafter

CPU = torch.device("cpu")
VOCAB, HIDDEN, INNER, LENGTH, SIZE = 96, 36, 50, 768, 8  # widths that no vector register divides
STD = 0.3  # large enough that texts vary and the likeliest token is not always the same
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "window": (9,),
    "windows": (9, 160),
    "mixed": (9, None),
    "native": (70, None),  # with the kernels of this machine, whose tiles are narrower than what is asked for
}
KINDS = [(name, dtype) for name in WINDOWS for dtype in (torch.float32, torch.bfloat16)]
KINDS += [("mixed", torch.int8), ("native", torch.float32), ("native", torch.int8)]
KINDS.remove(("windows", torch.bfloat16))  # that the dtype doesn't matter to groups, the others show


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """A model's dtype, by that of its keys and values."""
    return dtype if dtype.is_floating_point else torch.float32


@cache
def model(windows: str = "full", dtype: torch.dtype = torch.float32) -> Model:
    config = Config(
        vocab=VOCAB, hidden=HIDDEN, layers=3, heads=6, kv_heads=2, head_dim=8, inner=INNER, max_position=LENGTH,
        eps=1e-5, rope=RopeConfig(500.0, 8), windows=WINDOWS[windows],
    )  # fmt: skip
    return build_model(config, computed_in(dtype), None if windows == "native" else "reference")


def build_model(config: Config, dtype: torch.dtype = torch.float32, backend: str | None = "reference") -> Model:
    kernels = Kernels("cpu", backend)
    return Model(config, RandomWeights(2, dtype, CPU, kernels, std=STD), kernels, length=LENGTH, device=CPU)


Key = tuple[str, int]  # request, choice


class Watched(Engine):
    """An engine that keeps the hidden state of every position it verified, and all that landed."""

    def __init__(self, of: Model, **options: Any) -> None:
        super().__init__(of, **options)
        self.hidden: dict[tuple[Key, int], Tensor] = {}
        self.recomputed = 0  # positions computed again: preempted ones
        self.rows: list[int] = []  # of each step
        self.tokens: list[int] = []
        self.logprobs: dict[Key, list[Logprob]] = {}
        self.prompt_logprobs: dict[str, dict[int, Logprob]] = {}
        self.chunks: dict[Key, int] = {}  # rows that drew nothing

    def launch(self, before: Decided | None = None) -> Launched | None:
        launched = super().launch(before)
        if launched:
            self.rows.append(len(launched.rows))
            self.tokens.append(len(launched.batch.tokens))
        return launched

    @torch.inference_mode()
    def decide(self, step: Launched) -> Decided:
        decided = super().decide(step)
        batch, kept = step.batch, decided.verdict.kept
        owners, positions = batch.sequence.tolist(), batch.positions.tolist()
        for t in kept.mask.nonzero().flatten().tolist():
            row = step.rows[owners[t]]
            place = (key_of(row.sequence), positions[t])
            if not row.sequence.finish:  # what is in flight behind a finished text may hold any token
                if place in self.hidden:
                    self.recomputed += 1
                    assert torch.equal(self.hidden[place], step.hidden[t]), f"{place} computed twice, not to the same"
                self.hidden[place] = step.hidden[t].clone()
        for row in step.rows:
            self.chunks[key_of(row.sequence)] = self.chunks.get(key_of(row.sequence), 0) + (not row.draws)
        return decided

    def land(self, step: Decided) -> list[Landed]:
        landed = super().land(step)
        for item in landed:
            self.logprobs.setdefault(key_of(item.sequence), []).extend(item.logprobs or ())
            self.prompt_logprobs.setdefault(item.sequence.request.id, {}).update(item.prompt_logprobs)
        return landed

    @property
    def whole(self) -> bool:
        return all(len(pool.free) == pool.count - 1 for pool in self.scheduler.blocks.pools)

    def run(self, requests: Sequence[Request], steps: int = 20000) -> list[Text]:
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        sequences = [s for r in requests for s in self.add(r)]
        while any(s.finish is None for s in sequences) or self.flight:
            assert self.step() is not None, "the scheduler stands still"
            steps -= 1
            assert steps, "it never ends"
        return sequences


MADE: list[Watched] = []  # the pool of each must be whole when its test ends: see conftest.py


def engine(
    windows: str = "full",
    dtype: torch.dtype = torch.float32,
    *,
    drafter: Drafter | None = None,
    blocks: int | Sequence[int] = 400,
    size: int = SIZE,
    prefix_caching: bool = True,
    of: Model | None = None,
    watermark: bool = True,
    **limits: Any,
) -> Watched:
    """`blocks`: of every KV group, or per group. Without a watermark preemptions are many."""
    built = of or model(windows, dtype)
    groups = len(windows_of([*built.config.specs(), *(drafter.needs.layers if drafter else ())]))
    counts = [blocks] * groups if isinstance(blocks, int) else list(blocks)
    made = Watched(
        built,
        drafter=drafter,
        limits=Limits(**({"budget": 800, "running": 32, "length": LENGTH} | limits)),
        blocks=counts,
        size=size,
        kv_dtype=dtype,
        device=CPU,
        prefix_caching=prefix_caching,
        poison=True,
        tokenizer=Letters,  # type: ignore[arg-type]
    )
    if not watermark:
        made.scheduler.blocks.least_free = lambda: LENGTH  # type: ignore[method-assign]
    MADE.append(made)
    return made


def key_of(sequence: Text) -> Key:
    return sequence.request.id, sequence.sibling


@dataclass(frozen=True)
class Said:
    """What a run gave for one choice: everything that may not depend on how it was run."""

    tokens: tuple[int, ...]
    finish: str | None
    stopped_by: int | None
    logprobs: tuple[Logprob, ...]
    prompt_logprobs: tuple[tuple[int, Logprob], ...]


def said(run: Watched, sequence: Text) -> Said:
    key = key_of(sequence)
    scores = tuple(sorted(run.prompt_logprobs.get(sequence.request.id, {}).items()))
    return Said(tuple(sequence.output), sequence.finish, sequence.stopped_by, tuple(run.logprobs.get(key, ())), scores)


@dataclass(frozen=True)
class Truth:
    """A request alone, in an engine of its own, its prompt in one piece."""

    said: dict[Key, Said]
    hidden: dict[tuple[Key, int], Tensor]

    def output(self) -> dict[Key, tuple[int, ...]]:
        return {key: s.tokens for key, s in self.said.items()}


@cache
def truth(windows: str, dtype: torch.dtype, requests: tuple[Request, ...]) -> Truth:
    found: dict[Key, Said] = {}
    hidden: dict[tuple[Key, int], Tensor] = {}
    for request in requests:
        alone = engine(windows, dtype, prefix_caching=False)
        for sequence in alone.run([request]):
            found[key_of(sequence)] = said(alone, sequence)
        hidden |= alone.hidden
    return Truth(found, hidden)


def expect(run: Watched, sequences: Iterable[Text], want: Truth) -> int:
    """Equal texts, finishes, scores and, bit for bit, hidden states; how many of those."""
    compared = 0
    for sequence in sequences:
        key = key_of(sequence)
        assert said(run, sequence) == want.said[key], key
        for position in range(len(sequence.tokens) - 1):
            if (found := run.hidden.get((key, position))) is not None and (key, position) in want.hidden:
                assert torch.equal(found, want.hidden[key, position]), (key, position)
                compared += 1
    return compared


STOPS = tuple(range(2, VOCAB, 5))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(),
    "hot": SamplingParams(temperature=1.8),
    "top_p": SamplingParams(temperature=1.3, top_p=0.7),
    "top_k": SamplingParams(temperature=1.1, top_k=12, top_p=0.95, min_p=0.01),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5),
    "penalties_sampled": SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.7),
    "bias": SamplingParams(logit_bias=((3, 2.0), (5, -100.0))),
    "stop": SamplingParams(temperature=0.9, stop_token_ids=STOPS),
    "min_tokens": SamplingParams(temperature=0.9, stop_token_ids=STOPS, min_tokens=6),
    "logprobs": SamplingParams(logprobs=3, prompt_logprobs=2),
    "greedy_logprobs": SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0),
    "choices": SamplingParams(temperature=1.2, n=3),
    **{f"max_{n}": SamplingParams(temperature=0.0) for n in range(1, 12)},
}


@cache
def requests(tokens: int = 16, seed: int = 0) -> tuple[Request, ...]:
    """Every kind once, prompts of 1 to 40 tokens, and three of 130 to 310 that cross key tiles. 27, for 29 texts."""
    rng, made = random.Random(seed), []

    def prompt(length: int) -> tuple[int, ...]:
        motif = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 14))]
        return tuple((motif * length)[:length])

    for i, (name, params) in enumerate(PARAMS.items()):
        most = int(name[4:]) if name.startswith("max_") else tokens
        made.append(Request(name, prompt(rng.choice([1, 3, 8, 9, 17, 40])), replace(params, seed=i, max_tokens=most)))
    for name, length in (("greedy", 131), ("seeded", 310), ("choices", 125)):
        params = replace(PARAMS[name], seed=99, max_tokens=tokens)
        made.append(Request(f"long_{name}", prompt(length), params))
    return tuple(made)


def few() -> tuple[Request, ...]:
    """For the slowest schedules: some of `requests()`."""
    wanted = ("greedy", "penalties_sampled", "stop", "long_greedy")
    return tuple(r for r in requests() if r.id in wanted)


def naive(of: Model, tokens: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """(T, vocab) logits, and taps: the input of each layer and, at -1, what the head gets. In float64, without a cache.

    Weights are read from the layers; all the arithmetic is written out here.
    """
    config = of.config

    def weight(linear: Any) -> Tensor:
        return torch.cat([plain(segment, linear.n_in) for segment in linear.segments])

    def plain(segment: Any, n_in: int) -> Tensor:
        ((layout, held),) = segment.tensors.items()
        if layout != "weight":  # as the C++ kernels have it
            held = of.kernels.get("unpack_linear")(held, layout, segment.n_out, n_in)
        return held.double()

    def norm(x: Tensor, by: Any) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.eps).sqrt() * by.weight.double()

    def turn(x: Tensor) -> Tensor:  # as complex numbers: dimension i and i + half are one
        half = config.head_dim // 2
        angle = torch.arange(len(x)).double()[:, None] * config.rope.theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = of.embedding(torch.tensor(tokens)).double()
    taps = {}
    gap = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    for i, (layer, spec) in enumerate(zip(of.layers, config.specs(), strict=True)):
        taps[i] = x
        fused = (norm(x, layer.before_attention) @ weight(layer.attention.qkv).T).unflatten(-1, (-1, config.head_dim))
        q, k, v = fused.split([config.heads, config.kv_heads, config.kv_heads], 1)
        shared = config.heads // config.kv_heads
        q, k, v = turn(q), turn(k).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        seen = (gap >= 0) & (gap < (spec.window or len(tokens)))
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ weight(layer.attention.out).T
        gate, up = (norm(x, layer.before_mlp) @ weight(layer.mlp.gate_up).T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ weight(layer.mlp.down).T
    taps[-1] = norm(x, of.final)
    return taps[-1] @ weight(of.output).T, taps
