"""`llmx convert-gguf`: what it prints and leaves behind, and what it refuses before it begins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import build, every_tiny
from tiny_models import save as save_model
from tokenizer_samples import byte_level, save
from typer.testing import Result

from llmx.kernels import cpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    tiny = replace(tiny, options={**tiny.options, "vocab_size": 448})
    ends = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    config = tiny.config_json()
    folder = save_model(tmp_path_factory.mktemp("tiny") / "little", config, build(tiny.oracle, config))
    return save(byte_level(), folder, tokenizer_config=ends)


def test_the_path_is_printed_and_the_report_names_every_tensor(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    ran = llmx("convert-gguf", model, "--type", "q8_0", "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == "little-q8_0.gguf"
    assert "bits per weight" in ran.stderr
    assert "27 rows of the embedding have no token" in ran.stderr
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "little-q8_0.gguf").tensors}
    results: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {tensor["name"]: tensor["type"] for tensor in results["tensors"]} == stored
    assert results["bytes"] == (tmp_path / "little-q8_0.gguf").stat().st_size
    again = llmx("convert-gguf", model, "--type", "q8_0")
    assert again.exit_code == 2
    assert "little-q8_0.gguf is there already" in again.stderr
    assert llmx("convert-gguf", model, "--type", "Q4_0", "-o", "little-q8_0.gguf", "--force").exit_code == 0
    said = llmx("generate", "Hello", "--model", "little-q8_0.gguf", "--max-tokens", "4", "--temperature", "0")
    assert said.exit_code == 0, said.output


@pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
def test_a_file_of_plain_numbers_is_converted_without_torch(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    """Importing it takes several times as long as all the rest."""
    assert llmx("convert-gguf", model, "--type", "bf16", "-o", "plain.gguf").exit_code == 0
    code = (
        "import sys, llmx.cli as cli\n"
        "sys.argv[1:] = ['convert-gguf', 'plain.gguf', '--type', 'q4_k_m', '--json', 'report.json']\n"
        "try: cli.main()\n"
        "except SystemExit as end: print(end.code)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'tokenizers', 'rich', 'jinja2'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["plain-q4_k_m.gguf", "0", "[]"], done.stderr
    assert llmx("convert-gguf", model, "--type", "q4_k_m", "-o", "whole.gguf").exit_code == 0
    ours, whole = (gguf.GGUFReader(tmp_path / name) for name in ("plain-q4_k_m.gguf", "whole.gguf"))
    assert {tensor.name: tensor.tensor_type for tensor in ours.tensors} == {
        tensor.name: tensor.tensor_type for tensor in whole.tensors
    }


def test_a_dry_run_writes_nothing_and_shows_types(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx("convert-gguf", model, "--dry-run")
    assert ran.exit_code == 0, ran.output
    assert "blk.0.ffn_down.weight" in ran.stdout
    assert "-> Q8_0 (rows are no whole blocks of Q6_K)" in ran.stdout
    assert "bits per weight" in ran.stdout
    assert not list(tmp_path.glob("*.gguf"))
    refused = llmx("convert-gguf", model, "--dry-run", "--no-fallback")
    assert refused.exit_code == 2
    assert "are no whole blocks" in refused.stderr


def test_a_quantised_folder_is_unpacked_and_written(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    assert llmx("quantize", model, "--fp8", "-o", "fp8").exit_code == 0
    ran = llmx("convert-gguf", "fp8", "--type", "copy", "-o", "m.gguf")
    assert ran.exit_code == 0, ran.output
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"]
    assert llmx("convert-hf", "m.gguf", "-o", "back").exit_code == 0
    assert llmx("convert-gguf", "back", "--type", "copy", "-o", "again.gguf").exit_code == 0
    first, second = (gguf.GGUFReader(tmp_path / name) for name in ("m.gguf", "again.gguf"))
    for one, other in zip(first.tensors, second.tensors, strict=True):
        assert (one.name, one.tensor_type, one.data.tobytes()) == (other.name, other.tensor_type, other.data.tobytes())
    for key in ("llama.block_count", "llama.rope.freq_base", "tokenizer.ggml.pre", "tokenizer.ggml.merges"):
        assert first.fields[key].contents() == second.fields[key].contents()


def test_importance_from_a_text_is_used_kept_and_compared(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Hello world, it's 12345 o'clock and they'LL be here. " * 20)
    common = ("--type", "q4_0", "--seq-len", "32", "--samples", "4")
    ran = llmx(
        "convert-gguf", model, *common, "--calib", "text.txt", "--save-imatrix", "i.gguf", "-o", "a.gguf", "--eval"
    )
    assert ran.exit_code == 0, ran.output
    assert "KL divergence" in ran.stderr
    kept = llmx("convert-gguf", model, "--type", "q4_0", "--imatrix", "i.gguf", "-o", "b.gguf")
    assert kept.exit_code == 0, kept.output
    first, second = (gguf.GGUFReader(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert [t.data.tobytes() for t in first.tensors] == [t.data.tobytes() for t in second.tensors]
    for reader, file in ((first, "collected"), (second, "i.gguf")):
        said = {"file": file, "entries_count": 21, "dataset": "text.txt", "chunks_count": 4}
        assert {key: reader.fields[f"quantize.imatrix.{key}"].contents() for key in said} == said
    assert llmx("convert-gguf", model, "--type", "q4_0", "-o", "c.gguf").exit_code == 0
    third = gguf.GGUFReader(tmp_path / "c.gguf")
    assert [t.data.tobytes() for t in first.tensors] != [t.data.tobytes() for t in third.tensors]


def test_what_stands_in_the_way_is_said_before_a_text_is_read(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Hello world. " * 20)
    for name in ("a.gguf", "i.gguf"):
        (tmp_path / name).write_text("mine")
        options = ("--calib", "text.txt", "--save-imatrix", "i.gguf" if name == "i.gguf" else "j.gguf")
        ran = llmx("convert-gguf", model, *options, "-o", "a.gguf" if name == "a.gguf" else "b.gguf")
        assert ran.exit_code == 2, ran.output
        assert f"{name} is there already" in ran.stderr
        assert "reading text" not in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".gguf") == ["a.gguf", "i.gguf"]


def test_a_dry_run_looks_at_the_text_too(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.txt").write_text("Hello world. " * 20)
    for name, said in (("none.txt", "none.txt can't be read"), ("empty.txt", "empty.txt holds no text")):
        ran, dry = (llmx("convert-gguf", model, "--calib", name, *more) for more in ((), ("--dry-run",)))
        assert (ran.exit_code, dry.exit_code) == (2, 2)
        (wanted,) = (line for line in ran.stderr.splitlines() if line.startswith("error:"))
        assert said in wanted
        assert wanted in dry.stderr.splitlines()
    for name in ("text.txt", "hf:org/name/file.txt"):  # the second one is not fetched
        dry = llmx("convert-gguf", model, "--calib", name, "--dry-run")
        assert dry.exit_code == 0, dry.output
        assert "bits per weight" in dry.stdout
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--type", "q9"], "--type q9 is not known"),
        (["--type", "copy", "--pure"], "--type copy changes no type"),
        (["--tensor-type", "q8_0"], "must be REGEX=TYPE"),
        (["--tensor-type", "attn-v=q8_0"], "'attn-v' is in no name of a tensor that may become q8_0"),
        (["--tensor-type", "attn_norm=q8_0"], "'attn_norm' is in no name of a tensor"),
        (["--calib", "none.txt", "--save-imatrix", "no/i.gguf"], "no/i.gguf can't be written"),
        (["--calib", "none.txt"], "--calib none.txt can't be read: No such file or directory"),
        (["--output-type", "iq1_s"], "--output-type iq1_s is no type that is written"),
        (["--split-max-size", "lots"], "A size must be a whole number"),
        (["--imatrix", "a", "--calib", "b"], "--imatrix and --calib both say"),
        (["--threads", "0"], "--threads must be at least 1, not 0"),
        (["--save-imatrix", "a"], "--save-imatrix keeps what --calib collects"),
        (["--imatrix", "none.dat"], "none.dat can't be read: No such file or directory"),
        (["--pretokenizer", "qwen2", "-o", "no/where.gguf"], "no is no folder"),
    ],
)
def test_what_can_not_be_done_is_said(
    llmx: Callable[..., Result], model: Path, arguments: list[str], said: str, tmp_path: Path
) -> None:
    ran = llmx("convert-gguf", model, *arguments)
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr
    assert not list(tmp_path.glob("*.gguf"))
