"""The HTTP client of the bench and what it makes of streams, byte by byte; on written-down clocks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llmx.bench import clock
from llmx.bench.http import Broken, Exchange, Framing, Pool
from llmx.bench.records import Record
from llmx.bench.remote import delta_figures, parse_metrics
from llmx.bench.sse import events, fill
from llmx.errors import UsageError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def framed(raw: bytes, step: int, close: bool = False) -> tuple[bytes, Framing]:
    framing, body = Framing(), b""
    for at in range(0, len(raw), step):
        body += framing.feed(raw[at : at + step])
    if close:
        framing.end()
    return body, framing


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("raw", "body", "reusable"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello", True),
        (OK + b"Content-Length: 0\r\n\r\n", b"", True),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
        (CHUNKED + b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n", b"hello!", True),
        (CHUNKED + b"A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\nTrailer: x\r\n\r\n", b"0\r\n\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok", b"ok", True),
    ],
)  # fmt: skip
def test_bodies_come_out_however_they_are_cut(raw: bytes, body: bytes, reusable: bool, step: int) -> None:
    found, framing = framed(raw, step)
    assert found == body
    assert framing.done
    assert framing.status == 200
    assert framing.reusable is reusable


def test_a_body_without_length_ends_with_the_connection() -> None:
    found, framing = framed(OK + b"\r\nhello", 3, close=True)
    assert found == b"hello"
    assert framing.done
    assert not framing.reusable


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        OK,
        OK + b"Content-Length: 9\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n",
        b"SSH-2.0\r\n\r\n",
        OK + b"Content-Length: x\r\n\r\n",
        CHUNKED + b"zz\r\nhello\r\n",
        OK + b"X: " + b"y" * 70000,
    ],
)
def test_what_is_cut_off_or_no_http_is_broken(raw: bytes) -> None:
    with pytest.raises(Broken):
        framed(raw, 100, close=True)


STREAM = b"data: one\n\n: a comment\n\nevent: x\ndata: two\ndata: lines\r\n\r\ndata:three\r\rdata: unfinished"


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_events_are_found_whatever_the_line_ends_and_cuts(step: int) -> None:
    pieces = [(float(at), STREAM[at : at + step]) for at in range(0, len(STREAM), step)]
    assert [data for _, data in events(pieces)] == [b"one", b"two\nlines", b"three"]


def test_an_event_has_the_clock_of_its_end() -> None:
    found = list(events([(1.0, b"data: a"), (2.0, b"\n"), (3.0, b"\ndata: b\n\n")]))
    assert found == [(3.0, b"a"), (3.0, b"b")]


def record(*said: tuple[float, Any], status: int = 200, ended: bool = True, error: str | None = None) -> Record:
    """What becomes of an answer of these (clock, event or raw bytes)."""
    raw = [(at, one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode() + b"\n\n") for at, one in said]
    found = Record(0, 9, 0.0, strict=False)
    fill(found, Exchange(0.0, status, raw, error, ended))
    return found


def text(value: str, **more: Any) -> dict[str, Any]:
    usage = {"usage": {"completion_tokens": more.pop("so_far")}} if "so_far" in more else {}
    return {"choices": [{"index": 0, "text": value, **more}], **usage}


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


END = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}
DONE = b"data: [DONE]\n\n"


def test_tokens_are_counted_as_ids_also_where_a_chunk_holds_several() -> None:
    found = record((1.0, text("a", token_ids=[1])), (2.0, text("bcd", token_ids=[2, 3, 4])), (2.5, END), (3.0, DONE))
    assert found.arrivals == [(1.0, 1), (2.0, 3)]
    assert found.completed
    assert found.token_gaps == pytest.approx([1 / 3] * 3)
    assert found.chunk_gaps == [(1.0, 3)]
    assert (found.input_len, found.cached, found.told, found.output_len) == (7, 2, 4, 4)


def test_usage_so_far_tells_the_tokens_of_each_chunk_and_empty_ones_are_none() -> None:
    said = [(1.0, text("a", so_far=1)), (1.5, text("", so_far=1)), (2.0, text("bc", so_far=4)), (2.5, END), (3.0, DONE)]
    assert record(*said).arrivals == [(1.0, 1), (2.0, 3)]


def test_a_role_is_no_first_token() -> None:
    opening = chat(role="assistant", content="") | {"usage": {"completion_tokens": 1}}
    first = chat(content="a") | {"usage": {"completion_tokens": 1}}
    for said in ([opening, first], [chat(role="assistant", content=""), chat(content="a")]):
        found = record((1.0, said[0]), (2.0, said[1]), (2.5, END), (3.0, DONE))
        assert found.ttft == pytest.approx(2.0)
        assert found.first_byte == pytest.approx(1.0)


def test_reasoning_counts_as_text() -> None:
    found = record((1.0, chat(reasoning_content="hm")), (2.0, chat(content="a")), (2.5, END), (3.0, DONE))
    assert found.ttft == pytest.approx(1.0)


def test_with_usage_of_the_whole_alone_chunks_are_tokens_only_if_that_makes_the_sum() -> None:
    """Four tokens: four chunks, or three and an end of text that has none; of two chunks nobody knows."""
    four = record(*((float(i), text("x")) for i in range(4)), (4.0, END), (5.0, DONE))
    three = record(*((float(i), text("x")) for i in range(3)), (4.0, END), (5.0, DONE))
    two = record((1.0, text("xx")), (3.0, text("xx")), (4.0, END), (5.0, DONE))
    assert [len(four.token_gaps), len(three.token_gaps)] == [3, 2]
    assert two.completed
    assert two.token_gaps == []
    assert two.tpot == pytest.approx(2.0 / 3)
    assert [one.output_len for one in (four, three, two)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (record((1.0, text("a", token_ids=[1])), (2.0, {"error": {"message": "It broke."}}), (3.0, DONE)), "It broke."),
        (record((1.0, text("a", token_ids=[1]))), "the answer broke off"),
        (record((1.0, b'{"error": {"message": "Too many."}}'), status=429), "429: Too many."),
        (record((1.0, b"<html>"), status=502), "502: no reason given"),
        (record(error="the connection broke: reset"), "the connection broke: reset"),
        (record((1.0, b"data: {nonsense\n\n"), (2.0, DONE)), "no JSON: {nonsense"),
        (record((1.0, text("a")), (2.0, DONE)), "the server told no token count"),
    ],
)
def test_what_went_wrong_is_kept(found: Record, says: str) -> None:
    assert found.error == says
    assert found.ended
    assert not found.completed


def test_what_an_interrupt_cut_off_is_no_failure() -> None:
    found = record((1.0, text("a", token_ids=[1])), ended=False)
    assert (found.ended, found.error) == (False, None)


METRICS = """# HELP llmx:num_preemptions_total x
llmx:num_preemptions_total{model_name="m",engine="0"} 3
vllm:spec_decode_num_drafts_total{model_name="m"} 10
llmx:engine_step_seconds_total{engine="0"} 1.5
llmx:kv_cache_usage_perc{engine="0"} 0.25
process_resident_memory_bytes 1e9
other 5
"""


def test_counters_are_read_and_subtracted() -> None:
    before = parse_metrics(METRICS)
    assert before is not None
    assert before["kv_cache_usage_perc"] == 0.25
    after = dict(before) | {"num_preemptions_total": 5, "engine_step_seconds_total": 3.5}
    after |= {"spec_decode_num_drafts_total": 20, "spec_decode_num_draft_tokens_total": 40}
    after |= {"spec_decode_num_accepted_tokens_total": 15}
    found = delta_figures(before, after, 4.0)
    assert found["preemptions"] == 2
    assert found["busy_share"] == pytest.approx(0.5)
    assert found["spec_decode_acceptance_length"] == pytest.approx(2.5)
    assert found["spec_decode_acceptance_rate"] == pytest.approx(37.5)
    assert "spec_decode_per_position_acceptance_rates" not in found
    assert parse_metrics("nothing 1\n") is None
    assert delta_figures(None, None, 1.0) == {}


def test_drafts_are_counted_by_their_places_too() -> None:
    def said(accepted: list[int], drafts: int) -> dict[str, float] | None:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines = [f'{name}{{engine="0",position="{at}"}} {count}.0' for at, count in enumerate(accepted)]
        counts = {"drafts": drafts, "draft_tokens": drafts * len(accepted), "accepted_tokens": sum(accepted)}
        return parse_metrics("\n".join([*lines, *(f"vllm:spec_decode_num_{k}_total {v}" for k, v in counts.items())]))

    found = delta_figures(said([5, 3, *([1] * 9)], 10), said([13, 7, *([2] * 9)], 20), 1.0)
    assert found["spec_decode_per_position_acceptance_rates"] == [
        0.8,
        0.4,
        *([0.1] * 9),
    ]  # 10 is behind 9, not behind 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        Pool(url, {}, 1.0)


class Scripted:
    """A server that answers each request on a connection with the next bytes, and closes where they are None."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = self.answers[self.connections]
        self.connections += 1
        for answer in mine:
            if answer is None:
                break
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()


