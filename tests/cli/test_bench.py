"""`llmx bench`: the figures are there, defined, counted from ids, and survive an interrupt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmx.bench.stats import PERCENTILES
from llmx.bench.workload import Span, mixed_lengths
from llmx.cli import app

MODEL = "random:tiny"
SMALL = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
RATES = ["-p", "20", "-n", "5", "-r", "3"]
SERVING = ["--requests", "10", "--concurrency", "4", "--input-len", "9:40", "--output-len", "2:8"]


def bench(*flags: str) -> Result:
    return CliRunner().invoke(app, ["bench", MODEL, *SMALL, *flags])


def report(*flags: str) -> dict[str, Any]:
    result = bench("--json", "-", *flags)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_by_default_a_table_is_shown_and_the_last_line_is_the_path_of_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bench(*RATES, *SERVING)
    assert result.exit_code == 0, result.stderr
    path = Path(result.stdout.splitlines()[-1])
    assert path.name.startswith("llmx-bench-random-tiny-")
    assert list(tmp_path.iterdir()) == [tmp_path / path.name]
    assert json.loads(path.read_text())["results"]["serving"]["completed"] == 10
    for words in ("prefill pp20", "decode tg5", "TTFT", "output tokens/s", "measured here, allow"):
        assert words in result.stdout
    assert "decode: 3 of 3" in result.stderr
    assert "serving: 10 of 10 requests done" in result.stderr


def test_the_report_has_rates_latencies_and_what_they_mean() -> None:
    found = report(*RATES, *SERVING, "--seed", "5")
    results = found["results"]
    for part in ("prefill", "decode"):
        rate = results[part]["tokens_per_second"]
        assert len(rate["samples"]) == 3
        assert rate["mean"] == pytest.approx(sum(rate["samples"]) / 3)
        assert rate["sd"] >= 0
        assert results["ceilings"][part]["tokens_per_second"] > 0
    serving = results["serving"]
    lengths = mixed_lengths(10, Span(9, 40), Span(2, 8), seed=5)
    assert (serving["completed"], serving["failed"], serving["num_prompts"]) == (10, 0, 10)
    assert serving["total_input_tokens"] == sum(prompt for prompt, _ in lengths)
    assert serving["total_output_tokens"] == sum(output for _, output in lengths)
    assert serving["output_throughput"] == pytest.approx(serving["total_output_tokens"] / serving["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES)):
            assert serving[f"{figure}_{name}_ms"] >= 0
        assert name in found["definitions"]
    assert serving["mean_e2el_ms"] > serving["mean_ttft_ms"]
    assert serving["cached_tokens"] == 0  # new prompts: the cache was cold
    assert 0.5 < serving["kv_utilisation"] <= 1
    assert 0 < serving["busy_share"] <= 1.01
    assert serving["preemptions"] == 0
    assert serving["most_running_since_start"] == 4
    assert found["seeds"] == {"workload": 5}
    assert found["kernels"]
    assert found["environment"]["torch"]
    assert found["model"]["name"] == MODEL
    assert found["model_defaulted"] is False
    assert results["interrupted"] is False


def test_parts_can_be_left_out() -> None:
    assert set(report("-p", "0", "-n", "4", "-r", "1", "--requests", "0")["results"]) >= {"decode"}
    results = report("-p", "0", "-n", "0", *SERVING)["results"]
    assert "prefill" not in results
    assert "decode" not in results
    assert results["serving"]["completed"] == 10


def test_the_json_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = bench("-p", "8", "-n", "0", "-r", "1", "--requests", "0", "--json", str(path))
    assert result.stdout.splitlines()[-1] == str(path)
    assert json.loads(path.read_text())["command"] == "bench"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--input-len", "9:3"], "--input-len must begin at 1"),
        (["--output-len", "many"], "--output-len must be a length, a range"),
        (["-p", "1024"], "-p 1024 needs a context of 1025 tokens"),
        (["--json", "/dev/null/x.json"], "can't be written"),
        (["--json", "no such folder/x.json"], "can't be written"),
        (["--dtype", "int3"], "--dtype int3 is not built"),
        (["-r", "0"], "-r"),
    ],
)
def test_what_cannot_be_done_is_refused_with_exit_code_2(flags: list[str], says: str) -> None:
    result = bench(*flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_no_model_means_the_demo_and_stderr_says_so(tmp_path: Path) -> None:
    environment = {"LLMX_CACHE": str(tmp_path), "LLMX_DEMO_WHEEL": str(tmp_path / "absent.whl")}
    result = CliRunner().invoke(app, ["bench", "--json", "-"], env=environment)
    assert result.stderr.startswith("No model given: using `demo`")
    assert result.exit_code == 1


def test_bad_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(7))
    script = (
        "import sys; from llmx.cli import app\n"
        f"try: app(['bench', {str(tmp_path / 'bad.gguf')!r}])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("awaited", ["prefill: 2 of", "serving: 2 of"])
def test_an_interrupt_reports_what_was_done_and_exits_130(tmp_path: Path, awaited: str) -> None:
    flags = ["-p", "64", "-n", "2", "-r", "1000" if awaited.startswith("prefill") else "2"]
    serving = ["--requests", "200", "--concurrency", "2", "--input-len", "8", "--output-len", "40"]
    path = tmp_path / "part.json"
    command = [sys.executable, "-m", "llmx.cli", "bench", MODEL, *SMALL, *flags, *serving, "--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(awaited):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out.splitlines()[-1] == str(path)
    assert "Interrupted" in out
    results = json.loads(path.read_text())["results"]
    assert results["interrupted"] is True
    if awaited.startswith("prefill"):
        assert 2 <= len(results["prefill"]["tokens_per_second"]["samples"]) < 1000
        assert results["decode"]["tokens_per_second"]["samples"] == []
    else:
        assert 2 <= results["serving"]["completed"] < 200
        assert results["serving"]["failed"] == 0


def test_a_sweep_has_a_part_for_each_concurrency() -> None:
    sweep = ["-p", "0", "-n", "0", "--requests", "6", "--input-len", "9", "--output-len", "3", "--concurrency", "1,2,3"]
    results = report(*sweep)["results"]
    assert set(results["sweep"]) == {"c1", "c2"}
    assert [results["sweep"][name]["max_concurrency"] for name in ("c1", "c2")] == [1, 2]
    assert results["serving"]["max_concurrency"] == 3
    assert results["sweep"]["c1"]["max_concurrent_requests"] == 1
    assert all(part["cached_tokens"] == 0 for part in (*results["sweep"].values(), results["serving"]))


def test_contenders_take_turns_on_the_same_arrivals() -> None:
    flags = ["--requests", "9", "--input-len", "9:20", "--output-len", "2:6", "--request-rate", "200", "--repeat", "2"]
    results = report("-p", "0", "-n", "0", "--batching", "both", "--static-batch", "4", *flags)["results"]
    continuous, static = results["serving"], results["contenders"]["static"]
    assert (continuous["contender"], static["contender"]) == ("continuous", "static")
    for figures in (continuous, static):
        assert (figures["completed"], figures["failed"], figures["loop"]) == (9, 0, "open")
        assert len(figures["repeats"]) == 2
        assert figures["sd"]["output_throughput"] >= 0
        assert figures["total_output_tokens"] == continuous["total_output_tokens"]
        assert figures["request_rate"] == 200
    assert results["comparison"]["static"]["rounds"] == 2
    ratios = [
        a["p99_e2el_ms"] / b["p99_e2el_ms"] for a, b in zip(continuous["repeats"], static["repeats"], strict=True)
    ]
    assert results["comparison"]["static"]["p99_e2el_lower_by"] == pytest.approx(1 - sum(ratios) / 2)


def test_a_file_of_texts_is_tokenized_here(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "x", "output_tokens": 2}')
    result = bench("-p", "0", "-n", "0", "--dataset", str(path))
    assert result.exit_code == 2
    assert "no tokenizer" in result.stderr  # random weights have none


def test_transformers_is_a_contender_with_its_dtype(tmp_path: Path) -> None:
    from server.model import build

    folder = build(tmp_path / "tiny")
    flags = [
        "-p",
        "0",
        "-n",
        "0",
        "--requests",
        "5",
        "--input-len",
        "9:20",
        "--output-len",
        "2:6",
        "--concurrency",
        "2",
    ]
    command = ["bench", str(folder), *SMALL, *flags, "--baseline", "transformers", "--json", "-"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    results = json.loads(result.stdout)["results"]
    theirs = results["contenders"]["transformers"]
    assert theirs["compute_dtype"] == "float32"
    assert (theirs["completed"], theirs["failed"]) == (5, 0)
    assert theirs["total_output_tokens"] == results["serving"]["total_output_tokens"]
    assert theirs["max_concurrent_requests"] == 2
    assert results["comparison"]["transformers"]["output_throughput_ratio"] > 0


def test_without_transformers_that_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = bench("--baseline", "transformers")
    assert result.exit_code == 2
    assert "needs the package transformers" in result.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batching", "odd"], "--batching odd is not known; there are continuous, static, both."),
        (["--baseline", "odd"], "--baseline odd is not known"),
        (["--baseline", "transformers"], "transformers knows no random:tiny"),
        (["--batching", "both", "--concurrency", "1,2"], "Several --concurrency with several contenders"),
        (["--fail-if", "nonsense"], "is not a condition"),
        (["--slo", "ttft"], "is no limit"),
    ],
)
def test_what_contradicts_itself_is_refused(flags: list[str], says: str) -> None:
    result = bench(*flags)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_gate_here_exits_3_and_names_figures_by_the_parts_they_are_in(tmp_path: Path) -> None:
    small = ["-p", "8", "-n", "0", "-r", "1", "--requests", "4", "--input-len", "9", "--output-len", "3"]
    gates = [
        "--fail-if",
        "prefill.tokens_per_second<1",
        "--fail-if",
        "serving.e2el_ms.p50>0",
        "--fail-if",
        "kv_utilisation<0",
    ]
    path = tmp_path / "r.json"
    result = bench(*small, *gates, "--json", str(path))
    assert result.exit_code == 3, result.stderr
    assert "serving.e2el_ms.p50 is" in result.stderr
    assert [gate["failed"] for gate in json.loads(path.read_text())["results"]["gates"]] == [False, True, False]
