"""Sources other than folders of plain numbers: GGUF files, and what was quantized before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizing import LLAMA, TINIES, begin, effective, loss, tree, whole
from tiny_gguf import FORMATS, write_gguf
from tiny_models import Saved, distance, load, logits_of, make, open_folder, prompt_of
from tiny_models import run as run_model
from tokenizer_samples import byte_level, gguf_metadata
from torch import Tensor

from llmx.formats.hub import Located
from llmx.formats.safetensors import open_safetensors
from llmx.models import open_model
from llmx.quantize import output
from llmx.quantize.options import choose

EIGHT: dict[str, Any] = {"form": "compressed-tensors", "bits": 8}
PACKINGS = {
    "awq": ("awq", {}),
    "gptq": ("gptq", {}),
    "gptq_v2": ("gptq", {"form": "gptq_v2", "symmetric": False}),
    "compressed-tensors": ("gptq", {"form": "compressed-tensors"}),
    "fp8": ("fp8", {}),
    "fp8 blocks": ("fp8", {"form": "fp8", "fp8_mode": "block"}),
    "int8": ("int8", {}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = make(TINIES[name], tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gguf_of(source: Saved, path: Path, kind: str | None = "Q8_0") -> Path:
    metadata = gguf_metadata(byte_level())
    architecture = source.tiny.architecture
    name = next(iter(FORMATS[architecture]))
    write_gguf(path, architecture, name, source.config, source.tensors, metadata, kind=kind)
    return path


def said(folder: Path, length: int = 80) -> Tensor:
    """Our logits."""
    opened = open_folder(folder) if folder.is_dir() else open_model(Located("gguf", folder, folder.name))
    return run_model(load(opened, 100)[0], prompt_of(opened.config.vocab, length)).logits


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std())


@pytest.mark.parametrize("name", [LLAMA, "Gemma3-1", "Phi3-0", "Qwen2-0"])
def test_a_gguf_file_is_quantized_with_transformers_names(
    name: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """With 8 bits little is lost: rows that stay permuted, norms with 1 added or scales in them would lose much."""
    source = saved(name)
    path, out = gguf_of(source, tmp_path / "model.gguf"), tmp_path / "out"
    run = whole(path, out, choose("awq", **EIGHT))
    assert run.source.packed == "Q8_0"
    assert any("scales" in layer["how"] and "no scales" not in layer["how"]
               for note in run.notes for layer in note["layers"])  # fmt: skip
    assert loss(run, out, source) < 0.1, "in transformers, beside the model that the file was made from"
    assert apart(said(out), said(path)) < 0.1
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [source.tiny.architecture]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["torch_dtype"] == "bfloat16"
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {p.name for p in out.iterdir()}
    written = open_safetensors(out)
    assert written.stored("model.norm.weight").kind == "BF16"
    assert ("lm_head.weight" in written) == (not source.config["tie_word_embeddings"])


@pytest.mark.parametrize(("method", "head"), [("gptq", False), ("gptq", True), ("fp8", False), ("int8", False)])
def test_every_method_takes_a_gguf_file(method: str, head: bool, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    path, out = gguf_of(saved(LLAMA), tmp_path / "model.gguf"), tmp_path / "out"
    run = whole(path, out, choose(method, head=head), group=None if method in ("fp8", "int8") else 32)
    assert not any(layer["worse"] or layer["fell_back"] for note in run.notes for layer in note["layers"])
    assert apart(said(out), said(path)) < {"gptq": 0.8, "fp8": 0.3, "int8": 0.12}[method]


def test_a_gguf_file_of_plain_numbers_keeps_their_dtype(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    path, out = gguf_of(saved(LLAMA), tmp_path / "model.gguf", kind=None), tmp_path / "out"
    run = whole(path, out, choose("gptq", **EIGHT, ignore="down_proj"))
    assert run.source.packed is None
    written = open_safetensors(out)
    kinds = {written.stored(name).kind for name in written.names() if name.endswith((".weight", ".weight_scale"))}
    assert kinds == {"F32"}
    wanted = saved(LLAMA).tensors["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(written.read("model.layers.1.mlp.down_proj.weight"), wanted)


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_was_quantized_is_quantized_anew(packing: str, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    method, more = PACKINGS[packing]
    first, out = tmp_path / "first", tmp_path / "out"
    group = None if method in ("fp8", "int8") else 32
    before = whole(saved(LLAMA).folder, first, choose(method, **more), group=group)
    run = whole(first, out, choose("gptq", **EIGHT, ignore=r"layers\.0\.mlp\.down"))
    assert run.source.packed == json.loads((first / "config.json").read_text())["quantization_config"]["quant_method"]
    assert apart(said(out), said(first)) < 0.05
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert "quantize_config.json" not in [path.name for path in out.iterdir()]
    written, name = open_safetensors(out), "model.layers.0.mlp.down_proj.weight"
    assert written.stored(name).kind == "F32", "left as it is, but unpacked"
    assert distance(written.read(name), effective(before, first)[name]) < 1e-5
    assert torch.equal(
        written.read("model.embed_tokens.weight"), open_safetensors(first).read("model.embed_tokens.weight")
    )


class Cut(Exception):
    """The process is gone."""


def test_a_run_over_a_gguf_file_goes_on_to_the_same_bytes(
    saved: Callable[[str], Saved],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, options = gguf_of(saved(LLAMA), tmp_path / "model.gguf"), choose("awq")
    whole(path, tmp_path / "wanted", options)
    out = tmp_path / "out"
    for _ in range(4):  # cut off at the second note, as a run that goes on has written one block by then
        writes = 0

        def write(*given: Any, real: Any = output.write_whole) -> None:
            nonlocal writes
            writes += 1
            if writes == 2:
                raise Cut
            real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(output, "write_whole", write)
            with pytest.raises(Cut):
                whole(path, out, options, resume=True)
    assert whole(path, out, options, resume=True).resumed == 3
    assert tree(out) == tree(tmp_path / "wanted")


def test_a_source_is_the_model_before_it_is_quantized(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """What the run compares with: transformers' logits of the file's unpacked weights."""
    source = saved("Gemma3-1")
    run = begin(gguf_of(source, tmp_path / "model.gguf", kind=None), tmp_path / "out", choose("fp8"), group=None)
    opened = run.source.opened
    found = run_model(load(opened, 100)[0], prompt_of(opened.config.vocab, 80)).logits
    assert distance(found, logits_of(source.model, prompt_of(source.config["vocab_size"], 80))) < 1e-3
