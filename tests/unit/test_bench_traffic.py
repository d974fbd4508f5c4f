"""Arrivals, objectives, datasets and the loops that send: what they do, without an engine and without waiting."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmx.bench import clock
from llmx.bench.arrivals import offsets, parse_ramp, parse_rate, ramped
from llmx.bench.clock import Client
from llmx.bench.datasets import Dataset, make_jobs, open_dataset, sized, warm_up_jobs
from llmx.bench.drive import Traffic, drive
from llmx.bench.records import Record, busiest_second, peak, plateau, serving_figures
from llmx.bench.serving import StaticBatches
from llmx.bench.slo import goodput, parse_slo
from llmx.bench.stats import adjusted, nested, spread
from llmx.bench.workload import Job, Span
from llmx.errors import UsageError

IDS = list(range(10, 500))
SIZES = {"input_len": Span(20, 60), "output_len": Span(4, 9)}


def gaps(process: str, burstiness: float, seed: int = 1) -> list[float]:
    at = offsets(20000, 50.0, process, burstiness, seed)
    return [after - before for before, after in itertools.pairwise(at)]


@pytest.mark.parametrize(("process", "shape"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(process: str, shape: float) -> None:
    found = gaps(process, shape)
    assert statistics.fmean(found) == pytest.approx(1 / 50, rel=0.01)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(1 / math.sqrt(shape), rel=0.05)
    if process == "poisson":  # the share of gaps above the mean is 1/e
        assert sum(gap > 1 / 50 for gap in found) / len(found) == pytest.approx(1 / math.e, abs=0.02)


def test_arrivals_are_seeded_ascending_and_meet_the_rate() -> None:
    first = offsets(100, 7.0, "poisson", 1.0, 3)
    assert first == offsets(100, 7.0, "poisson", 1.0, 3)
    assert first != offsets(100, 7.0, "poisson", 1.0, 4)
    assert list(first) == sorted(first)
    assert first[-1] == pytest.approx(100 / 7)
    assert offsets(3, 2.0, "constant", 1.0, 0) == pytest.approx((0.5, 1.0, 1.5))
    assert offsets(3, math.inf, "poisson", 1.0, 0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "fast", ""])
def test_a_wrong_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--request-rate"):
        parse_rate(text)


def request(sent: float, *arrivals: tuple[float, int], due: float | None = None, error: str | None = None) -> Record:
    tokens = sum(count for _, count in arrivals)
    return Record(10, tokens, sent, list(arrivals), ended=True, due=due, error=error)


def test_objectives_are_limits_or_mlperfs() -> None:
    assert parse_slo(["ttft:500,tpot:50", "e2el:9000"]) == {"ttft": 500, "tpot": 50, "e2el": 9000}
    assert parse_slo(["mlperf:llama3.1-8b-interactive"]) == {"ttft": 500, "tpot": 30}
    assert parse_slo(["mlperf:llama2-70b-server,ttft:100"]) == {"ttft": 100, "tpot": 200}
    assert parse_slo(None) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "itl:5", "mlperf:gpt-9", "ttft:inf"])
def test_a_wrong_objective_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        parse_slo([text])


def test_goodput_counts_what_kept_all_limits_and_a_failure_keeps_none() -> None:
    quick = request(0.0, (0.1, 1), (0.2, 1))
    slow_start = request(0.0, (0.9, 1), (1.0, 1))
    slow_rest = request(0.0, (0.1, 1), (0.9, 1))
    one_token = request(0.0, (0.1, 1))
    failed = request(0.0, (0.1, 1), error="no")
    found = goodput([quick, slow_start, slow_rest, one_token, failed], {"ttft": 500, "tpot": 200}, 4.0)
    assert found["request_goodput"] == pytest.approx(2 / 4.0)
    assert found["slo"]["attainment"] == pytest.approx(2 / 5)
    assert found["slo"]["attainment_by_metric"] == {"ttft": pytest.approx(3 / 5), "tpot": pytest.approx(3 / 5)}
    assert found["slo"]["kept_at_p99"] is False
    assert goodput([quick], {"ttft": 500}, 1.0)["slo"]["kept_at_p99"] is True


def test_failures_count_as_infinite_where_they_reach_the_percentile() -> None:
    assert adjusted([1.0] * 99, 0, 99) == pytest.approx(1000.0)
    assert adjusted([1.0] * 99, 1, 50) == pytest.approx(1000.0)
    assert adjusted([1.0] * 99, 2, 99) == math.inf
    assert adjusted([], 3, 50) == math.inf
    assert adjusted([], 0, 50) is None
    figures = serving_figures([request(0.0, (1.0, 1)), request(0.0, error="no")], 2)
    assert figures["p99_ttft_ms"] == pytest.approx(1000.0)
    assert figures["adj_p99_ttft_ms"] == math.inf


def test_commonest_reasons_of_failures_come_first_and_are_bounded() -> None:
    records = [request(0.0, error="rare")] + [request(0.0, error="often")] * 3
    records += [request(0.0, error=f"other {i}") for i in range(9)]
    errors = serving_figures(records, 1)["errors"]
    assert errors[0] == "often (3 times)"
    assert errors[-1] == "and 6 more"
    assert len(errors) == 6


def test_an_open_loop_tells_what_the_client_held_back() -> None:
    held = request(3.0, (4.0, 1), (5.0, 1), due=1.0)
    free = request(1.0, (1.5, 1), (2.0, 1), due=1.0)
    figures = serving_figures([held, free], None)
    assert figures["duration"] == pytest.approx(4.0)  # from when the first was due
    assert figures["mean_e2el_ms"] == pytest.approx(1500.0)
    assert figures["mean_e2el_including_client_queue_ms"] == pytest.approx(2500.0)
    assert figures["mean_client_queue_time_ms"] == pytest.approx(1000.0)
    assert "mean_client_queue_time_ms" not in serving_figures([request(0.0, (1.0, 1))], 1)


def test_the_steady_window_of_an_open_loop_is_the_longest_near_the_peak() -> None:
    # 5 at once from 1 to 4, of which 4 (80 %) from 0.5 on and until 6
    long = [request(0.0, *((0.5 * i, 1) for i in range(1, 13))) for _ in range(3)]
    fourth = request(0.5, (1.0, 1), (6.0, 1))
    fifth = request(1.0, (4.0, 1))
    early = request(-9.0, (-8.0, 1))
    records = [*long, fourth, fifth, early]
    assert peak(records) == 5
    window = plateau(records)
    assert window["seconds"] == pytest.approx(5.5)
    assert window["output_throughput"] == pytest.approx((3 * 11 + 2 + 1) / 5.5)


def test_the_busiest_second_counts_tokens_not_deltas() -> None:
    records = [request(0.0, (0.5, 4), (1.2, 1)), request(0.0, (0.9, 2))]
    assert busiest_second(records, 0.0) == 6
    assert busiest_second([replace(records[0], sized=False)], 0.0) is None


def test_means_and_deviations_over_runs_keep_the_shape() -> None:
    runs = [{"a": 1.0, "n": 3, "b": {"c": 2.0}, "s": "x", "e": None}, {"a": 3.0, "n": 3, "b": {"c": 2.0}, "s": "x"}]
    means, deviations = spread(runs)
    assert means == {"a": 2.0, "n": 3, "b": {"c": 2.0}, "s": "x", "e": None}
    assert deviations["a"] == pytest.approx(statistics.stdev([1.0, 3.0]))
    assert deviations["b"] == {"c": 0.0}
    assert isinstance(means["n"], int)
    assert nested({"p99_ttft_ms": 5.0, "adj_p99_ttft_ms": 6.0, "failed": 0}) == {
        "ttft_ms": {"p99": 5.0, "adj_p99": 6.0}
    }


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_a_ramp_gives_each_gap_the_rate_of_its_place(strategy: str, process: str) -> None:
    """The formulae of `vllm bench serve`, written out with numpy, on many runs: the mean gap is 1 / rate."""
    count, ramp = 5, parse_ramp(f"{strategy}:2:32")
    progress = np.arange(count) / (count - 1)
    rates = 2 + 30 * progress if strategy == "linear" else 2 * 16**progress
    runs = [ramped(count, ramp, process, 4.0, seed) for seed in range(1 if process == "constant" else 4000)]
    gaps = np.diff(np.array(runs), prepend=0.0, axis=1)
    assert gaps.mean(axis=0) * rates == pytest.approx(np.ones(count), rel=1e-12 if process == "constant" else 0.06)
    shape = {"poisson": 1.0, "gamma": 4.0, "constant": np.inf}[process]
    assert ((gaps * rates).std(axis=0)) == pytest.approx(np.full(count, shape**-0.5), rel=0.06)


@pytest.mark.parametrize(
    "text", ["linear", "linear:1", "linear:0:2", "square:1:2", "linear:1:inf", "linear:a:2", "1:2"]
)
def test_a_ramp_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no ramp"):
        parse_ramp(text)


def test_random_prompts_with_another_nonce_begin_otherwise_and_have_the_same_lengths() -> None:
    dataset = open_dataset("random", None, **SIZES)
    first, again, other = (make_jobs(dataset, IDS, 20, 7, nonce) for nonce in ("a", "a", "b"))
    assert first == again
    assert [(job.input_len, job.output_len) for job in first] == [(job.input_len, job.output_len) for job in other]
    assert not {job.prompt[:4] for job in first} & {job.prompt[:4] for job in other}
    assert len({job.salt for job in [*first, *other]}) == 40
    assert all(job.exact for job in first)
    assert {job.salt for job in make_jobs(dataset, IDS, 20, 7, "")} == {""}  # a warm cache was asked for


def test_prefixes_are_shared_and_equally_often() -> None:
    dataset = open_dataset("prefix-repetition", None, **SIZES, prefix_len=16, suffix_len=5, prefixes=3)
    jobs = make_jobs(dataset, IDS, 12, 0, "n")
    beginnings = [job.prompt[:16] for job in jobs]
    assert sorted(beginnings.count(one) for one in set(beginnings)) == [4, 4, 4]
    assert len({job.prompt for job in jobs}) == 12
    assert {job.input_len for job in jobs} == {21}
    assert len({job.salt for job in jobs}) == 1
    assert not set(beginnings) & {job.prompt[:16] for job in make_jobs(dataset, IDS, 12, 0, "m")}


def test_a_file_holds_prompts_chats_or_questions(tmp_path: Path) -> None:
    lines = [
        {"prompt": "One", "output_tokens": 5},
        {"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]},
        {"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": []},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    dataset = open_dataset(str(path), None, **SIZES)
    assert dataset.is_chat
    assert not dataset.exact
    jobs = make_jobs(dataset, [], 6, 0, "n")
    assert [len({str(job.prompt) for job in jobs[i : i + 3]}) for i in (0, 3)] == [3, 3]  # all of them before any again
    assert {job.output_len for job in jobs if job.prompt == "One"} == {5}
    assert {job.output_len for job in jobs if job.prompt != "One"} == {9}
    assert [{"role": "user", "content": "First"}] in [list(job.prompt) for job in jobs]
    assert open_dataset(str(path), True, **SIZES).exact


def test_a_file_of_talks_is_asked_what_people_say_first_for_answers_as_long(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": f"{who} {i}"} for i, who in enumerate(turns)]}

    talks = [
        talk("human", "gpt", "human"),
        talk("system", "user", "chatgpt"),
        talk("gpt", "human"),
        talk(),
        talk("human"),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(talks))
    dataset = open_dataset(str(path), None, **SIZES)
    assert (len(dataset.entries), dataset.skipped) == (3, 2)
    assert [len(one.prompt) for one in dataset.entries] == [1, 2, 1]
    counted = sized(dataset, lambda text: 10 * len(text.split()))
    assert [one.output_len for one in counted.entries] == [20, 20, None]
    jobs = make_jobs(counted, [], 3, 0, "n")
    assert sorted(job.output_len for job in jobs) == [9, 20, 20]  # where no answer is told, the flag's


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1]", "line 2 is not a JSON object"),
        ("{", "line 2 is not a JSON object"),
        ('{"prompt": ""}', "line 2 has no prompt"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "line 2 has no prompt"),
        ('{"conversations": [{"from": "human"}]}', "line 2 has no prompt"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens must be"),
        ('{"prompt": "x", "output_tokens": true}', "output_tokens must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(UsageError, match=says):
        open_dataset(str(path), None, **SIZES)


def test_warm_ups_are_as_long_and_none_of_the_measured_prompts() -> None:
    jobs = make_jobs(Dataset("random", **SIZES), IDS, 10, 0, "n")
    warm = warm_up_jobs(jobs, IDS, 25, "n")
    assert len(warm) == 25
    assert [job.input_len for job in warm[:10]] == [job.input_len for job in jobs]
    assert not {job.prompt[:4] for job in warm} & {job.prompt[:4] for job in jobs}
    assert len({job.prompt for job in warm}) == 25
    chat = warm_up_jobs([Job(({"role": "user", "content": "one two three"},), 50, False)], [], 2, "n")
    assert [len(job.prompt[0]["content"].split()) for job in chat] == [3, 3]  # type: ignore[index, union-attr]
    assert chat[0].output_len <= 16


def ran(traffic: Traffic, jobs: int, send: object = None) -> tuple[list[Record], Client]:
    records: list[Record] = []
    client = Client()

    async def at_once(job: Job, record: Record) -> None:
        await asyncio.sleep(0)

    work = [Job((1,), 1) for _ in range(jobs)]
    clock.run(lambda: drive(send or at_once, work, traffic, records, client, lambda _: None))  # type: ignore[arg-type]
    return records, client


def test_a_closed_loop_never_has_more_in_flight_than_asked() -> None:
    running, most = 0, 0

    async def send(job: Job, record: Record) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    records, client = ran(Traffic(3), 20, send)
    assert (most, len(records)) == (3, 20)
    assert all(record.due is None for record in records)
    assert client.delays == []


def test_an_open_loop_sends_when_due_whatever_has_not_ended() -> None:
    """None of them can end before the last was sent."""
    all_there, sent = asyncio.Event(), 0

    async def send(job: Job, record: Record) -> None:
        nonlocal sent
        sent += 1
        if sent == 5:
            all_there.set()
        await all_there.wait()

    records, client = ran(Traffic(None, (0.0, 0.001, 0.002, 0.003, 0.004)), 5, send)
    due = [record.due for record in records]
    assert [at - due[0] for at in due] == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])  # type: ignore[operator]
    assert all(record.sent >= (record.due or 0.0) for record in records)
    assert len(client.delays) == 5
    assert min(client.delays) >= 0


def test_a_bound_in_an_open_loop_is_kept_and_shows_as_client_queue() -> None:
    running, most = 0, 0

    async def send(job: Job, record: Record) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        record.arrivals.append((record.sent + 0.002, 1))
        record.ended = True
        running -= 1

    records, _ = ran(Traffic(2, (0.0,) * 9), 9, send)
    assert most == 2
    assert records[-1].queued >= 0.004
    assert serving_figures(records, 2)["mean_client_queue_time_ms"] > 0


def test_the_client_calls_itself_the_bound_by_its_lag_or_its_delay() -> None:
    quick, late = [0.0001] * 99, [0.0001] * 99 + [0.01] * 9
    assert Client(quick, quick).figures(0.01)["client_bound"] is False
    assert Client(late, quick).figures(0.01)["client_bound"] is True  # 10 ms of lag, tokens every 10 ms
    assert Client(late, quick).figures(0.2)["client_bound"] is False
    assert Client(quick, [0.02]).figures(0.2)["client_bound"] is True  # sent 20 ms late
    assert Client([], []).figures(None) == {
        "loop_lag_ms_mean": None,
        "loop_lag_ms_p99": None,
        "dispatch_delay_ms_p99": None,
        "client_bound": False,
    }


def test_a_loop_that_is_held_up_measures_its_own_lag() -> None:
    async def send(job: Job, record: Record) -> None:
        await asyncio.sleep(0.02)  # past a beat of the watch
        time.sleep(0.1)
        await asyncio.sleep(0.02)

    _, client = ran(Traffic(1), 1, send)
    assert max(client.lags) > 0.05


async def settled() -> None:
    """Until all that can go on has."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_static_batches_take_what_waits_and_nobody_joins() -> None:
    batches, log = StaticBatches(3), list[tuple[str, int]]()
    gate = [asyncio.Event() for _ in range(7)]

    async def one(i: int) -> None:
        await batches.enter()
        log.append(("in", i))
        await gate[i].wait()
        log.append(("out", i))
        batches.leave()

    async def story() -> None:
        tasks = [asyncio.create_task(one(i)) for i in range(2)]
        await settled()
        assert log == [("in", 0), ("in", 1)]  # at once, although there is room for a third
        tasks += [asyncio.create_task(one(i)) for i in range(2, 7)]
        gate[0].set()
        await settled()
        assert ("in", 2) not in log  # one has ended, the batch has not
        gate[1].set()
        await settled()
        assert [i for what, i in log if what == "in"] == [0, 1, 2, 3, 4]  # first come, first served, at most three
        for event in gate:
            event.set()
        await asyncio.gather(*tasks)

    clock.run(story)
    assert [i for what, i in log if what == "in"] == list(range(7))
