"""Stop strings are cut at the front, token by token: text, ids, finish and usage are the same with any drafter."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine.common import LENGTH, VOCAB, Key, Watched, engine, requests, truth
from engine.drafters import Replay

import llmx.llm
from llmx.config import EngineInfo
from llmx.core import Output, Request
from llmx.engine.launch import InProcess
from llmx.engine.service import Core
from llmx.llm import LLM
from llmx.tokenizer.pieces import Stream

F32 = torch.float32
# Pieces of one to three letters, so that a stop string may begin or end in mid-token; some are halves of characters.
PIECES = [f"{'abcde'[i % 5]}{'fgh'[i % 3] * (i % 3)}".encode() for i in range(VOCAB)]
PIECES[3::12] = ["é".encode()[:1]] * 8
PIECES[9::12] = ["é".encode()[1:]] * 8


class Spelling:
    first_loses, strip, strip_most = "", "", 0


class Spelled:
    """A tokenizer that can only spell."""

    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    spelling = Spelling()

    def __getitem__(self, token: int) -> bytes:
        return PIECES[token]

    def stream(self, prompt_ids: Any = (), skip_special: bool = True, visible: Any = ()) -> Stream:
        return Stream(self, prompt_ids, frozenset())  # type: ignore[arg-type]


def info() -> EngineInfo:
    facts: dict[str, Any] = dict.fromkeys(EngineInfo.__dataclass_fields__, 0)
    return EngineInfo(**facts | {"max_model_len": LENGTH, "max_num_seqs": 32, "vocab_size": VOCAB})


@contextmanager
def front(run: Watched) -> Iterator[tuple[LLM, Core]]:
    """An LLM over an engine that was built by hand."""
    core = Core(run, info())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llmx.llm, "_client", lambda *_: InProcess(core))
        with LLM("random:tiny") as llm:
            llm.maybe_tokenizer = Spelled()  # type: ignore[assignment]
            yield llm, core


NAMES = ("greedy", "seeded", "penalties", "penalties_sampled", "top_p", "long_seeded", "choices")


@cache
def known() -> dict[Key, tuple[int, ...]]:
    return truth("mixed", F32, requests()).output()


def spelled(prompt: tuple[int, ...], tokens: tuple[int, ...], final: bool = True) -> str:
    """In whole characters, after the prompt, which may end inside one; at the text's end, U+FFFD for a half."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(PIECES[t] for t in prompt))
    return utf8.decode(b"".join(PIECES[t] for t in tokens), final)


@cache
def cases() -> tuple[Request, ...]:
    """Each kind of request with stop strings that are in its text at different places, across tokens or in one."""
    made = []
    for request in requests():
        if request.id not in NAMES:
            continue
        text = spelled(request.prompt, known()[request.id, 0])
        for i, stop in enumerate((text[1:3], text[9:12], text[-3:], "not there", text[4:6])):
            more: dict[str, Any] = {"stop": (stop, "xyz"), "include_stop_str_in_output": i == 4}
            made.append(replace(request, id=f"{request.id} {i}", params=replace(request.params, **more)))
    for n in range(1, 12):
        request = next(r for r in requests() if r.id == f"max_{n}")
        text = spelled(request.prompt, known()["max_11", 0])
        made.append(replace(request, id=f"max_{n} stop", params=replace(request.params, stop=(text[7:9],))))
    return tuple(made)


def outputs(llm: LLM) -> dict[str, Output]:
    streams = {r.id: llm.open(r.prompt, r.params, id=r.id) for r in cases()}
    for stream in streams.values():
        for _ in stream:
            pass
    return {name: stream.output() for name, stream in streams.items()}


def future() -> dict[Key, tuple[int, ...]]:
    """What the engine would say if nobody stopped it."""
    return {(r.id, i): known()[r.id.split()[0], i] for r in cases() for i in range(r.params.n)}


@cache
def undrafted() -> dict[str, Output]:
    with front(engine("mixed", prefix_caching=False)) as (llm, _):
        return outputs(llm)


def test_a_text_ends_at_the_first_token_that_completes_a_stop_string() -> None:
    """Against a search in the whole text, done here."""
    early = 0
    for request in cases():
        found = undrafted()[request.id]
        for completion in found.outputs:
            ids = known()[request.id.split()[0], completion.index]
            used = next((n for n in range(1, len(ids) + 1) if _stop_in(request, ids[:n])), len(ids))
            assert completion.token_ids == ids[:used]
            stop = _stop_in(request, ids[:used])
            text = spelled(request.prompt, ids[:used])
            if stop:
                at = text.index(stop)
                assert completion.text == text[: at + len(stop) * request.params.include_stop_str_in_output]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            else:
                assert completion.text == text
                assert completion.finish_reason == "length"
            early += used < len(ids)
    assert early > 20


def _stop_in(request: Request, ids: tuple[int, ...]) -> str | None:
    text = spelled(request.prompt, ids, final=len(ids) == request.max_tokens)
    return next((stop for stop in request.params.stop if stop in text), None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["none", "chain", "tree", "garbage"])
def test_the_same_with_drafts_and_overlap(kind: str, overlap: bool) -> None:
    drafter = Replay(future(), siblings=2 * (kind == "tree"), off=40 * (kind == "garbage"), host=False)
    run = engine("mixed", drafter=None if kind == "none" else drafter, overlap=overlap, prefix_caching=False)
    with front(run) as (llm, core):
        assert outputs(llm) == undrafted()
        while core.busy:  # the last aborts are still on their way
            llm.metrics()
        metrics = llm.metrics()
        assert not core.requests
    if kind in ("chain", "tree"):
        assert metrics.accepted_tokens > 200
    assert (metrics.drafted_tokens > 0) == (kind != "none")
    assert metrics.accepted_tokens == 0 or kind != "garbage"
    assert metrics.prompt_tokens == sum(len(r.prompt) for r in cases())
    assert metrics.finished + metrics.aborted == sum(r.params.n for r in cases())
    said = sum(len(c.token_ids) for o in undrafted().values() for c in o.outputs)
    assert metrics.generated_tokens >= said
