"""`llmx inspect`: what it prints, its report and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quantised import twins
from tiny_models import every_tiny, make
from typer.testing import CliRunner, Result

from llmx.cli import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in AWQ."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    return twins(make(tiny, folder / "source"), "awq", folder)[0]


@pytest.fixture
def llmx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_tensors_totals_and_settings_are_listed(llmx: Callable[..., Result], model: Path) -> None:
    ran = llmx(model)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    # 64 x 64 weights of 4 bits, and for each 32 a scale of 16 bits and a zero point of 4
    row = next(line for line in lines if "model.layers.*.self_attn.q_proj" in line)
    assert all(text in row for text in ("0-2", "64×64", "AWQ 4 bits, groups of 32", "4.62"))
    assert any(line.startswith("│ attention") and "36,864" in line for line in lines)
    assert "22 in AWQ 4 bits, groups of 32" in ran.stdout
    assert "tensor-parallel ranks in llmx: 1, 2, 4 of 1, 2, 4, 8 fit" in ran.stdout
    assert lines[-1] == "0 errors, 0 warnings"

    some = llmx(model, "--tensors", "*.1.mlp.up_proj.*")
    listed = [line.split()[1] for line in some.stdout.splitlines() if "up_proj" in line]
    assert listed == [f"model.layers.1.mlp.up_proj.{part}" for part in ("qweight", "qzeros", "scales")]
    none = llmx(model, "--tensors", "nothing*")
    assert none.exit_code == 2
    assert "--tensors nothing* matches none of" in none.stderr


def test_the_report_has_every_tensor_and_the_exit_code_follows_the_level(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(4, 4)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert llmx(folder).exit_code == 0
    warned = llmx(folder, "--fail-on", "warning")
    assert warned.exit_code == 3
    assert "faults of level warning or worse" in warned.stderr

    tensors["model.norm.weight"][3] = torch.nan
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    ran = llmx(folder, "--json", "-", "--stats")
    assert ran.exit_code == 3
    assert "has 1 fault of level error" in ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    results = report["results"]
    assert report["command"] == "inspect"
    assert report["model"]["architecture"] == "LlamaForCausalLM"
    assert len(report["model"]["sha256"]) == 64
    assert {one["name"] for one in results["tensors"]} == set(tensors)
    assert results["totals"]["all"]["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert results["settings"]["quant_method"] == "awq"
    assert (results["errors"], results["warnings"]) == (1, 2)
    (error,) = [one for one in results["findings"] if one["level"] == "error"]
    assert (error["check"], error["tensor"]) == ("values", "model.norm.weight")
    assert "at [3]" in error["message"]
    assert error["hint"]
    (norm,) = [one for one in results["tensors"] if one["name"] == "model.norm.weight"]
    assert norm["stats"]["not_finite"] == 1


def test_headers_alone_are_read_without_torch(model: Path) -> None:
    code = (
        "import sys; from llmx.cli import app\n"
        "try: app(['inspect', sys.argv[1], '--quick'])\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "22 in AWQ 4 bits" in ran.stdout
    assert "not checked: numbers" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fail-on", "note"), "--fail-on must be warning or error, not 'note'"),
        (("--quick", "--stats"), "--quick reads no numbers"),
        (("--json", "/nowhere/at/all.json"), "can't be written"),
    ],
)
def test_flags_that_can_not_be_are_refused(
    llmx: Callable[..., Result], model: Path, arguments: tuple[str, ...], says: str
) -> None:
    ran = llmx(model, *arguments)
    assert ran.exit_code == 2
    assert says in " ".join(ran.stderr.replace("│", " ").split())


def test_the_demo_has_no_fault(llmx: Callable[..., Result], demo: Path) -> None:
    ran = llmx(demo, "--quick", "--fail-on", "warning")
    assert ran.exit_code == 0, ran.output
    assert "210 in Q4_1, 1 in Q8_0" in ran.stdout
