"""The sampler against one written row by row, its distribution, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmx.core import Request, SamplingParams
from llmx.core import Sequence as Text
from llmx.kernels import Kernels
from llmx.sampler import CANDIDATES, Draws, Points, draw, likeliest, sibling_seed

REFERENCE = Kernels("cpu", "reference")
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(autouse=True, params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    found = Kernels("cpu", "reference" if request.param == "reference" else None)
    found.get("philox_uniform")
    if request.param == "native" and ("philox_uniform", "cpu") not in found.chosen():
        pytest.skip("the native kernels are not built")
    return found


def text(params: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), sibling: int = 0) -> Text:
    params = replace(params, seed=0 if params.seed is None else params.seed)
    return Text(Request("x", tuple(prompt), params), sibling, 0, [*prompt, *output])


def points(
    texts: list[Text], paths: Sequence[Sequence[int]] | None = None, positions: list[int] | None = None
) -> Points:
    """One draw for each text, after the drafts of its path."""
    paths = paths or [()] * len(texts)
    width = max(1, *(len(p) for p in paths))
    padded = torch.tensor([[*p, *[-1] * (width - len(p))] for p in paths])
    at = positions or [len(s.tokens) + len(p) for s, p in zip(texts, paths, strict=True)]
    return Points(texts, torch.arange(len(texts)), torch.tensor(at), padded)


def drawn(
    kernels: Kernels, logits: Tensor, texts: list[Text], paths: Sequence[Sequence[int]] | None = None
) -> list[int]:
    return draw(logits, points(texts, paths), kernels).tokens.tolist()


def processed(logits: Tensor, sequence: Text, path: Sequence[int] = ()) -> list[float]:
    """One row, written with Python's numbers: penalties, bias, bans, temperature, top-k, top-p, min-p."""
    import math

    p, prompt = sequence.request.params, sequence.request.prompt
    said = [*sequence.output, *path]
    x = [float(v) for v in logits]
    for token in set(said) | set(prompt):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(said):
        x[token] -= p.presence_penalty + p.frequency_penalty * said.count(token)
    for token, value in p.logit_bias:
        x[token] += value
    if len(said) < p.min_tokens:
        for token in sequence.request.stops:
            x[token] = -math.inf
    if p.temperature == 0:
        return x
    x = [v / p.temperature for v in x]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if p.top_k > 0:
        edge = x[order[min(p.top_k, len(x)) - 1]]
        x = [v if v >= edge else -math.inf for v in x]
    if p.top_p < 1:
        weights = [math.exp(v - x[order[0]]) for v in x]
        total, before, kept = sum(weights), 0.0, set()
        for i in order:
            if before >= p.top_p * total:
                break
            kept.add(i)
            before += weights[i]
        x = [v if i in kept else -math.inf for i, v in enumerate(x)]
    if p.min_p > 0:
        floor = max(x) + math.log(p.min_p)
        x = [v if v >= floor else -math.inf for v in x]
    return x


def naive_token(logits: Tensor, sequence: Text, path: Sequence[int] = ()) -> int:
    x = torch.tensor(processed(logits, sequence, path), dtype=torch.float64)
    if sequence.request.params.temperature:
        seed = torch.tensor([sibling_seed(sequence.request.seed, sequence.sibling)])
        position = torch.tensor([len(sequence.tokens) + len(path)])
        uniform = REFERENCE.get("philox_uniform")(seed, position, 0, len(x))[0].double()
        x = x - torch.log(-torch.log(uniform))
    return int(x.argmax())


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=5000),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.9, top_k=20, temperature=1.5),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.05, top_p=0.8, top_k=30),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(temperature=0.0, repetition_penalty=0.6),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=-0.7),
    SamplingParams(frequency_penalty=1.2, top_p=0.9),
    SamplingParams(logit_bias=((3, 100.0),)),
    SamplingParams(temperature=0.0, logit_bias=((3, -100.0), (5, 2.0), (9, 1.0))),
    SamplingParams(temperature=0.0, stop_token_ids=tuple(range(40)), min_tokens=6),
    SamplingParams(stop_token_ids=tuple(range(40)), min_tokens=4),
    SamplingParams(logprobs=2),
]
PATHS = [(), (1,), (2, 2, 5), ()]


