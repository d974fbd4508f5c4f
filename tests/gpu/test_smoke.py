"""Random models through the whole engine on a CUDA device, against the CPU. LLMX_SMOKE_DEVICE=cpu tries it there.

Runs from the tree (PYTHONPATH) without fastapi or gguf. On CUDA the order of a reduction varies with shape, so texts
may differ from the first near tie on: nowhere before it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from llmx.core import Completion, SamplingParams  # noqa: E402
from llmx.llm import LLM  # noqa: E402

DEVICE = os.environ.get("LLMX_SMOKE_DEVICE", "cuda")
ON_CUDA = DEVICE.startswith("cuda")
# How far apart two logits may be and still change places, on CUDA; the tiny model's logits are of the order of 1.
NOISE = {"float32": 1e-3, "bfloat16": 5e-2}
TOKENS = 48
LARGE_BYTES = 24 * 2**30  # the 8B shape in bf16, its cache, and room

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON_CUDA and not torch.cuda.is_available(),
        reason="torch sees no CUDA device (LLMX_SMOKE_DEVICE=cpu tries these tests on a CPU)",
    ),
]


def prompts(count: int, vocab: int) -> list[list[int]]:
    """From 3 to 90 tokens: shorter and longer than a block, and than a chunk of attention."""
    rng = random.Random(5)
    return [rng.choices(range(vocab), k=3 + 29 * (i % 4)) for i in range(count)]


def greedy(llm: LLM, asked: Sequence[Sequence[int]], **changes: object) -> list[Completion]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2} | changes)  # type: ignore[arg-type]
    return [output.outputs[0] for output in llm.generate([list(prompt) for prompt in asked], params)]


def first_difference(a: Completion, b: Completion) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), None)


def assert_same_but_for_ties(a: Completion, b: Completion, noise: float) -> None:
    """Equal tokens up to the first position at which the two likeliest of `a` are within `noise` of each other."""
    assert len(a.token_ids) == len(b.token_ids) == TOKENS
    at = first_difference(a, b)
    if at is None:
        return
    assert a.logprobs is not None
    (_, best), (_, second) = a.logprobs[at].top[:2]
    assert best - second <= noise, f"token {at} differs where the best leads by {best - second:.2g}"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def on_device(dtype: str) -> Iterator[LLM]:
    with LLM("random:tiny", device=DEVICE, dtype=dtype) as llm:
        yield llm


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[LLM]:
    with LLM("random:tiny", device="cpu", dtype="float32") as llm:
        yield llm


def test_it_runs_on_the_device_that_was_asked_for(on_device: LLM, dtype: str) -> None:
    assert on_device.info.device.split(":")[0] == DEVICE.split(":")[0]
    assert on_device.info.dtype == dtype
    assert dict(on_device.info.kernels)  # it says which kernels run
    if ON_CUDA:
        assert torch.cuda.memory_allocated() >= on_device.info.kv_cache_bytes


def test_greedy_tokens_are_those_of_the_cpu(on_device: LLM, on_cpu: LLM, dtype: str) -> None:
    """Weights are drawn alike on every device, so both are the same model."""
    asked = prompts(4, on_cpu.info.vocab_size)
    noise = NOISE[dtype] if ON_CUDA or dtype != "float32" else 0.0
    for theirs, ours in zip(greedy(on_cpu, asked), greedy(on_device, asked), strict=True):
        assert_same_but_for_ties(theirs, ours, noise)
        assert theirs.logprobs is not None
        assert ours.logprobs is not None
        if theirs.token_ids[0] == ours.token_ids[0]:  # the same question: so the numbers themselves can be compared
            assert ours.logprobs[0].value == pytest.approx(theirs.logprobs[0].value, abs=max(noise, 1e-4))


def test_a_batch_gives_each_request_what_it_gets_alone(on_device: LLM, dtype: str) -> None:
    asked = prompts(12, on_device.info.vocab_size)
    before = on_device.metrics().most_running
    alone = [greedy(on_device, [prompt])[0] for prompt in asked]
    together = greedy(on_device, asked)
    assert on_device.metrics().most_running >= max(9, before), "a step must have had more than 8 rows"
    for a, b in zip(alone, together, strict=True):
        assert_same_but_for_ties(a, b, NOISE[dtype] if ON_CUDA else 0.0)


def test_a_prefix_hit_changes_nothing(on_device: LLM, dtype: str) -> None:
    prompt = random.Random(9).choices(range(on_device.info.vocab_size), k=200)
    cold, warm = greedy(on_device, [prompt])[0], greedy(on_device, [prompt])[0]
    assert on_device.metrics().cached_tokens > 0
    assert_same_but_for_ties(cold, warm, NOISE[dtype] if ON_CUDA else 0.0)


def test_seeded_sampling_repeats_itself_and_another_seed_differs(on_device: LLM) -> None:
    asked = prompts(2, on_device.info.vocab_size)
    draw = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
    first, again = greedy(on_device, asked, seed=3, **draw), greedy(on_device, asked, seed=3, **draw)
    other = greedy(on_device, asked, seed=4, **draw)
    assert [c.token_ids for c in first] != [c.token_ids for c in other]
    if not ON_CUDA:  # there the second run's prefix hit changes the shapes, and with them the last bits
        assert [c.token_ids for c in first] == [c.token_ids for c in again]


def test_the_8b_shape_loads_and_generates() -> None:
    if not ON_CUDA:
        pytest.skip("a CPU would take minutes for the 8B shape")
    if torch.cuda.get_device_properties(0).total_memory < LARGE_BYTES:
        pytest.skip(f"the 8B shape needs {LARGE_BYTES / 2**30:.0f} GiB of device memory")
    with LLM("random:llama-8b", device=DEVICE, dtype="bfloat16", max_model_len=2048) as llm:
        assert 7.5e9 < llm.info.parameters < 8.5e9
        asked = prompts(2, llm.info.vocab_size)
        together, alone = greedy(llm, asked), greedy(llm, asked[:1])[0]
    for completion in together:
        assert completion.logprobs is not None
        assert all(-1e4 < one.value <= 0.0 for one in completion.logprobs)  # finite
    assert_same_but_for_ties(alone, together[0], 0.1)
