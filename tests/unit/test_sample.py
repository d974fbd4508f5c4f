"""The draw in C++ against the one with tensors, token for token, and the numbers that both are made of."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from llmx.core import Request, SamplingParams, Sequence
from llmx.kernels import Kernels, cpu
from llmx.kernels.reference.sample import WEIGHT, gumbel, weights
from llmx.sampler import Allowed, Draws, Points, draw

NATIVE, REFERENCE = Kernels("cpu", forced="cpu"), Kernels("cpu", forced="reference")
built = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")


def logits_of(rng: random.Random, rows: int, vocab: int) -> Tensor:
    """Rows of several kinds: spread and flat, tied, huge, tiny, with holes."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(rows, vocab, generator=generator)
    for row in x:
        kind = rng.randrange(9)
        row *= [3, 0.05, 10, 3, 1e30, 1e-30, 2, 3, 3][kind]
        if kind == 3:
            row.copy_(row.bfloat16().float())
        elif kind == 6:
            row.copy_(row.round())
        elif kind == 7:
            row[torch.rand(vocab, generator=generator) < 0.9] = -torch.inf
        elif kind == 8:
            row.fill_(-0.0 if rng.random() < 0.5 else 1.5)
            row[vocab // 2 :: 2] = 0.0
    return x


def params_of(rng: random.Random, vocab: int) -> SamplingParams:
    def some(share: float, value: Any, other: Any) -> Any:
        return value if rng.random() < share else other

    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 1.0, 0.7, 0.3, 1.9, 30.0, 1e-4]),
        top_k=some(0.5, rng.choice([1, 2, 5, 40, 100, 700, vocab, 10**6]), 0),
        top_p=some(0.5, rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0 - 1e-7]), 1.0),
        min_p=some(0.3, rng.choice([1e-6, 0.02, 0.1, 0.5, 1.0]), 0.0),
        repetition_penalty=some(0.3, rng.choice([0.5, 1.1, 1.7]), 1.0),
        presence_penalty=some(0.2, rng.choice([-1.0, 0.3, 2.0]), 0.0),
        frequency_penalty=some(0.2, rng.choice([-0.7, 0.1, 1.3]), 0.0),
        logit_bias=some(
            0.2, tuple((rng.randrange(vocab), rng.choice([-100.0, -1.5, 2.0, 50.0])) for _ in range(5)), ()
        ),
        stop_token_ids=tuple(rng.sample(range(vocab), min(vocab - 1, 3))),
        max_tokens=40,
        min_tokens=some(0.3, rng.randrange(20), 0),
        logprobs=some(0.3, rng.randrange(21), None),
        seed=rng.randrange(-(2**63), 2**64),
    )