def crowd(count: int = 120, vocab: int = 80) -> tuple[Tensor, list[Text], list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocab, generator=generator) * 3
    texts = [
        text(replace(KINDS[i % len(KINDS)], seed=i // 3), (1, 2, 3, 3), [(i * k) % 11 for k in range(i % 5)], i % 4)
        for i in range(count)
    ]
    return logits, texts, [PATHS[i % len(PATHS)] for i in range(count)]


def test_every_row_is_what_a_naive_sampler_draws(kernels: Kernels) -> None:
    logits, texts, paths = crowd()
    want = [naive_token(row, s, path) for row, s, path in zip(logits, texts, paths, strict=True)]
    assert drawn(kernels, logits, texts, paths) == want
    assert len(set(want)) > 30


def test_logits_are_not_changed(kernels: Kernels) -> None:
    logits, texts, paths = crowd()
    before = logits.clone()
    draw(logits, points(texts, paths), kernels)
    assert torch.equal(logits, before)


def _equal(one: Draws, many: Draws, row: int, wanted: int) -> None:
    assert one.tokens[0] == many.tokens[row]
    if one.logprobs is not None and one.top is not None:
        assert many.logprobs is not None
        assert many.top is not None
        assert torch.equal(one.logprobs[0], many.logprobs[row])
        for mine, theirs in zip(one.top, many.top, strict=True):
            assert torch.equal(mine[0, :wanted], theirs[row, :wanted])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("vocab", [80, 5003])
def test_a_row_alone_is_the_row_in_a_batch_bit_for_bit(kernels: Kernels, vocab: int, threads: int) -> None:
    """Whatever parameters its neighbours have; with several threads too, which split a large tensor anywhere."""
    torch.set_num_threads(threads)
    logits, texts, paths = crowd(44, vocab)
    logits = logits.bfloat16().float()  # ties, as bfloat16 models have
    texts = [
        text(replace(s.request.params, logprobs=i % 4 * 5), s.request.prompt, s.output) for i, s in enumerate(texts)
    ]
    every = draw(logits, points(texts, paths), kernels)
    for i, s in enumerate(texts):
        alone = draw(logits[i : i + 1], points([s], [paths[i]]), kernels)
        _equal(alone, every, i, s.request.params.logprobs or 0)
    for size in (2, 3, 5, 17):
        some = draw(logits[:size], points(texts[:size], paths[:size]), kernels)
        assert torch.equal(some.tokens, every.tokens[:size])
        assert some.logprobs is not None
        assert every.logprobs is not None
        assert torch.equal(some.logprobs, every.logprobs[:size])


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    seen = expected > 1e-9
    assert counts[~seen].sum() == 0, "a token that can't be drawn was drawn"
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


@pytest.mark.parametrize(
    ("params", "degrees"),
    [
        (SamplingParams(), 9),
        (SamplingParams(temperature=0.5), 9),
        (SamplingParams(top_k=4), 3),
        (SamplingParams(top_p=0.75, temperature=1.3), None),
        (SamplingParams(min_p=0.3), None),
        (SamplingParams(logit_bias=((9, 3.0), (0, -100.0))), 8),
    ],
)
def test_draws_are_distributed_as_the_processed_logits_say(
    kernels: Kernels, params: SamplingParams, degrees: int | None
) -> None:
    logits = torch.tensor([2.0, 1.6, 1.5, 0.9, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0])
    want = torch.tensor(processed(logits, text(params)), dtype=torch.float64).softmax(-1)
    free = int((want > 1e-12).sum()) - 1
    assert degrees in (None, free)
    # p = 0.001 by Wilson and Hilferty's approximation
    limit = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3
    count = 6000
    by_seed = [text(replace(params, seed=i)) for i in range(count)]
    assert chi_square(drawn(kernels, logits.expand(count, -1), by_seed), want) < limit
    one = [text(replace(params, seed=11))] * count
    found = draw(logits.expand(count, -1), points(one, positions=list(range(1, count + 1))), kernels)
    assert chi_square(found.tokens.tolist(), want) < limit


def test_neighbouring_positions_seeds_and_choices_are_independent(kernels: Kernels) -> None:
    """Pairs of draws fill a 6 x 6 table evenly."""
    logits, count = torch.zeros(5000, 6), 5000
    flat = torch.full((36,), 1 / 36)
    first = drawn(kernels, logits, [text(SamplingParams(seed=i)) for i in range(count)])
    for other in (
        [text(SamplingParams(seed=i), (0, 0)) for i in range(count)],
        [text(SamplingParams(seed=i + 1)) for i in range(count)],
        [text(SamplingParams(seed=i), sibling=1) for i in range(count)],
        [text(SamplingParams(seed=i), sibling=2) for i in range(count)],
    ):
        second = drawn(kernels, logits, other)
        assert chi_square([a * 6 + b for a, b in zip(first, second, strict=True)], flat) < 67  # p = .001, 35 degrees


def test_seeds_and_choices_name_their_draws(kernels: Kernels) -> None:
    logits = torch.zeros(1, 1000)

    def said(seed: int, sibling: int = 0) -> list[int]:
        one = text(SamplingParams(seed=seed), sibling=sibling)
        found = draw(logits.expand(20, -1), points([one] * 20, positions=list(range(20))), kernels)
        return found.tokens.tolist()

    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 1 - 2**63, 2**40, 12345]
    found = {tuple(said(seed, sibling)) for seed in seeds for sibling in range(5)}
    assert len(found) == 5 * len(seeds)
    assert said(7) == said(7)
    assert said(2**64 + 7) == said(7), "a seed counts modulo 2**64"
    assert said(2**64 - 1) == said(-1)
    assert all(-(2**63) <= sibling_seed(s, i) < 2**63 for s in seeds for i in (0, 1, 127))


def test_ties_go_to_the_lower_token(kernels: Kernels) -> None:
    logits = torch.zeros(3, 5000)
    logits[1, [4000, 1234]] = 2.0
    logits[2, [77, 4999]] = 1.0
    texts = [text(GREEDY)] * 3
    assert drawn(kernels, logits, texts) == [0, 1234, 77]
    for vocab in (7, 64, 5000):
        values, tokens = likeliest(logits[:1, :vocab], 7)
        assert tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
        assert not values.any()


def test_the_likeliest_tokens_are_sorted_by_value_then_by_token() -> None:
    scores = torch.tensor([[0.5, -torch.inf, 3.0, -0.0, 0.0, -1.0, 3.0, -7.5, 1e-40, torch.inf]])
    values, tokens = likeliest(scores, 10)
    assert tokens.tolist() == [[9, 2, 6, 0, 8, 3, 4, 5, 7, 1]]
    assert torch.equal(values, scores.gather(1, tokens))
    assert likeliest(scores, 20)[1].shape == (1, 10)
    random = (torch.randn(50, 300) * 4).bfloat16().float()
    for count in (1, 5, 20):
        want = [sorted(range(300), key=lambda i: (-float(row[i]), i))[:count] for row in random]
        assert likeliest(random, count)[1].tolist() == want


def test_logprobs_are_those_of_the_raw_logits(kernels: Kernels) -> None:
    logits = torch.randn(4, 50) * 2
    params = SamplingParams(temperature=0.3, top_k=2, presence_penalty=2.0, logit_bias=((1, 50.0),), logprobs=5)
    found = draw(logits, points([text(replace(params, seed=i), (1, 2), (3,)) for i in range(4)]), kernels)
    scores = logits.double().log_softmax(-1)
    assert found.logprobs is not None
    assert found.top is not None
    torch.testing.assert_close(
        found.logprobs.double(), scores.gather(1, found.tokens[:, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(found.top[0].double(), scores.topk(5, -1).values, rtol=0, atol=1e-5)
    assert found.top[1].tolist() == scores.topk(5, -1).indices.tolist()
    assert draw(logits, points([text(replace(params, logprobs=None))] * 4), kernels).logprobs is None


def test_bias_of_a_hundred_decides(kernels: Kernels) -> None:
    logits = torch.randn(200, 60) * 5
    force, forbid = SamplingParams(logit_bias=((17, 100.0),)), SamplingParams(logit_bias=((17, -100.0),))
    assert set(drawn(kernels, logits, [text(replace(force, seed=i)) for i in range(200)])) == {17}
    assert 17 not in drawn(kernels, logits, [text(replace(forbid, seed=i)) for i in range(200)])
    assert 17 in drawn(kernels, logits, [text(SamplingParams(seed=i)) for i in range(200)])


def test_no_end_before_min_tokens_and_one_after(kernels: Kernels) -> None:
    logits = torch.zeros(1, 30)
    logits[0, 4], logits[0, 9] = 9.0, 8.0
    params = replace(GREEDY, stop_token_ids=(4,), min_tokens=3)
    request = Request("x", (1, 2), params, eos=frozenset({9, 400}))  # 400: the model has no such token
    for said in range(5):
        sequence = Text(request, 0, 0, [1, 2, *[7] * said])
        assert drawn(kernels, logits, [sequence]) == [0 if said < 3 else 4]
        assert drawn(kernels, logits, [sequence], [(7, 7)]) == [0 if said + 2 < 3 else 4], "drafts count"


def test_penalties_count_drafts_as_if_they_had_been_said(kernels: Kernels) -> None:
    logits = torch.randn(12, 20) * 2
    for params in KINDS[13:17]:
        for path in ([3], [3, 3], [5, 3, 7, 3]):
            drafted = [text(replace(params, seed=i), (1,), (2, 3)) for i in range(12)]
            said = [text(replace(params, seed=i), (1,), (2, 3, *path)) for i in range(12)]
            assert drawn(kernels, logits, drafted, [path] * 12) == drawn(kernels, logits, said)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])
def test_a_temperature_next_to_zero_is_greedy(kernels: Kernels, temperature: float) -> None:
    logits = torch.randn(20, 50) * 9
    texts = [text(SamplingParams(temperature=temperature, top_p=0.9, seed=i)) for i in range(20)]
    assert drawn(kernels, logits, texts) == logits.argmax(-1).tolist()


def test_top_p_looks_past_its_first_candidates(kernels: Kernels) -> None:
    """A flat distribution keeps more than CANDIDATES tokens; neighbours that keep few are not moved by that."""
    vocab = 6 * CANDIDATES
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)) * 0.05
    logits[1] *= 100
    texts = [text(SamplingParams(top_p=0.9, seed=i)) for i in range(3)]
    want = [naive_token(row, s) for row, s in zip(logits, texts, strict=True)]
    assert drawn(kernels, logits, texts) == want
    many = [text(SamplingParams(top_p=0.5, seed=i)) for i in range(400)]
    order = logits[0].argsort(descending=True)
    places = order.argsort()[torch.tensor(drawn(kernels, logits[:1].expand(400, -1), many))]
    assert places.max() < 0.55 * vocab
    assert places.max() > CANDIDATES
