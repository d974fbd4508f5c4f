"""How long a request may wait and run, and whether the engine gets on at all."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI
from server.fake import FakeLLM, FakeStream, forever, says
from server.running import eventually, running
from server.scraping import scraped

from llmx.config import EngineConfig
from llmx.core import Delta, Request, SamplingParams
from llmx.engine.launch import Spawned
from llmx.engine.messages import Add, Tokens
from llmx.engine.worker import NICENESS
from llmx.errors import UsageError
from llmx.llm import LLM
from llmx.server.run import settle
from llmx.server.settings import ServerSettings

PROMPT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BOTH = pytest.mark.parametrize(("path", "body"), [("completions", PROMPT), ("chat/completions", CHAT)])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


class Silent(FakeStream):
    """Never says a word."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await self.ended.wait()
        return
        yield


class SilentLLM(FakeLLM):
    """begun: whether its streams have left the queue. Those whose id begins with `talk` do as the script says."""

    talk: str | None = None

    def __init__(self, begun: bool = False) -> None:
        super().__init__(forever, pause=0.01)
        self.begun = begun

    def open(self, prompt: list[int], params: SamplingParams, *, id: str, salt: bytes) -> FakeStream:
        if self.talk is not None and id.startswith(self.talk):
            return super().open(prompt, params, id=id, salt=salt)
        stream = Silent(tuple(prompt), params, self.script, 0.0, started=time.monotonic() if self.begun else 0.0)
        self.opened.append(stream)
        return stream


# ---- --queue-timeout ---------------------------------------------------------------------------------------


@BOTH
@STREAM
def test_a_request_that_waits_too_long_gets_503_and_leaves(path: str, body: dict[str, Any], stream: bool) -> None:
    llm = SilentLLM()
    with running(llm, queue_seconds=0.1) as server:
        status, raw, headers = server.raw("POST", f"/v1/{path}", body | {"stream": stream})
        assert status == 503
        assert json.loads(raw)["error"]["code"] == "queue_timeout"
        assert int(headers["retry-after"]) > 0
        assert [one.aborted for one in llm.opened] == [True]
        service = server.server.service
        assert eventually(lambda: (len(service.live), service.admission.texts, service.admission.tokens) == (0, 0, 0))
        assert scraped(server)["llmx:request_rejected_total code=queue_timeout"] == 1


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    llm = SilentLLM()
    with running(llm, queue_seconds=600.0) as server:
        server.send_and_leave("completions", PROMPT | {"stream": True}, lambda _: bool(llm.opened))
        assert eventually(lambda: llm.opened[0].aborted and not server.server.service.busy)


def test_one_that_the_engine_has_begun_with_is_no_longer_waiting() -> None:
    llm = SilentLLM(begun=True)
    with running(llm, queue_seconds=0.1, keep_alive_seconds=0.05) as server:
        # Comments come, for longer than it might have waited.
        body = PROMPT | {"stream": True}
        server.send_and_leave("completions", body, lambda got: got.count(b": keep-alive") > 10)


def test_a_queue_timeout_changes_nothing_for_who_gets_a_turn() -> None:
    with running(FakeLLM(says("hello")), queue_seconds=600.0) as server:
        assert server.post("completions", PROMPT)[1]["choices"][0]["text"] == "hello"
        events = server.events("completions", PROMPT)
        assert "".join(one["choices"][0]["text"] for one in events[:-1]) == "hello"
        assert server.post("completions", {"prompt": []})[0] == 400


@pytest.fixture(scope="module")
def spawned(tiny: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 2**20}
    with LLM(str(tiny), spawn=True, max_num_seqs=1, **options) as llm:
        yield llm


def engine_of(llm: LLM) -> int:
    assert isinstance(llm._client, Spawned)
    return llm._client.process.pid


def test_only_what_waits_is_dropped_from_a_real_queue(spawned: LLM) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "stream": True, "extra_body": {"ignore_eos": True}}
    with (
        running(spawned, queue_seconds=0.5) as server,
        OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        first = client.completions.create(max_tokens=200, **body)
        chunks = [next(first)]
        os.kill(engine_of(spawned), signal.SIGSTOP)
        try:
            with pytest.raises(APIStatusError) as caught:
                client.completions.create(max_tokens=5, **body)
        finally:
            os.kill(engine_of(spawned), signal.SIGCONT)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")
        chunks += list(first)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert eventually(lambda: not server.server.service.busy)
        found = scraped(server)
        assert found["llmx:num_requests_running"] == found["llmx:num_requests_waiting"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux'")
def test_the_threads_that_compute_let_the_front_go_first(spawned: LLM) -> None:
    threads = [int(one) for one in os.listdir(f"/proc/{engine_of(spawned)}/task")]
    nice = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert nice == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)}


def test_a_server_that_runs_has_short_pauses() -> None:
    before = sys.getswitchinterval()
    try:
        settle()
        assert gc.get_freeze_count() > 1000
        assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