def case(seed: int, rows: int, vocab: int) -> tuple[Tensor, Points]:
    """Draws of fewer sequences than draws, some behind drafts, some with a grammar."""
    rng = random.Random(seed)
    texts = []
    for i in range(max(1, rows * 2 // 3)):
        params, prompt = params_of(rng, vocab), [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
        request = Request(str(i), tuple(prompt), params, eos=frozenset({rng.randrange(vocab), vocab + 3}))
        said = [rng.randrange(min(vocab, 9)) for _ in range(rng.randrange(30))]
        texts.append(Sequence(request, i % 3, i, prompt + said))
    index = torch.tensor([i % len(texts) for i in range(rows)])
    path = torch.tensor([[rng.randrange(vocab) if rng.random() < 0.3 else -1 for _ in range(4)] for _ in range(rows)])
    at = torch.tensor([len(texts[i].tokens) for i in index.tolist()]) + (path >= 0).sum(-1)
    allowed = None
    if rng.random() < 0.5:
        which = sorted(rng.sample(range(rows), max(1, rows // 4)))
        masks = torch.zeros(len(which), vocab, dtype=torch.bool)
        for mask, row in zip(masks, which, strict=True):
            stops = [t for t in texts[int(index[row])].request.stops if t < vocab]
            mask[stops if stops and rng.random() < 0.3 else rng.sample(range(vocab), 1 + vocab // 2)] = True
        allowed = Allowed(torch.tensor(which), masks)
    return logits_of(rng, rows, vocab), Points(texts, index, at, path, allowed)


def check(got: Draws, want: Draws, points: Points) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    assert (got.logprobs is None) == (want.logprobs is None)
    for row, owner in enumerate(points.index.tolist()):
        wanted = points.sequences[owner].request.params.logprobs
        if wanted is None or got.logprobs is None or want.logprobs is None:
            continue
        assert got.top is not None
        assert want.top is not None
        torch.testing.assert_close(got.logprobs[row], want.logprobs[row], rtol=2e-7, atol=0, equal_nan=True)
        torch.testing.assert_close(
            got.top[0][row, :wanted], want.top[0][row, :wanted], rtol=2e-7, atol=0, equal_nan=True
        )
        assert torch.equal(got.top[1][row, :wanted], want.top[1][row, :wanted])


@built
@pytest.mark.parametrize(
    ("rows", "vocab", "cases"),
    [(1, 1, 5), (1, 2, 20), (3, 15, 40), (8, 64, 40), (33, 65, 20), (12, 1003, 40), (5, 9001, 12), (3, 33000, 5)],
)
def test_the_kernel_draws_what_tensors_draw(isa: str, rows: int, vocab: int, cases: int) -> None:
    assert NATIVE.has("draw")
    assert not REFERENCE.has("draw")
    for seed in range(cases):
        logits, points = case(seed, rows, vocab)
        before = logits.clone()
        check(draw(logits, points, NATIVE), draw(logits, points, REFERENCE), points)
        assert torch.equal(logits, before)


@built
def test_threads_and_neighbours_change_no_bit(isa: str) -> None:
    for seed in range(6):
        logits, points = case(seed, 7, 20011)
        torch.set_num_threads(1)
        want = draw(logits, points, NATIVE)
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            got = draw(logits, points, NATIVE)
            assert torch.equal(got.tokens, want.tokens)
            if want.logprobs is not None:
                assert got.logprobs is not None
                assert torch.equal(got.logprobs, want.logprobs)
            for row in range(len(logits)):
                one = points.index[row : row + 1], points.positions[row : row + 1], points.path[row : row + 1]
                alone = Points(points.sequences, *one)
                if points.allowed is None:
                    assert draw(logits[row : row + 1], alone, NATIVE).tokens[0] == want.tokens[row]


@built
@pytest.mark.parametrize("vocab", [5, 64, 200, 17000])
def test_what_is_no_number_is_drawn_as_tensors_do(isa: str, vocab: int) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.5, top_k=2, min_p=0.1),
        SamplingParams(logprobs=3, presence_penalty=1.0),
        SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=2.0),
    ]
    texts = [Sequence(Request("x", (0, 1), p), 0, 0, [0, 1, 2, 2]) for p in kinds]
    for p in kinds:
        object.__setattr__(p, "seed", 5)
    nan, inf = torch.nan, torch.inf
    for values in ([nan], [nan, nan], [inf], [inf, inf, nan], [-inf, inf], [-nan, 3.0], [nan, inf, -inf]):
        for row in (torch.randn(vocab), torch.full((vocab,), -inf)):
            for at, value in enumerate(values):
                row[(vocab - 2 - at * (vocab // 3)) % vocab] = value
            every = torch.arange(len(texts))
            points = Points(texts, every, torch.full_like(every, 4), torch.full((len(texts), 1), -1))
            logits = row.expand(len(texts), -1)
            assert draw(logits, points, NATIVE).tokens.tolist() == draw(logits, points, REFERENCE).tokens.tolist()


@built
def test_a_sequence_that_grows_keeps_its_counts() -> None:
    """Penalties over hundreds of tokens, one step after the other."""
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.2, seed=3, max_tokens=400
    )
    text, logits = Sequence(Request("x", (1, 2, 3), params), 0, 0, [1, 2, 3]), torch.randn(1, 50) * 2
    zero = torch.zeros(1, dtype=torch.long)
    for _ in range(300):
        points = Points([text], zero, zero + len(text.tokens), zero[:, None] - 1)
        want = draw(logits, points, REFERENCE).tokens
        assert torch.equal(draw(logits, points, NATIVE).tokens, want)
        text.tokens.append(int(want))
    assert len(set(text.tokens)) > 20


def test_weights_are_whole_numbers_near_the_exponential() -> None:
    x = torch.cat([-torch.rand(100_000) * 40, torch.tensor([0.0, -1e-38, -24.3, -25.0, -1e30, -torch.inf])])
    found = weights(x)
    assert torch.equal(found, found.round())
    torch.testing.assert_close(found / WEIGHT, torch.exp(x.double()), rtol=0, atol=1e-7)
    assert found[-6] == WEIGHT
    assert not found[-3:].any(), "past the distance at which the kernel stops to look"


def test_noise_is_gumbels() -> None:
    uniform = (torch.arange(0, 2**23, 7).float() + 0.5) * 2.0**-23
    uniform = torch.cat([uniform, torch.tensor([1 - 2.0**-24, 2.0**-24])])
    found = gumbel(uniform)
    torch.testing.assert_close(found.double(), -torch.log(-torch.log(uniform.double())), rtol=0, atol=1e-6)
    assert float(found.max()) < 16.64, "the kernel's bound"
