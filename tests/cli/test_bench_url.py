"""`llmx bench --url` against a server that says when it wrote what, and against a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from mock_openai import Mock, Script, Seen, mocking
from typer.testing import CliRunner, Result

from llmx.bench.workload import Span, mixed_lengths
from llmx.cli import app

SIZES = ["--input-len", "20:50", "--output-len", "4:12", "--warmups", "2"]
PROBES = 1  # requests that find out what the server knows
VLLM = (  # keys that `vllm bench serve` writes
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(f"{q}_{name}_ms" for q in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
)


def bench(mock: Mock, *flags: str, json: str = "-") -> Result:
    return CliRunner().invoke(app, ["bench", "--url", mock.url, *SIZES, "--json", json, *flags])


def report(mock: Mock, *flags: str) -> dict[str, Any]:
    result = bench(mock, *flags)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def measured(mock: Mock, count: int) -> list[Seen]:
    return mock.seen[-count:]


def test_times_agree_with_when_the_server_wrote() -> None:
    """The mock's own clock is the oracle, so that a busy machine delays both; the margin is for what lies between."""
    with mocking(Script(ttft=0.03, itl=0.01)) as mock:
        found = report(mock, "--requests", "24", "--concurrency", "4")
    seen = measured(mock, 24)
    ttfts = [1e3 * (one.written[0] - one.received) for one in seen]
    gaps = [1e3 * gap for one in seen for gap in np.diff(one.written)]
    assert found["p50_ttft_ms"] == pytest.approx(float(np.median(ttfts)), rel=0.5)
    assert found["mean_itl_ms"] == pytest.approx(float(np.mean(gaps)), rel=0.3)
    assert found["p50_ttft_ms"] >= 30
    assert found["total_output_tokens"] == sum(one.body["max_tokens"] for one in seen)
    assert found["total_input_tokens"] == sum(len(one.body["prompt"]) for one in seen)
    assert found["results"]["serving"]["steady"]["output_throughput"] > 0


def test_the_report_has_vllms_keys_and_the_same_figures_by_path() -> None:
    with mocking(Script()) as mock:
        found = report(mock, "--requests", "6", "--concurrency", "2", "--slo", "ttft:60000")
    assert set(VLLM) <= found.keys()
    assert found["request_rate"] == "inf"
    assert found["max_concurrency"] == 2
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    serving = found["results"]["serving"]
    assert serving["ttft_ms"]["p99"] == found["p99_ttft_ms"]
    assert serving["slo"]["attainment"] == 1
    assert serving["client"]["loop_lag_ms_p99"] is None or serving["client"]["loop_lag_ms_p99"] >= 0
    assert found["model"] == {"name": "mock", "url": f"{mock.url}/v1/completions"}
    assert {"ttft", "client", "token_source"} <= found["definitions"].keys()


@pytest.mark.parametrize("ids", [True, False])
def test_several_tokens_in_a_chunk_are_several_tokens(ids: bool) -> None:
    with mocking(Script(chunk=4, ids=ids, ttft=0.01, itl=0.008)) as mock:
        found = report(mock, "--requests", "4", "--concurrency", "1", "--output-len", "12")
    assert found["token_source"] == ("ids" if ids else "usage_so_far")
    assert found["total_output_tokens"] == 48
    serving = found["results"]["serving"]
    assert serving["itl_ms"]["mean"] == pytest.approx(serving["icl_ms"]["mean"] / 4, rel=1e-6)
    assert serving["token_count_mismatch"] == 0


def test_a_server_that_knows_nothing_beyond_openais_fields_is_asked_for_nothing_else() -> None:
    with mocking(Script(knows=False, usage="last", tokenizes=False)) as mock:
        found = report(mock, "--requests", "3", "--concurrency", "1")
    assert found["token_source"] == "usage"
    assert found["total_output_tokens"] == sum(one.body["max_tokens"] for one in measured(mock, 3))
    for one in measured(mock, 3):
        assert not {"ignore_eos", "cache_salt", "return_token_ids"} & one.body.keys()
        assert isinstance(one.body["prompt"], str)  # nobody said what its token ids are