def asked(script: Scripted, count: int, silence: float = 60.0) -> list[Exchange]:
    found: list[Exchange] = []

    async def run() -> None:
        async with await asyncio.start_server(script, "127.0.0.1", 0) as server:
            pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, silence)
            for _ in range(count):
                found.append(Exchange())
                await pool.ask(pool.encode("GET", "/", None), found[-1])
            pool.close()

    clock.run(run)
    return found


HELLO = OK + b"Content-Length: 2\r\n\r\nhi"


def test_a_connection_is_used_again() -> None:
    script = Scripted([HELLO, HELLO])
    assert [one.body for one in asked(script, 2)] == [b"hi", b"hi"]
    assert script.connections == 1


def test_one_that_the_server_closed_meanwhile_is_replaced() -> None:
    script = Scripted([HELLO], [HELLO])
    assert [(one.body, one.error) for one in asked(script, 2)] == [(b"hi", None), (b"hi", None)]
    assert script.connections == 2


def test_a_broken_answer_is_an_error_and_no_second_try() -> None:
    script = Scripted([OK + b"Content-Length: 9\r\n\r\nhi"])
    (one,) = asked(script, 1)
    assert one.error == "the connection was closed before the answer ended"
    assert one.ended
    assert script.connections == 1


def test_nobody_there_is_an_error_of_the_request() -> None:
    found = Exchange()

    async def run() -> None:
        async with await asyncio.start_server(Scripted(), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        pool = Pool(f"http://127.0.0.1:{port}", {}, 1.0)
        await pool.ask(pool.encode("GET", "/", None), found)

    clock.run(run)
    assert "can't be reached" in (found.error or "")
    assert found.ended
