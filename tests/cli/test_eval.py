"""`llmx eval`: the report, its gates, logits files between runs, tasks, and what it refuses at once."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.model import CONTEXT, build
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.evals.logits_file import LogitsFile
from llmx.evals.tasks import metrics

SMALL = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--ctx", "32"]
RANDOM = "random:tiny"
SAYING = "A stitch in time saves nine; the quick brown fox jumps over the lazy dog. "


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SAYING * 12 + "\n")
    return path


def run(*flags: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, flags), *SMALL])


def sha256(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def results(*flags: object) -> dict[str, Any]:
    result = run(*flags, "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["command"] == "eval"
    assert document["schema_version"]
    found: dict[str, Any] = document["results"]
    return found


def test_a_text_gives_its_perplexity_and_what_it_was(model: Path, text: Path) -> None:
    from hashlib import sha256

    found = results(model, "--text", text)
    about = found["text"]
    assert about["sha256"] == sha256(text.read_bytes()).hexdigest()
    assert (about["source"], about["protocol"], about["ctx"]) == ("file", "llama.cpp", 32)
    assert about["windows"] == about["windows_asked"] == about["tokens"] // 32
    assert about["scored"] == about["windows"] * 15
    assert found["perplexity"]["mean"] == pytest.approx(math.exp(found["nll"]["mean"]))
    assert found["perplexity"]["mean"] > 10
    assert found["perplexity"]["se"] > 0
    assert "kld" not in found
    assert results(model, "--text", text, "--chunks", 2)["text"]["scored"] == 30
    assert results(model, "--text", text, "--protocol", "hf", "--chunks", 2)["text"]["scored"] == 62


def test_without_a_text_the_model_writes_one_that_depends_on_the_seed_alone() -> None:
    first, again, other = (results(RANDOM, "--chunks", 3, "--seed", seed) for seed in (1, 1, 2))
    assert (first["text"]["source"], first["text"]["tokens"], first["text"]["seed"]) == ("generated", 96, 1)
    assert (first["text"]["cached"], again["text"]["cached"]) == (False, True)
    assert first["text"]["sha256"] == again["text"]["sha256"] != other["text"]["sha256"]
    assert first["perplexity"] == again["perplexity"]
    assert RANDOM in first["text"]["name"]


def test_a_reference_gives_the_distance_and_its_logits_can_be_kept(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "logits"
    flags = [model, "--text", text, "--chunks", 3, "--kv-cache-dtype", "bfloat16"]
    found = results(*flags, "--reference", model, "--save-logits", path)
    assert found["kld"]["mean"] == pytest.approx(0.0, abs=1e-4)
    assert found["same_top"]["share"] > 0.9
    assert found["text"]["tokenised_alike"] is True
    assert found["reference"]["model"] == str(model)
    assert found["reference"]["sha256"] == sha256(model)
    assert LogitsFile(path).layout.chunks == 3
    again = results(model, "--logits", path, "--kv-cache-dtype", "bfloat16")
    assert again["text"]["source"] == "logits file"
    for part in ("perplexity", "kld", "delta_p", "ln_ppl_ratio"):
        assert again[part] == found[part]
    full = results(model, "--logits", path)  # the cache in 32 bits against one of 16
    assert full["kld"]["mean"] > 2 * abs(found["kld"]["mean"])
    assert full["perplexity"]["mean"] != found["perplexity"]["mean"]


def test_the_table_says_what_was_run_and_the_json_goes_where_it_is_asked_to(
    model: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    result = run(model, "--text", text, "--chunks", 2, "--reference", model, "--json", path)
    assert result.exit_code == 0, result.stderr
    for words in ("perplexity", "KL divergence, p99.9", "same likeliest token", "Δp, rms", "30 positions scored"):
        assert words in result.stdout
    assert result.stdout.splitlines()[-1] == str(path)
    assert "2 of 2 windows: perplexity" in result.stderr
    document = json.loads(path.read_text())
    assert document["model"]["architecture"] == "LlamaForCausalLM"
    assert document["model"]["sha256"] == sha256(model)
    assert "kld" in document["definitions"]
    assert document["kernels"]


def test_gates_fail_with_3_after_the_report_is_written(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    gates = ["--fail-if", "perplexity>2", "--fail-if", "text.scored<30"]
    result = run(model, "--text", text, "--chunks", 2, "--json", path, *gates)
    assert result.exit_code == 3
    found = json.loads(path.read_text())["results"]
    value = found["perplexity"]["mean"]
    assert f"perplexity is {value:.6g}: {value - 2:.4g}" in result.stderr
    assert "above the bound 2 (perplexity>2)" in result.stderr
    assert "text.scored" not in result.stderr.split("error:")[1]
    assert [gate["failed"] for gate in found["gates"]] == [True, False]
    assert run(model, "--text", text, "--chunks", 2, "--fail-if", "perplexity<2").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fail-if", "perplexity"], "'perplexity' is not a condition"),
        (["--fail-if", "perplexity>>1"], "is not a condition"),
        (["--fail-if", "perplexty>1"], "close: perplexity"),
        (["--fail-if", "kld.mean>1"], "needs a reference"),
        (["--protocol", "gptq"], "--protocol gptq is not known"),
        (["--protocol", "hf", "--reference", RANDOM], "reference logits hold the second half"),
        (["--protocol", "hf", "--save-logits", "x"], "reference logits hold the second half"),
        (["--reference", RANDOM, "--logits", "x"], "--reference computes what --logits brings"),
        (["--text", "a", "--dataset", "b"], "--text and --dataset are two texts"),
        (["--text", "no such file"], "can't be read: No such file"),
        (["--text", sys.executable], "is not UTF-8 text"),
        (["--text", os.devnull], "holds no text"),
        (["--logits", "no such file"], "can't be read: No such file"),
        (["--logits", __file__], "does not begin with _logits_"),
        (["--logits", __file__, "--text", __file__], "--logits brings its own text"),
        (["--text", __file__], "random:tiny has no tokenizer"),
        (["--dataset", "hf:wikitext"], "names no file of a data set"),
        (["--dataset", "wikitext"], "can't be read"),
        (["--tasks", " , "], "--tasks names no task"),
        (["--json", "/no such folder/x"], "can't be written"),
        (["--save-logits", "/no such folder/x"], "can't be written"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype int3 is not built"),
    ],
)
def test_what_cannot_be_done_is_refused_with_exit_code_2(flags: list[str], says: str) -> None:
    result = run(RANDOM, *flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_windows_longer_than_the_model_s_context_or_than_the_text_are_refused(model: Path, text: Path) -> None:
    flags = ["eval", str(model), "--text", str(text), *SMALL, "--ctx", str(CONTEXT + 1)]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 2
    assert f"--ctx {CONTEXT + 1} is more than the {CONTEXT} positions" in result.stderr
    text.write_text("short")
    result = run(model, "--text", text)
    assert result.exit_code == 2
    assert "a window of 32 needs as many" in result.stderr


def test_logits_of_another_context_or_vocabulary_are_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "logits"
    rows = 16 - 1 - 8
    path.write_bytes(b"_logits_" + struct.pack("<Iii", 16, 10, 1) + bytes(4 * 16 + rows * (4 + 10) * 2))
    result = run(model, "--logits", path)
    assert result.exit_code == 2
    assert f"--ctx 32: {path} was computed with 16" in result.stderr
    result = CliRunner().invoke(app, ["eval", str(model), "--logits", str(path), *SMALL[:-2]])
    assert result.exit_code == 2
    assert "the reference logits have 10" in result.stderr


def test_bad_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(7))
    (tmp_path / "logits").write_bytes(b"_logits_")
    for flags in ([str(tmp_path / "bad.gguf")], [RANDOM, "--logits", str(tmp_path / "logits")]):
        script = (
            "import sys; from llmx.cli import app\n"
            f"try: app(['eval', *{flags!r}])\n"
            "except SystemExit as end: code = end.code\n"
            "print(code, 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "2 False\n", done.stderr
        assert done.stderr.startswith("error: ")


def test_an_interrupt_reports_the_windows_done_and_exits_130(model: Path, tmp_path: Path) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "part.json"
    text.write_text(SAYING * 2000)
    flags = ["--text", str(text), "--json", str(path), "--max-num-batched-tokens", "32", "--fail-if", "perplexity>1"]
    command = [sys.executable, "-m", "llmx.cli", "eval", str(model), *SMALL, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " 3 of " in line:
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    found = json.loads(path.read_text())["results"]
    assert found["interrupted"] is True
    assert 3 <= found["text"]["windows"] < found["text"]["windows_asked"]
    assert found["perplexity"]["mean"] > 1
    assert "Interrupted: these are the figures up to there." in stdout


def test_a_data_set_of_the_hub_that_is_in_its_cache_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmx.formats import hub_fetch

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": SAYING}) + "\n" for _ in range(6)))

    def download(repo: str, name: str, revision: str) -> Path:
        assert (repo, name, revision) == ("some/set", "data/rows.jsonl", "v1")
        return file

    monkeypatch.setattr(hub_fetch, "data_file", download)
    found = results(model, "--dataset", "some/set@v1:data/rows.jsonl")
    assert found["perplexity"] == results(model, "--dataset", file)["perplexity"]
    assert found["text"]["bytes"] == len("\n\n".join([SAYING] * 6))
    assert (found["text"]["source"], found["text"]["name"]) == ("dataset", "some/set@v1:data/rows.jsonl")
    file.write_text('{"words": 1}\n')
    result = run(model, "--dataset", "some/set@v1:data/rows.jsonl")
    assert result.exit_code == 2
    assert "line 1: no object with the text 'text'" in result.stderr


def test_a_data_set_that_nobody_has_is_said() -> None:
    result = run(RANDOM, "--dataset", "some/set:rows.txt")  # tests are offline
    assert result.exit_code == 1
    assert "HF_HUB_OFFLINE forbids to fetch it" in result.stderr


def test_tasks_without_lm_eval_name_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(RANDOM, "--tasks", "arc_easy")
    assert result.exit_code == 2
    assert "--tasks needs lm-eval, which is not installed." in result.stderr
    assert "pip install 'llmx[eval]'" in result.stderr


def test_lm_eval_s_figures_become_ours() -> None:
    said = {
        "results": {
            "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.6},
            "gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A", "name": "gsm8k"},
        },
        "n-samples": {"arc": {"original": 100, "effective": 20}},
        "n-shot": {"arc": 0, "gsm8k": 5},
    }
    assert metrics(said) == {
        "arc": {
            "acc": {"mean": 0.5, "se": 0.1},
            "acc_norm": {"mean": 0.6, "se": None},
            "samples": 20,
            "few_shot": 0,
        },
        "gsm8k": {"exact_match_strict-match": {"mean": 0.25, "se": None}, "samples": None, "few_shot": 5},
    }


def test_the_server_of_the_tasks_is_ours_alone_and_ends_with_them(model: Path) -> None:
    import urllib.error
    import urllib.request

    from llmx.config import EngineConfig
    from llmx.evals.tasks import _length, _served

    lines: list[str] = []
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", threads=1)
    with _served(config, lines.append) as (url, key):
        assert _length(url, key) == CONTEXT
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{url}/v1/models", timeout=60)
        assert error.value.code == 401
        error.value.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/v1/models", timeout=60)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    from llmx.config import EngineConfig
    from llmx.errors import LlmxError
    from llmx.evals.tasks import _served

    with (
        pytest.raises(LlmxError, match=r"did not start: .*no model"),
        _served(EngineConfig(model=str(tmp_path / "absent")), lambda line: None),
    ):
        pass


def test_tasks_are_run_against_our_server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: pip install 'llmx[eval]'")
    rows = [{"question": "A stitch in time saves", "choices": [" nine", " ten"], "answer": 0}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stitch.yaml").write_text(
        f"task: stitch\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    command = [sys.executable, "-m", "llmx.cli", "eval", str(model), *SMALL, "--tasks", "stitch"]
    done = subprocess.run(
        [*command, "--tasks-path", str(tmp_path), "--json", "-", "--tasks-limit", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]["tasks"]["stitch"]
    assert found["acc"]["mean"] in (0.0, 1.0)
    assert found["samples"] == 2