def test_where_nobody_tells_a_number_of_tokens_nothing_is_made_up() -> None:
    with mocking(Script(usage="none", ids=False)) as mock:
        result = bench(mock, "--requests", "3")
    assert result.exit_code == 1
    assert "neither token ids nor usage" in result.stderr


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizer_samples import byte_level, save

    return save(byte_level(), tmp_path / "tokenizer")


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_without_a_count_is_tokenized_here(tokenizer: Path, chat: bool) -> None:
    with mocking(Script(usage="none", ids=False, chunk=3, itl=0.003, tokenizes=False)) as mock:
        flags = ["--requests", "4", "--tokenizer", str(tokenizer), *(["--endpoint", "chat"] if chat else [])]
        result = bench(mock, *flags)
        found = report(mock, *flags)
        asked = [one.body for one in measured(mock, 4)]
    assert result.exit_code == 0
    count = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def tokens(text: str) -> int:
        return len(count.encode(text, add_special_tokens=False).ids)

    assert found["token_source"] == "retokenized"
    assert found["tokenizer_id"] == str(tokenizer)
    assert found["total_output_tokens"] == sum(tokens("x" * body["max_tokens"]) for body in asked)
    prompts = [body["messages"][0]["content"] if chat else body["prompt"] for body in asked]
    assert found["total_input_tokens"] == sum(map(tokens, prompts))
    assert found["failed"] == 0
    serving = found["results"]["serving"]
    assert serving["retokenized_output_tokens"] == found["total_output_tokens"]
    assert found["mean_itl_ms"] is None  # nobody knows what a chunk of three letters holds
    assert found["mean_tpot_ms"] > 0