def test_the_engine_tells_when_it_begins_with_a_prompt_of_several_steps(tiny: Path) -> None:
    from llmx.engine.service import Core

    config = EngineConfig(
        str(tiny), dtype="float32", device="cpu", threads=1, max_num_batched_tokens=16, max_num_seqs=4
    )
    core = Core.load(config)
    params = SamplingParams(max_tokens=3, seed=0, ignore_eos=True, n=2)
    core.handle(Add(Request("a", tuple(range(10, 90)), params)))
    said: list[Tokens] = []
    while core.busy:
        said += [one for one in core.step() if isinstance(one, Tokens)]
    core.close()
    assert [one.tokens == () for one in said] == [True] + [False] * (len(said) - 1)
    assert said[0].started > 0.0
    assert sum(len(one.tokens) for one in said) == 6


# ---- --request-timeout -------------------------------------------------------------------------------------


@BOTH
def test_a_plain_request_that_takes_too_long_gets_504(path: str, body: dict[str, Any]) -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm, request_seconds=0.1) as server:
        status, answer = server.post(path, body)
        assert status == 504
        assert (answer["error"]["type"], answer["error"]["code"]) == ("server_error", "request_timeout")
        assert llm.opened[0].aborted
        assert eventually(lambda: not server.server.service.busy)
        assert scraped(server)["llmx:request_success_total finished_reason=error"] == 1


@BOTH
def test_a_stream_that_takes_too_long_ends_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    llm = FakeLLM(forever, pause=0.01)
    with running(llm, request_seconds=0.1) as server:
        *texts, error, done = server.events(path, body)
        assert error["error"]["code"] == "request_timeout"
        assert done == "[DONE]"
        assert texts
        assert llm.opened[0].aborted


def test_openais_client_does_not_try_again_what_takes_too_long() -> None:
    llm = FakeLLM(forever, pause=0.01)
    with (
        running(llm, request_seconds=0.1) as server,
        OpenAI(base_url=server.url, api_key="x", max_retries=3) as client,
        pytest.raises(APIStatusError) as caught,
    ):
        client.completions.create(model="fake", prompt="hi")
    assert caught.value.status_code == 504
    assert len(llm.opened) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
@pytest.mark.parametrize("name", ["queue_seconds", "request_seconds"])
def test_a_time_out_that_is_none_is_refused(name: str, seconds: float) -> None:
    values: dict[str, Any] = {name: seconds}
    with pytest.raises(UsageError, match=f"--{name.split('_')[0]}-timeout"):
        ServerSettings(**values)


# ---- /ready?deep=1 -----------------------------------------------------------------------------------------


def test_deep_readiness_asks_a_real_engine_for_a_token_and_leaves_no_trace(spawned: LLM) -> None:
    with running(spawned) as server:
        before = scraped(server)
        for _ in range(3):
            assert server.call("GET", "/ready?deep=1") == (200, {"status": "ready"})
        after = scraped(server)
        for name in ("prompt_tokens_total", "generation_tokens_total", "request_params_n_count"):
            assert after[f"llmx:{name}"] == before[f"llmx:{name}"]
        assert after["llmx:iteration_tokens_total_count"] >= before["llmx:iteration_tokens_total_count"] + 3
        assert after["llmx:num_requests_running"] == 0


def test_deep_readiness_is_503_while_a_real_engine_hangs(spawned: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.service.PROBE_SECONDS", 0.3)
    with running(spawned) as server:
        os.kill(engine_of(spawned), signal.SIGSTOP)
        try:
            status, raw, headers = server.raw("GET", "/ready?deep=true")
            assert server.call("GET", "/ready")[0] == 200
        finally:
            os.kill(engine_of(spawned), signal.SIGCONT)
        assert status == 503
        assert "no token for 0.3 s" in json.loads(raw)["error"]["message"]
        assert int(headers["retry-after"]) > 0
        monkeypatch.setattr("llmx.server.service.PROBE_SECONDS", 60.0)
        assert server.call("GET", "/ready?deep=1")[0] == 200


def test_however_many_ask_one_probe_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("llmx.server.service.PROBE_SECONDS", 0.5)
    llm = SilentLLM()
    with running(llm) as server, ThreadPoolExecutor(8) as pool:
        statuses = [one[0] for one in pool.map(lambda _: server.call("GET", "/ready?deep=1"), range(8))]
        assert statuses == [503] * 8
        assert len(llm.opened) < 8
        assert all(one.aborted for one in llm.opened)


def test_an_engine_that_is_busy_with_others_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.server.service.PROBE_SECONDS", 60.0)
    llm = SilentLLM()
    llm.talk = "cmpl"
    with running(llm) as server:
        statuses: list[int] = []

        def look(got: bytes) -> bool:
            if b"data:" in got and not statuses:
                statuses.append(server.call("GET", "/ready?deep=1")[0])
            return bool(statuses)

        server.send_and_leave("completions", PROMPT | {"stream": True}, look)
        assert statuses == [200]


def test_deep_is_true_or_false() -> None:
    with running(FakeLLM(says("x"))) as server:
        status, answer = server.call("GET", "/ready?deep=perhaps")
        assert (status, answer["error"]["param"]) == (400, "deep")
        assert server.call("GET", "/ready?deep=0")[0] == 200
