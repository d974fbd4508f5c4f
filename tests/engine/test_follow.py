"""`Stream.follow`: what the server reads its streams by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

from llmx.core import Delta, SamplingParams
from llmx.errors import LlmxError
from llmx.llm import LLM, Stream

PROMPT = (5, 9, 2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("random:tiny", dtype="float32") as made:
        yield made


async def followed(stream: Stream) -> list[Delta | Exception | None]:
    """All that is said, and whatever the loop still has to say after the end."""
    said, over = list[Delta | Exception | None](), asyncio.Event()

    def hear(item: Delta | Exception | None) -> None:
        said.append(item)
        if not isinstance(item, Delta):
            over.set()

    stream.follow(hear)
    await over.wait()
    stream.abort()
    await asyncio.sleep(0)
    return said


def tokens(deltas: Iterable[object]) -> list[list[int]]:
    """Of the two texts."""
    found: list[list[int]] = [[], []]
    for delta in deltas:
        assert isinstance(delta, Delta)
        found[delta.index] += delta.token_ids
    return found


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when all has come"])
def test_it_says_what_reading_gives_and_then_that_it_is_over(llm: LLM, late: bool) -> None:
    params = SamplingParams(max_tokens=7, n=2, seed=3, temperature=1.0)

    async def run() -> list[Delta | Exception | None]:
        stream = llm.open(PROMPT, params)
        if late:
            await asyncio.to_thread(llm.generate, [PROMPT], SamplingParams(max_tokens=20))
        return await followed(stream)

    *deltas, end = asyncio.run(run())
    assert end is None
    read = list(llm.stream(PROMPT, params))
    assert tokens(deltas) == tokens(read)
    assert [len(text) for text in tokens(read)] == [7, 7]


def test_one_that_is_aborted_is_over() -> None:
    async def run(llm: LLM) -> list[Delta | Exception | None]:
        stream = llm.open(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        heard = asyncio.create_task(followed(stream))
        await asyncio.sleep(0)  # it has begun to follow
        stream.abort()
        return await heard

    with LLM("random:tiny", dtype="float32") as made:
        said = asyncio.run(run(made))
    assert said[-1] is None
    assert said.count(None) == 1


def test_what_fails_is_said_once() -> None:
    async def run() -> list[Delta | Exception | None]:
        with LLM("random:tiny", dtype="float32") as made:
            stream = made.open(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        return await followed(stream)

    *deltas, end = asyncio.run(run())
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(end, LlmxError)
    assert str(end) == "The engine was closed."
