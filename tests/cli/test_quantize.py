"""`llmx quantize`: what it prints and leaves behind, and what it refuses before it begins."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
from quantizing import tree
from tiny_gguf import write_gguf
from tiny_models import every_tiny, make
from tokenizer_samples import byte_level, gguf_metadata, save
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.quantize import output

RUNNER = CliRunner()
LITTLE = ("--samples", "4", "--seq-len", "32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    tiny = replace(tiny, options={**tiny.options, "vocab_size": 448})
    return save(byte_level(), make(tiny, tmp_path_factory.mktemp("tiny") / "little").folder)


@pytest.fixture
def llmx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object) -> Result:
        return RUNNER.invoke(app, ["quantize", *map(str, arguments), "--threads", "1"])

    return run


def test_the_path_is_printed_and_the_report_says_what_was_lost(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    ran = llmx(model, "--awq", *LITTLE, "--eval", "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == "little-awq-w4g32"
    assert "group size 32" in ran.stderr
    config = json.loads((tmp_path / "little-awq-w4g32" / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32
    results: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())["results"]
    assert len(results["layers"]) == 21
    assert results["calibration"]["tokens"] == 128
    assert results["worse_than_nearest"] == results["fell_back"] == []
    assert results["vllm_ranks"]["1"] is None
    assert "no whole groups of 32" in results["vllm_ranks"]["2"]
    assert "warning: vLLM 0.32 will not load it with --tensor-parallel-size 2" in ran.stderr
    assert 0 < results["eval"]["kld"]["mean"] < 5
    files = sum(path.stat().st_size for path in (tmp_path / "little-awq-w4g32").glob("*.safetensors"))
    assert results["bytes"] < files < results["source_bytes"]

    again = llmx(model, "--awq", *LITTLE)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    forced = llmx(model, "--awq", *LITTLE, "--force", "--json", "-")
    assert forced.exit_code == 0, forced.output
    assert json.loads(forced.stdout)["results"]["layers"] == results["layers"]


def test_one_document_that_is_longer_than_a_sample_is_cut_into_several(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    """AutoAWQ drops such documents, and fails where all are long."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "long texts count " * 200}) + "\n")
    ran = llmx(model, "--gptq", *LITTLE, "--calib", "long.jsonl", "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    calibration = json.loads((tmp_path / "report.json").read_text())["results"]["calibration"]
    assert (calibration["texts"], calibration["tokens"]) == (4, 128)
    (tmp_path / "empty.txt").write_text(" \n")
    empty = llmx(model, "--gptq", *LITTLE, "--calib", "empty.txt", "-o", "other")
    assert empty.exit_code == 2
    assert not (tmp_path / "other").exists()


def test_a_dry_run_says_sizes_and_leaves_nothing(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx(model, "--gptq", "--dry-run")
    assert ran.exit_code == 0, ran.output
    assert "21 linears at 4.62 bits a weight" in ran.stdout
    # 96 inputs of down_proj in groups of 32 can't be halved; o_proj's 64 can't be quartered
    assert "will not load it with --tensor-parallel-size 2: model.layers.0.mlp.down_proj has 48 inputs" in ran.stdout
    assert "--tensor-parallel-size 4: model.layers.0.self_attn.o_proj has 16 inputs a rank, no whole" in ran.stdout
    blocks = llmx(model, "--fp8", "--fp8-mode", "block", "--dry-run")
    assert "--tensor-parallel-size 1: model.layers.0.self_attn.q_proj has 64 outputs a rank" in blocks.stdout
    rows = llmx(model, "--fp8", "--dry-run")
    assert rows.stdout.count("warning") == 1
    assert "--tensor-parallel-size 8: 4 attention heads can't be split over them" in rows.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_head_is_said_in_the_config_and_tied_ones_are_refused(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    assert "22 linears" in llmx(model, "--gptq", "--quantize-lm-head", "--dry-run").stdout
    ran = llmx(model, "--gptq", "--quantize-lm-head", *LITTLE, "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == "little-gptq-w4g32-head"
    config = json.loads((tmp_path / "little-gptq-w4g32-head" / "config.json").read_text())
    assert config["quantization_config"]["lm_head"] is True
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [layer["name"] for layer in results["layers"]][-1] == "lm_head"
    assert 0 < results["head_error"] < 0.5
    looked = RUNNER.invoke(app, ["inspect", "little-gptq-w4g32-head", "--fail-on", "warning"])
    assert looked.exit_code == 0, looked.output

    tied = tmp_path / "tied"
    shutil.copytree(model, tied)
    says = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(says | {"tie_word_embeddings": True}))
    refused = llmx(tied, "--gptq", "--quantize-lm-head", *LITTLE)
    assert refused.exit_code == 2
    assert "tied to its embedding" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "one of --awq, --gptq, --fp8 and --int8"),
        (("--awq", "--gptq"), "one of --awq, --gptq, --fp8 and --int8"),
        (("--fp8", "--fp8-mode", "block", "--quantize-lm-head"), "DeepSeek's fp8 format has no quantized head"),
        (("--awq", "--quantize-lm-head", "--ignore", "head"), "--ignore 'head' leaves lm_head out"),
        (("--gptq", "--group-size", "128"), "Groups of 128 do not divide model.layers.0.self_attn.q_proj (64 inputs)"),
        (("--gptq", "--group-size", "big"), "--group-size must be auto or a whole number"),
        (("--gptq", "--ignore", "."), "leaves no linear"),
        (("--gptq", "--seq-len", "100000"), "--seq-len 100000 is more than the 512 positions"),
        (("--gptq", "--calib", "not-there.txt"), "--calib not-there.txt can't be read"),
        (("--gptq", "--calib", "hf:nothing"), "--calib hf:nothing names no file of a data set"),
        (("--gptq", "--states", "floppy"), "--states must be auto, ram or disk, not 'floppy'"),
        (("--gptq", "--fp8-mode", "block"), "--fp8-mode is of --fp8; --gptq has no use for it"),
        (("--awq", "--damp", "0.1"), "--damp is of --gptq; --awq has no use for it"),
        (("--awq", "--no-act-order"), "--act-order/--no-act-order is of --gptq"),
        (("--int8", "--asym"), "--sym/--asym is of --awq and --gptq; --int8 has no use for it"),
        (("--fp8", "--group-size", "64"), "--group-size is of --awq and --gptq"),
        (("--fp8", "--calib", "some.txt"), "--calib some.txt: --fp8-mode dynamic is made without text"),
        (("--gptq", "-o", ".", "--force"), "-o . names no folder that can be made"),
        (("--gptq", "-o", "..", "--force"), "-o .. names no folder that can be made"),
    ],
)
def test_what_can_not_be_is_refused_at_once(
    llmx: Callable[..., Result], model: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    ran = llmx(model, *arguments)
    assert ran.exit_code == 2
    assert says in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_never_replaced(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    inside = tmp_path / "outer" / "inner"
    shutil.copytree(model, inside)
    shutil.copy(inside / "config.json", inside.parent / "config.json")  # so that it looks like a model's folder
    for out in (inside, inside.parent, inside / ".." / "inner"):
        ran = llmx(inside, "--fp8", "-o", out, "--force")
        assert ran.exit_code == 2, out
        assert "has the model that is to be quantized" in ran.stderr
    assert (inside / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_file_is_no_place_for_the_result(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = llmx(model, "--gptq", "-o", "file/out")  # before text is drawn, which takes long
    assert ran.exit_code == 2
    assert f"-o file/out: {tmp_path / 'file'} is a file, no folder." in ran.stderr
    assert "drawing" not in ran.stderr


def test_the_report_of_a_dry_run_is_all_of_stdout(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx(model, "--gptq", "--dry-run", "--samples", "3", "--seq-len", "100", "--states", "disk", "--json", "-")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["results"]["states"] == {"place": "disk", "bytes": 3 * 100 * 64 * 4}
    assert "hidden states: 0.1 MB in a file beside the result" in ran.stderr
    assert "linears at" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_fits_no_linear_is_said(llmx: Callable[..., Result], model: Path) -> None:
    said = llmx(model, "--gptq", "--ignore", "mlp.down_porj", "--dry-run")
    assert "Note: --ignore 'mlp.down_porj' fits none of the 21 linears." in said.stderr
    for pattern in ("lm_head", "down_proj"):
        assert "fits none" not in llmx(model, "--gptq", "--ignore", pattern, "--dry-run").stderr


def test_states_on_the_disk_are_said_and_a_full_disk_loses_no_block(
    llmx: Callable[..., Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some words to count " * 100)
    given = (model, "--gptq", *LITTLE, "--calib", "text.txt", "--json", "report.json")
    assert llmx(*given, "-o", "wanted").exit_code == 0
    written = output.write_shard

    def full(path: Path, tensors: Any) -> None:
        if "00003" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_shard", full)
        ran = llmx(*given, "-o", "out", "--states", "disk")
    assert ran.exit_code == 1
    assert "out.partial can't be written: No space left on device." in ran.stderr
    assert "--resume goes on with it" in ran.stderr
    again = llmx(*given, "-o", "out", "--states", "disk", "--resume")
    assert again.exit_code == 0, again.output
    assert "hidden states: 0.0 MB in a file beside the result" in again.stderr
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["states"] == {"place": "disk", "bytes": 128 * 64 * 4}
    assert results["blocks_resumed"] == 2
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        ran = llmx(*given, "-o", "other", "--states", "disk")
    assert ran.exit_code == 2
    assert "and its hidden states 0.0 MB until it is done" in ran.stderr
    assert not list(tmp_path.glob("other*"))


def test_texts_that_hold_nothing_are_named_by_their_flag(
    llmx: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "other.jsonl").write_text('{"words": "a"}\n')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for name, says in (
        ("empty", " holds no text"),
        ("other", ", line 1: no object with the text"),
    ):
        ran = llmx(model, "--awq", "--calib", f"{name}.jsonl")
        assert ran.exit_code == 2
        assert f"--calib {name}.jsonl{says}" in ran.stderr
    assert "bytes.txt is not UTF-8 text" in llmx(model, "--awq", "--calib", "bytes.txt").stderr


def test_a_gguf_file_is_quantized_again_and_runs(
    llmx: Callable[..., Result], model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = len(byte_level().get_vocab())
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": size}
    path = tmp_path_factory.mktemp("file") / "little.Q8_0.gguf"
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors = {n: t[:size].clone() if "embed" in n or "lm_head" in n else t for n, t in tensors.items()}
    write_gguf(path, "LlamaForCausalLM", "llama", config, tensors, gguf_metadata(byte_level()), kind="Q8_0")
    ran = llmx(path, "--int8", *LITTLE, "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    assert "is quantized already (Q8_0)" in ran.stderr
    assert ran.stdout.splitlines()[-1] == "little.Q8_0-int8"
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["calibration"]["source"] == "generated"
    assert results["source_bytes"] < path.stat().st_size
    again = llmx("little.Q8_0-int8", "--fp8")
    assert again.exit_code == 0, again.output
    assert "is quantized already (compressed-tensors)" in again.stderr
    folder = again.stdout.splitlines()[-1]
    said = RUNNER.invoke(app, ["generate", "-m", folder, "--raw", "--temperature", "0", "--max-tokens", "4", "Hello"])
    assert said.exit_code == 0, said.output
