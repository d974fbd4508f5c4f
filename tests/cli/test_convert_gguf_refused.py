"""Files that are damaged or can't be converted: one sentence, exit code 2, and nothing left behind."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_models import build, every_tiny
from tiny_models import save as save_model
from tokenizer_samples import byte_level, save
from typer.testing import Result

from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_types import Asked
from llmx.errors import UsageError
from llmx.formats.hub import Located
from tests.unit.test_formats_gguf import BAD

ENDS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    tiny = replace(tiny, options={**tiny.options, "vocab_size": 448, "tie_word_embeddings": True})
    config = tiny.config_json()
    folder = save_model(tmp_path_factory.mktemp("tiny") / "little", config, build(tiny.oracle, config))
    return save(byte_level(), folder, tokenizer_config=ENDS)


def refused(ran: Result) -> str:
    """The sentence, which is all that is said."""
    assert ran.exit_code == 2, ran.output
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    assert not ran.stdout
    lines = [line for line in ran.stderr.splitlines() if not line.startswith(("hint:", "note:"))]
    assert len(lines) == 1, ran.stderr
    return lines[0]


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_not_converted(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(BAD[name][0])
    with pytest.raises(UsageError, match=r"model\.gguf"):
        convert(
            Located("gguf", tmp_path / "model.gguf", "model.gguf"),
            Wanted(Asked("copy"), tmp_path / "out.gguf"),
            lambda done, total: None,
            lambda line: None,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("name", ["data cut", "absurd array", "bad magic"])
def test_it_is_one_sentence_of_each_command(name: str, llmx: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(BAD[name][0])
    for command in ("convert-gguf", "convert-hf"):
        assert "model.gguf" in refused(llmx(command, "model.gguf", "-o", "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def changed(folder: Path, name: str, **keys: Any) -> None:
    said = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps({key: value for key, value in (said | keys).items() if value is not None}))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    change(stored)
    safetensors.torch.save_file(stored, folder / "model.safetensors")


def vocabulary(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())
    change(said)
    (folder / "tokenizer.json").write_text(json.dumps(said))


UP = "model.layers.1.mlp.up_proj.weight"
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config cut": (lambda f: (f / "config.json").write_text('{"a": '), "config.json"),
    "config of another kind": (lambda f: changed(f, "config.json", architectures=["T5ForConditionalGeneration"]), "T5"),
    "a rule of turning that is not known": (
        lambda f: changed(f, "config.json", rope_parameters=None, rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        "RoPE kind 'spiral' is not built",
    ),
    "factors of another length": (
        lambda f: changed(f, "config.json", rope_parameters=None, rope_scaling=LONG),
        "short_factor must hold 8 positive numbers, not 1",
    ),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), "holds no safetensors file"),
    "tensors cut": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "model.safetensors",
    ),
    "a tensor less": (lambda f: tensors(f, lambda t: t.pop(UP)), "no tensor for blk.1.ffn_up.weight"),
    "a tensor of another shape": (
        lambda f: tensors(f, lambda t: t.update({UP: t[UP][:-1].contiguous()})),
        "blk.1.ffn_up.weight would be (95, 64)",
    ),
    "a tensor of whole numbers": (
        lambda f: tensors(f, lambda t: t.update({UP: t[UP].to(torch.int64)})), "is stored as weight (I64)",
    ),
    "a layer too many": (lambda f: changed(f, "config.json", num_hidden_layers=2), "blk.2"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "tokenizer cut": (lambda f: (f / "tokenizer.json").write_text('{"model": {'), "tokenizer.json"),
    "tokenizer without merges": (lambda f: vocabulary(f, lambda s: s["model"].pop("merges")), "tokenizer.json"),
    "merges of no tokens": (
        lambda f: vocabulary(f, lambda s: s["model"]["merges"].append(["q", "zz"])), "tokenizer.json",
    ),
    "more tokens than rows": (
        lambda f: vocabulary(f, lambda s: s["model"]["vocab"].update({f"more{i}": 430 + i for i in range(30)})),
        "the tokenizer has 460 tokens, the embedding 448 rows",
    ),
    "tokenizer settings cut": (lambda f: (f / "tokenizer_config.json").write_text("["), "tokenizer_config.json"),
    "generation settings cut": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json"),
    "a temperature that is no number": (
        lambda f: changed(f, "generation_config.json", temperature="hot"),
        "generation_config.json: temperature must be a number",
    ),
    "another quantisation": (
        lambda f: changed(f, "config.json", quantization_config={"quant_method": "aqlm"}),
        "aqlm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_can_not_be_converted_is_one_sentence(
    name: str, model: Path, llmx: Callable[..., Result], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change, sentence = FOLDERS[name]
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    assert sentence in refused(llmx("convert-gguf", folder, "--type", "q8_0", "-o", "out.gguf"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_card_that_is_no_yaml_stops_nothing(model: Path, llmx: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for card in ("---\n{a: [\n---\n", "---\n- a\n---\n", "---\nlicense: [1, null]\ntags: 3\nbase_model: {}\n---\n"):
        (folder / "README.md").write_text(card)
        assert llmx("convert-gguf", folder, "--type", "copy", "-o", "out.gguf", "--force").exit_code == 0


def test_a_missing_part_and_a_disk_that_is_full_are_one_sentence(
    model: Path, llmx: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmx("convert-gguf", model, "--type", "f32", "--split-max-size", "200K", "-o", "m.gguf").exit_code == 0
    parts = sorted(tmp_path.glob("m-*"))
    parts[1].unlink()
    assert parts[1].name in refused(llmx("convert-gguf", parts[0].name, "-o", "out.gguf"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmx.formats.gguf_write.os.fsync", full)
    before = sorted(tmp_path.iterdir())
    ran = llmx("convert-gguf", model, "--type", "f32", "-o", "out.gguf")
    assert ran.exit_code == 1
    assert "out.gguf can't be written: No space left on device." in ran.stderr
    assert sorted(tmp_path.iterdir()) == before
