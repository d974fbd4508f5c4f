"""`llmx convert-hf`: what it prints and leaves behind, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import write_gguf
from tiny_models import every_tiny, make
from tokenizer_samples import byte_level, gguf_metadata
from typer.testing import CliRunner, Result

from llmx.cli import app

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    tiny = replace(tiny, options={**tiny.options, "vocab_size": 421})
    made, path = make(tiny, folder / "tiny"), folder / "little.Q8_0.gguf"
    metadata = gguf_metadata(byte_level(), **{"chat_template": "{{ messages[0].content }}"})
    write_gguf(path, tiny.architecture, "llama", made.config, made.tensors, metadata, kind="Q8_0")
    return path


@pytest.fixture
def llmx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: RUNNER.invoke(app, [str(argument) for argument in arguments])


def test_the_folder_is_printed_and_runs(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx("convert-hf", model, "--dtype", "float32", "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == "little.Q8_0-hf"
    assert "writing model.safetensors (1 of 1)" in ran.stderr
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["dtype"] == "float32"
    assert results["texts_with_other_ids"] == 0
    assert results["source_bytes"] < results["bytes"]
    folder = tmp_path / "little.Q8_0-hf"
    assert sorted(path.name for path in folder.iterdir()) == results["files"]
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(results["files"])
    said = [
        llmx(
            "generate", "-m", name, "--raw", "--temperature", "0", "--max-tokens", "8", "--activations", "bf16", "Hello"
        )
        for name in (model, folder)
    ]
    assert said[0].exit_code == 0, said[0].output
    assert said[0].stdout == said[1].stdout


def test_what_is_there_is_replaced_only_when_asked(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    assert llmx("convert-hf", model, "-o", "out").exit_code == 0
    (tmp_path / "out" / "mine").write_text("x")
    again = llmx("convert-hf", model, "-o", "out")
    assert again.exit_code == 2
    assert "out is there already" in again.stderr
    assert (tmp_path / "out" / "mine").is_file()
    forced = llmx("convert-hf", model, "-o", "out", "--force", "--dtype", "float32", "--shard-gb", "0.0001")
    assert forced.exit_code == 0, forced.output
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert not (tmp_path / "out" / "mine").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("x")
    other = llmx("convert-hf", model, "-o", "notes", "--force")
    assert other.exit_code == 2
    assert "no model's folder" in other.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["notes", "out"]


def test_a_dry_run_says_sizes_and_leaves_nothing(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx("convert-hf", model, "--dry-run", "--dtype", "float16")
    assert ran.exit_code == 0, ran.output
    assert "little.Q8_0-hf: 30 tensors in float16" in ran.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("FILE", "--dtype", "int8"), "--dtype must be auto, float32, float16, bfloat16"),
        (("FILE", "--shard-gb", "0"), "--shard-gb must be a number of GB above 0, not 0"),
        (("FILE", "--shard-gb", "inf"), "--shard-gb must be a number of GB above 0, not inf"),
        (("not-there.gguf",), "not-there.gguf"),
        (("FOLDER",), "is a Hugging Face folder already"),
        (("FILE", "-o", "no/such/place/out", "--json", "no/report.json"), "no/report.json"),
    ],
)
def test_what_can_not_be_is_one_sentence(
    llmx: Callable[..., Result], model: Path, arguments: tuple[str, ...], says: str
) -> None:
    named = {"FILE": str(model), "FOLDER": str(model.with_name("tiny"))}
    ran = llmx("convert-hf", *(named.get(argument, argument) for argument in arguments))
    assert ran.exit_code == 2
    assert says in ran.stderr
