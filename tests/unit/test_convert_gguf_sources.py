"""What GGUF files are made from: quantised checkpoints of every format, and GGUF files themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from quantised import METHODS, twins
from tiny_models import Saved, every_tiny, make
from tiny_models import save as save_model

from llmx.convert import arrays, hf
from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_types import Asked
from llmx.convert.plain import Plain
from llmx.formats.checkpoint import WHOLE, Slices
from llmx.formats.hub import Located
from tests.unit.test_convert_gguf import with_tokenizer

TINIES = {tiny.name: tiny for tiny in every_tiny()}
SAYS: list[str] = []


def converted(source: Path, out: Path, kind: str, **options: Any) -> gguf.GGUFReader:
    wanted = Wanted(Asked(kind), out, **options)
    located = Located("gguf" if source.is_file() else "hf", source, source.name)
    results = convert(located, wanted, lambda done, total: None, SAYS.append)
    return gguf.GGUFReader(results["paths"][0])


def tensors(reader: gguf.GGUFReader) -> dict[str, tuple[Any, bytes]]:
    return {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in reader.tensors}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Llama permutes rows of q and k; Qwen2 has biases; Phi-3 has q, k and v in one, and a head of its own."""
    torch.set_num_threads(1)
    names = ("Llama-0", "Qwen2-0", "Phi3-0")
    return {name: make(TINIES[name], tmp_path_factory.mktemp("tiny") / name) for name in names}


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("Llama-0", method) for method in METHODS), ("Qwen2-0", "awq"), ("Phi3-0", "gptq act-order")],
)
def test_packed_weights_become_the_numbers_that_they_stand_for(
    name: str, method: str, saved: dict[str, Saved], tmp_path: Path
) -> None:
    packed, plain = twins(saved[name], method, tmp_path)
    with_tokenizer(packed), with_tokenizer(plain)
    for kind in ("f32", "q4_0"):
        found = tensors(converted(packed, tmp_path / f"packed-{kind}.gguf", kind))
        wanted = tensors(converted(plain, tmp_path / f"plain-{kind}.gguf", kind))
        assert found.keys() == wanted.keys()
        for tensor, (stored, data) in wanted.items():
            assert found[tensor][0] == stored
            if kind == "f32":  # a scale times a code is rounded once, to a number that may be stored as float16
                ours, theirs = (np.frombuffer(raw, np.float32) for raw in (found[tensor][1], data))
                assert np.allclose(ours, theirs, rtol=1e-6, atol=0), tensor
            else:
                assert found[tensor][1] == data, tensor


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each call of Plain.read gives, from now on."""
    sizes: list[int] = []
    read = Plain.read

    def watched(self: Plain, name: str, slices: Slices = WHOLE) -> torch.Tensor:
        made = read(self, name, slices)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Plain, "read", watched)
    return sizes


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("Llama-0", method) for method in METHODS), ("Qwen2-0", "awq"), ("Phi3-0", "gptq act-order")],
)
def test_tensors_are_never_whole_in_memory_and_the_same_in_any_number_of_pieces(
    name: str, method: str, saved: dict[str, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = twins(saved[name], method, tmp_path)
    with_tokenizer(packed)
    whole = tensors(converted(packed, tmp_path / "whole.gguf", "f32"))
    monkeypatch.setattr(arrays, "CHUNK", 1024)
    sizes = recorded(monkeypatch)
    assert tensors(converted(packed, tmp_path / "pieces.gguf", "f32")) == whole
    # 3 bits: zeros of 32 outputs are in three words; blocks: of 128 outputs. Whole ones are 10,240 and more.
    together = {"gptq 3 bits": 32, "fp8 blocks": 128}.get(method, 8)
    assert max(sizes) <= max(1024, together * 96)


def test_a_folder_made_of_a_file_is_the_same_in_any_number_of_pieces(
    saved: dict[str, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's q and k: whole heads, whose rows lie otherwise in a file."""
    converted(with_tokenizer(saved["Llama-0"].folder), tmp_path / "m.gguf", "q8_0")
    located = Located("gguf", tmp_path / "m.gguf", "m.gguf")
    hf.convert(located, tmp_path / "whole", SAYS.append)
    monkeypatch.setattr(arrays, "CHUNK", 512)
    sizes = recorded(monkeypatch)
    hf.convert(located, tmp_path / "pieces", SAYS.append)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "pieces"))
    assert one == other
    assert max(sizes) <= 16 * 64


def test_a_copy_is_the_same_byte_for_byte_split_or_not(saved: dict[str, Saved], tmp_path: Path) -> None:
    folder = with_tokenizer(saved["Qwen2-0"].folder)
    converted(folder, tmp_path / "a.gguf", "q4_k_m")
    first = (tmp_path / "a.gguf").read_bytes()
    converted(tmp_path / "a.gguf", tmp_path / "b.gguf", "copy")
    assert (tmp_path / "b.gguf").read_bytes() == first
    converted(tmp_path / "a.gguf", tmp_path / "c.gguf", "copy", most=50_000)
    parts = sorted(tmp_path.glob("c-*.gguf"))
    assert len(parts) > 1
    converted(parts[0], tmp_path / "d.gguf", "copy")
    assert (tmp_path / "d.gguf").read_bytes() == first