def test_counts_that_lie_apart_are_pointed_out(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with mocking(Script(ids=False, inflates=2)) as mock:
        result = bench(mock, "--requests", "4", "--output-len", "12", "--tokenizer", str(tokenizer), json=str(path))
    found = json.loads(path.read_text())
    text = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("x" * 12, add_special_tokens=False)
    assert found["total_output_tokens"] == 4 * 24
    assert found["retokenized_difference"] == pytest.approx(len(text.ids) / 24 - 1)
    assert f"Note: its texts, tokenized here, are {100 * (1 - len(text.ids) / 24):.1f} % fewer tokens" in result.stdout


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path) -> None:
    with mocking(Script()) as mock:
        result = bench(mock, "--requests", "2", "--tokenizer", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "There is no model" in result.stderr


def test_each_requests_own_times_are_written_when_asked_for() -> None:
    with mocking(Script(ttft=0.01, itl=0.002, refuse=frozenset({PROBES + 2}))) as mock:
        found = report(mock, "--requests", "5", "--save-detailed", "--label", "a", "--metadata", "gpu=none")
    assert (found["label"], found["gpu"]) == ("a", "none")
    lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors")
    assert all(len(found[name]) == 5 for name in (*lists, "generated_texts"))
    whole = [i for i in range(5) if not found["errors"][i]]
    assert len(whole) == 4
    assert [1e3 * np.mean([found["ttfts"][i] for i in whole])] == pytest.approx([found["mean_ttft_ms"]])
    assert sum(found["output_lens"]) == found["total_output_tokens"]
    assert all(len(found["itls"][i]) == found["output_lens"][i] - 1 for i in whole)
    assert all(found["latencies"][i] == pytest.approx(found["ttfts"][i] + sum(found["itls"][i])) for i in whole)
    assert [found["generated_texts"][i] for i in whole] == ["x" * found["output_lens"][i] for i in whole]


def test_the_rate_can_go_up() -> None:
    flags = ["--requests", "6", "--ramp-up", "linear:50:100", "--arrivals", "constant"]
    with mocking(Script()) as mock:
        found = report(mock, *flags)
    assert (found["ramp_up_strategy"], found["ramp_up_start_rps"], found["ramp_up_end_rps"]) == ("linear", 50, 100)
    assert found["request_rate"] == "inf"
    assert found["completed"] == 6


def test_the_prefix_cache_is_cold_unless_asked_otherwise() -> None:
    with mocking(Script()) as mock:
        for _ in range(2):
            report(mock, "--requests", "5", "--concurrency", "2")
        cold = [one.body for one in mock.seen]
        report(mock, "--requests", "5", "--concurrency", "2", "--warm-prefix")
        report(mock, "--requests", "5", "--concurrency", "2", "--warm-prefix")
        first, again = measured(mock, 5 + 2 + PROBES + 5)[:5], measured(mock, 5)
    prompts = [tuple(body["prompt"]) for body in cold if body["prompt"] != "Hello"]
    assert len({prompt[:8] for prompt in prompts}) == len(prompts) == 2 * (2 + 5)  # no warm-up is measured either
    assert len({body["cache_salt"] for body in cold if body["prompt"] != "Hello"}) == 14
    assert sorted(one.body["prompt"] for one in first) == sorted(one.body["prompt"] for one in again)
    assert not any("cache_salt" in one.body for one in again)


def test_a_hit_rate_of_a_percent_is_pointed_out(tmp_path: Path) -> None:
    with mocking(Script(cached=5)) as mock:
        result = bench(mock, "--requests", "4", "--input-len", "20", json=str(tmp_path / "r.json"))
    assert "Note: part of the prompts came from the prefix cache" in result.stdout
    assert json.loads((tmp_path / "r.json").read_text())["cache_hit_rate"] == pytest.approx(0.25)


def test_failures_are_kept_with_their_reasons_and_reach_the_adjusted_tail() -> None:
    warm_ups = PROBES + 2
    script = Script(refuse=frozenset({warm_ups + 1}), breaks=frozenset({warm_ups + 3}), drops=frozenset({warm_ups + 4}))
    with mocking(script) as mock:
        found = report(mock, "--requests", "8", "--concurrency", "1")
    assert (found["completed"], found["failed"]) == (5, 3)
    assert sorted(found["results"]["serving"]["errors"]) == [
        "429: Too many.",
        "The engine broke.",
        "the connection was closed before the answer ended",
    ]
    assert found["adj_p99_ttft_ms"] == "inf"
    assert found["p99_ttft_ms"] < 60000


def test_an_open_loop_reports_what_the_bound_held_back() -> None:
    flags = ["--requests", "12", "--request-rate", "inf", "--max-concurrency", "2", "--arrivals", "constant"]
    with mocking(Script(ttft=0.01, itl=0.002)) as mock:
        found = report(mock, *flags)
    assert found["max_concurrent_requests"] <= 2
    assert found["mean_client_queue_time_ms"] > 10
    held_back = found["mean_e2el_including_client_queue_ms"] - found["mean_e2el_ms"]
    assert held_back == pytest.approx(found["mean_client_queue_time_ms"])
    assert found["results"]["serving"]["client"]["dispatch_delay_ms_p99"] is not None


def test_chats_are_asked_as_chats() -> None:
    with mocking(Script()) as mock:
        found = report(mock, "--requests", "3", "--endpoint", "chat")
        assert found["endpoint_type"] == "openai-chat"
        for one in measured(mock, 3):
            assert one.path == "/v1/chat/completions"
            assert isinstance(one.body["messages"][0]["content"], str)
            assert one.body["ignore_eos"] is True


def test_a_question_file_is_asked_until_the_model_ends(tmp_path: Path) -> None:
    lines = [{"question_id": i, "category": "qa", "turns": [f"Question {i}?", "And?"]} for i in range(3)]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with mocking(Script(stop_after=3)) as mock:
        found = report(mock, "--requests", "6", "--dataset", str(path))
        asked = [one.body for one in measured(mock, 6)]
    assert sorted(body["messages"][0]["content"] for body in asked) == sorted(2 * [f"Question {i}?" for i in range(3)])
    assert all("ignore_eos" not in body and body["max_tokens"] == 12 for body in asked)
    assert found["total_output_tokens"] == 18
    assert found["failed"] == 0
    assert found["results"]["serving"]["osl_mismatch"] == 6


def test_a_dataset_of_the_hub_is_asked_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmx.formats import hub_fetch

    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": "a", "conversations": talk}, {"id": "b", "conversations": []}], indent=2))
    monkeypatch.setattr(hub_fetch, "data_file", lambda repo, file, revision: path)
    with mocking(Script()) as mock:
        found = report(mock, "--requests", "2", "--dataset", "hf:org/name/talks.json")
        asked = [one.body["messages"] for one in measured(mock, 2)]
    assert asked == [[{"role": "user", "content": "Why?"}]] * 2
    serving = found["results"]["serving"]
    assert (serving["dataset"], serving["entries"], serving["entries_skipped"]) == ("hf:org/name/talks.json", 1, 1)


def test_client_processes_share_the_requests() -> None:
    with mocking(Script(ttft=0.002)) as mock:
        found = report(mock, "--requests", "9", "--concurrency", "3", "--client-procs", "2")
        prompts = {tuple(one.body["prompt"]) for one in measured(mock, 9)}
    assert found["completed"] == 9
    assert len(prompts) == 9
    assert found["max_concurrent_requests"] <= 3


def test_the_key_goes_along_and_a_wrong_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMX_API_KEY", "right")
    with mocking(Script(key="right")) as mock:
        found = report(mock, "--requests", "2")
        assert "right" not in json.dumps(found)
        monkeypatch.setenv("LLMX_API_KEY", "wrong")
        result = bench(mock, "--requests", "2")
    assert result.exit_code == 1
    assert "401: Wrong key." in result.stderr
    assert "LLMX_API_KEY" in result.stderr


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_own_server_counts_as_the_bench_does(tmp_path: Path, endpoint: str) -> None:
    from server.model import build
    from server.running import running

    from llmx.llm import LLM

    with LLM(str(build(tmp_path / "tiny")), device="cpu", dtype="float32", threads=1) as llm, running(llm) as served:
        before = llm.metrics().generated_tokens
        sizes = ["--input-len", "20:50", "--output-len", "4:12", "--requests", "8", "--concurrency", "3"]
        command = ["bench", "--url", served.url, *sizes, "--endpoint", endpoint, "--warmups", "0", "--json", "-"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
        generated = llm.metrics().generated_tokens - before
    found = json.loads(result.stdout)
    assert (found["completed"], found["failed"]) == (8, 0)
    assert found["total_output_tokens"] == generated - 8  # the probe's
    assert found["token_source"] in ("ids", "usage_so_far")
    serving = found["results"]["serving"]
    assert (serving["osl_mismatch"], serving["token_count_mismatch"], serving["cached_tokens"]) == (0, 0, 0)
    assert 0 < serving["busy_share"] <= 1.05
    assert serving["preemptions"] == 0
    if endpoint == "completions":
        assert found["total_input_tokens"] == sum(
            prompt for prompt, _ in mixed_lengths(8, Span(20, 50), Span(4, 12), 0)
        )


def test_nobody_at_the_url_is_said_in_a_sentence() -> None:
    with mocking(Script()) as mock:
        pass
    result = bench(mock, "--requests", "2")
    assert result.exit_code == 1
    assert "can't be reached: Connection refused." in result.stderr
    host = mock.url.removeprefix("http://")
    result = CliRunner().invoke(app, ["bench", "--url", host, "--requests", "2", "--json", "-"])
    assert f"error: {host} can't be reached: Connection refused." in result.stderr


@pytest.mark.parametrize("procs", ["1", "2"])
def test_an_interrupt_leaves_a_report(tmp_path: Path, procs: str) -> None:
    path = tmp_path / "part.json"
    with mocking(Script(ttft=0.01, itl=0.01)) as mock:
        flags = ["--requests", "500", "--concurrency", "2", "--client-procs", procs, *SIZES, "--json", str(path)]
        command = [sys.executable, "-m", "llmx.cli", "bench", "--url", mock.url, *flags]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:  # fmt: skip
            while len(mock.seen) < PROBES + 2 + 8 and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out
    found = json.loads(path.read_text())
    assert found["results"]["interrupted"] is True
    assert 2 <= found["completed"] < 500
    assert found["failed"] == 0


def test_a_gate_that_fails_exits_3_after_the_report_and_says_by_how_much(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with mocking(Script(ttft=0.005)) as mock:
        result = bench(mock, "--requests", "4", "--fail-if", "ttft_ms.p99>1", "--fail-if", "failed>0", json=str(path))
        assert result.exit_code == 3
        assert "ttft_ms.p99 is" in result.stderr
        assert "above the bound 1" in result.stderr
        gates = json.loads(path.read_text())["results"]["gates"]
        assert [gate["failed"] for gate in gates] == [True, False]
        assert bench(mock, "--requests", "4", "--fail-if", "p99_ttft_ms<1").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fail-if", "ttft_ms.p99>"], "is not a condition"),
        (["--fail-if", "ttft.p98>5"], "no figure ttft.p98"),
        (["--against", "absent.json"], "absent.json can't be read"),
        (["--max-regression", "lots"], "--max-regression must be a share"),
        (["--request-rate", "x"], "--request-rate must be"),
        (["--concurrency", "1,0"], "--concurrency must be"),
        (["--arrivals", "poisson"], "go with --request-rate"),
        (["--request-rate", "1", "--arrivals", "odd"], "--arrivals odd is not known"),
        (["--endpoint", "odd"], "--endpoint odd is not known"),
        (["--requests", "0"], "nothing to measure"),
    ],
)
def test_what_is_malformed_is_refused_before_anything_is_sent(flags: list[str], says: str) -> None:
    with mocking(Script()) as mock:
        result = bench(mock, "--requests", "4", *flags)
        assert result.exit_code == 2
        assert says in result.stderr
        assert mock.connections == 0


def test_worse_than_an_earlier_report_exits_3(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    with mocking(Script(ttft=0.02, itl=0.02)) as mock:
        assert bench(mock, "--requests", "4", "--concurrency", "1", json=str(old)).exit_code == 0
    with mocking(Script(ttft=0.8, itl=0.02)) as mock:
        new = tmp_path / "new.json"
        flags = ["--requests", "4", "--concurrency", "1", "--against", str(old)]
        result = bench(mock, *flags, "--max-regression", "900%", json=str(new))
        assert result.exit_code == 3, result.stdout
        assert "serving.ttft_ms.mean went from" in result.stderr
        assert json.loads(new.read_text())["against"]["worse"]
    assert CliRunner().invoke(app, ["compare", str(old), str(new), "--fail-on", "900%"]).exit_code == 3
    assert CliRunner().invoke(app, ["compare", str(new), str(old), "--fail-on", "900%"]).exit_code == 0
