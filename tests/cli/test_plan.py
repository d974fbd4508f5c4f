"""`llmx plan`: from a config to a verdict, without weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmx.cli import app
from tests.unit.test_planning import DEEPSEEK_V3, LLAMA_70B


def plan(*flags: str) -> Result:
    return CliRunner().invoke(app, ["plan", *flags])


def report(*flags: str) -> dict[str, Any]:
    result = plan(*flags, "--json", "-")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path, LLAMA_70B)


def test_a_person_sees_sizes_a_table_and_a_verdict(llama: str) -> None:
    result = plan(llama, "--hardware", "4xA100-80G", "--concurrency", "16", "--explain")
    assert result.exit_code == 0, result.stderr
    for words in ("70.55 B parameters", "1.34 GB for 4096 tokens", "TP 4, PP 1, DP 1, EP 1", "It fits. Best:"):
        assert words in result.stdout
    assert "161 all-reduces x (2 x 3/4 x" in result.stdout
    assert "max(28.2 GB / 1.63 TB/s, 451 Gflop / 187 Tflop/s)" in result.stdout  # the MLPs of a decode step


def test_what_does_not_fit_is_said_with_what_to_change(llama: str) -> None:
    result = plan(llama, "--hardware", "H100", "--concurrency", "64")
    assert result.exit_code == 0, result.stderr
    assert "It does not fit: at least" in result.stdout
    assert "1. store the weights in fp8 (--quant fp8): saves 63.72 GiB a device, not enough alone" in result.stdout
    assert "(--hardware 4xH100): saves" in result.stdout


def test_the_report_holds_every_figure(llama: str, tmp_path: Path) -> None:
    found = report(llama, "--hardware", "8xH100", "--context", "8192", "--concurrency", "4", "--input-len", "6000")
    results = found["results"]
    assert results["kv"]["bytes_per_token"] == 327_680
    assert results["kv"]["bytes"] == 4 * 8192 * 327_680
    assert results["weights"]["bytes"]["total"] == 2 * results["weights"]["parameters"]
    assert results["load"] == {"context": 8192, "concurrency": 4, "input_len": 6000, "output_len": 2192}
    assert results["fits"] is True
    assert results["best"]["tp"] == 8
    total = sum(term["ms"] for term in results["best"]["terms"]["prefill"])
    assert total == pytest.approx(results["best"]["ttft_ms"])
    assert found["command"] == "plan"
    path = tmp_path / "plan.json"
    assert plan(llama, "--hardware", "8xH100", "--json", str(path)).exit_code == 0
    assert json.loads(path.read_text())["results"]["fits"] is True


def test_schemes_and_dtypes_of_the_cache_are_planned(llama: str) -> None:
    found = report(llama, "--hardware", "H100", "--quant", "awq", "--kv-dtype", "fp8")["results"]
    assert found["fits"] is True
    assert found["kv"]["element_bytes"] == 1
    assert found["weights"]["stored"] == "awq"
    assert not any("can't read" in note for note in found["notes"])
    assert "llmx can't store keys and values in fp8 yet, but in int8" in found["notes"]
    scaled = report(llama, "--hardware", "H100", "--kv-dtype", "int8")["results"]["kv"]
    assert scaled["bytes_per_token"] == found["kv"]["bytes_per_token"] + 80 * 8 * 2 * 4


def test_a_family_that_does_not_run_yet_is_planned_and_said(tmp_path: Path) -> None:
    flags = (folder(tmp_path, DEEPSEEK_V3), "--hardware", "16x8xH800", "--concurrency", "256", "--quant", "fp8-block")
    found = report(*flags)
    assert found["model"]["runs"] is False
    assert found["results"]["kv"]["bytes_per_token"] == 70_272
    assert any("llmx can't run this family yet" in note for note in found["results"]["notes"])
    assert found["results"]["best"]["ep"] == 128


def test_the_config_alone_is_enough_and_torch_is_not_needed(llama: str) -> None:
    script = (
        "import sys; from llmx.cli import app\n"
        f"try: app(['plan', {llama + '/config.json'!r}, '--hardware', '4xH100', '--json', '-'])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "0 False\n"


def test_this_machine_is_measured(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = folder(tmp_path, LLAMA_70B | small | {"intermediate_size": 96, "vocab_size": 300})
    flags = (path, "--threads", "1", "--context", "64", "--concurrency", "2")
    found = report(*flags)["results"]
    assert found["hardware"]["measured"] is True
    assert found["hardware"]["memory_bytes"] > 2**20
    assert found["fits"] is True
    best = found["best"]
    assert min(best["ttft_ms"], best["tbt_ms"], best["output_throughput"]) > 0
    assert any(re.search(r"holds [1-4]\.\d\d bytes of each weight", note) for note in found["notes"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hardware", "3xH1000"), "--hardware 3xH1000 is not known"),
        (("--quant", "int3"), "--quant int3 is not known"),
        (("--kv-dtype", "int3"), "--kv-dtype int3 is not known"),
        (("--context", "10000"), "--context 10000 is more than the 8192 positions"),
        (("--input-len", "4000", "--output-len", "200"), "are more than --context 4096"),
        (("--concurrency", "0"), "concurrency"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_exit_code_2(llama: str, flags: tuple[str, ...], says: str) -> None:
    hardware = () if "--hardware" in flags else ("--hardware", "4xH100")
    result = plan(llama, *hardware, *flags)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(7))
    result = plan(str(tmp_path / "bad.gguf"), "--hardware", "H100")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