def test_a_file_of_another_writer_keeps_its_order_its_metadata_and_its_alignment(tmp_path: Path) -> None:
    """What llmx has no model for, with keys of all types and more padding between tensors than llmx puts there."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "somearch")
    writer.add_uint64("somearch.large", 2**63)
    writer.add_float64("somearch.double", 0.1)
    writer.add_array("somearch.list", [1, -2])
    writer.add_key_value("somearch.bytes", [1, 255], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    writer.add_custom_alignment(64)
    for name in ("z.weight", "a.weight", "blk.0.odd.bias"):
        writer.add_tensor(name, np.ones((3,), np.float32))
    writer.add_tensor("experts", np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted(tmp_path / "a.gguf", tmp_path / "b.gguf", "copy")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_file_is_numbered_by_what_it_mostly_holds(saved: dict[str, Saved], tmp_path: Path) -> None:
    folder = with_tokenizer(saved["Llama-0"].folder)
    for kind, number in {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_k_m": 15, "copy": 0}.items():
        fields = converted(folder, tmp_path / f"{kind}.gguf", kind).fields
        assert fields["general.file_type"].contents() == number
        assert fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    fields = converted(tmp_path / "f16.gguf", tmp_path / "again.gguf", "q5_0").fields
    assert fields["general.file_type"].contents() == 8


def test_a_shared_head_makes_no_tensor_whether_it_is_stored_or_not(saved: dict[str, Saved], tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/2935"""
    of = saved["Llama-0"]
    folder = tmp_path / "model"
    stored = {**of.tensors, "lm_head.weight": of.tensors["model.embed_tokens.weight"].clone()}
    save_model(folder, of.config | {"tie_word_embeddings": True}, None, like=of.folder)
    files = {}
    for name in ("stored", "not", "another"):
        (folder / "model.safetensors").unlink()
        held = {n: t for n, t in stored.items() if name != "not" or n != "lm_head.weight"}
        if name == "another":
            held["lm_head.weight"] = held["lm_head.weight"] + 1
        safetensors.torch.save_file(held, folder / "model.safetensors")
        SAYS.clear()
        converted(with_tokenizer(folder), tmp_path / f"{name}.gguf", "f32")
        files[name] = (tmp_path / f"{name}.gguf").read_bytes()
        assert any("lm_head.weight differs from the embedding" in said for said in SAYS) == (name == "another")
    assert files["stored"] == files["not"] == files["another"]
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(tmp_path / "not.gguf").tensors}


@pytest.mark.parametrize("name", ["Llama-0", "Qwen2-0"])
def test_biases_are_those_of_the_source_and_no_others(name: str, saved: dict[str, Saved], tmp_path: Path) -> None:
    """https://github.com/AutoGPTQ/AutoGPTQ/issues/555"""
    packed, _ = twins(saved[name], "awq", tmp_path)
    found = {n for n in tensors(converted(with_tokenizer(packed), tmp_path / "m.gguf", "q8_0")) if n.endswith("bias")}
    layers = range(saved[name].config["num_hidden_layers"])
    assert found == ({f"blk.{i}.attn_{part}.bias" for i in layers for part in "qkv"} if name == "Qwen2-0" else set())


def test_longrope_in_the_styles_of_both_versions_makes_one_file(tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/24820"""
    of = make(TINIES["Phi3-1"], tmp_path / "model")
    with_tokenizer(of.folder)
    converted(of.folder, tmp_path / "five.gguf", "f32")
    parameters = dict(of.config["rope_parameters"])
    four = {key: value for key, value in of.config.items() if key != "rope_parameters"}
    four |= {"rope_theta": parameters.pop("rope_theta"), "original_max_position_embeddings": 128}
    four |= {"partial_rotary_factor": parameters.pop("partial_rotary_factor")}
    scaling = {"type": "longrope", "short_factor": parameters["short_factor"], "long_factor": parameters["long_factor"]}
    (of.folder / "config.json").write_text(json.dumps(four | {"rope_scaling": scaling}))
    converted(of.folder, tmp_path / "four.gguf", "f32")
    assert (tmp_path / "four.gguf").read_bytes() == (tmp_path / "five.gguf").read_bytes()
    assert {"rope_factors_long.weight", "rope_factors_short.weight"} <= {
        tensor.name for tensor in gguf.GGUFReader(tmp_path / "four.gguf").tensors
    }


def test_a_vocabulary_padded_to_64_has_a_token_for_every_row(saved: dict[str, Saved], tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/3442"""
    of = saved["Llama-0"]
    rows = of.config["vocab_size"]
    reader = converted(with_tokenizer(of.folder), tmp_path / "m.gguf", "f32")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert len(tokens) == len(set(tokens)) == rows == shapes["token_embd.weight"][1]
