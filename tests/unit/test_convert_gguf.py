"""GGUF files of tiny models of every family: what the gguf package reads, what llmx computes from them, which types.

data/gguf_mixtures.json holds what llama-quantize chooses; data/make_gguf_mixtures.py writes it.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmx.convert.gguf_collect import as_importance, collect
from llmx.convert.gguf_importance import about_importance, read_importance, write_importance
from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_types import Asked, Sizes, choose, parse_override, parse_type
from llmx.errors import LlmxError, UsageError
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.kernels import Kernels
from llmx.layers.rope import frequencies
from tests.data.make_gguf_mixtures import MODELS
from tests.tiny_models import Tiny, build, distance, every_tiny, load, logits_of, open_folder, open_gguf_file, run, save

STORED = json.loads((Path(__file__).parents[1] / "data" / "gguf_mixtures.json").read_text())
TOKENS = tuple(range(3, 43))
SAYS: list[str] = []
NO_WINDOW = ("MistralForCausalLM", "Phi3ForCausalLM")  # what llama.cpp gives no sliding window, though one is stored
SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


def small_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, 150 tokens of the 160 that tiny models have rows for."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<|begin|>", "<|end|>"], show_progress=False)
    backend.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog's 12345 back, again and again."] * 9, trainer
    )
    return backend


def with_tokenizer(folder: Path) -> Path:
    small_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def folder_of(path: Path, architecture: str, config: dict[str, Any]) -> Path:
    oracle = getattr(__import__("transformers"), architecture)
    made = json.loads(oracle.config_class(**config).to_json_string(use_diff=False)) | {"architectures": [architecture]}
    return with_tokenizer(save(path, made, build(oracle, made)))


def converted(folder: Path, out: Path, kind: str = "f32", **options: Any) -> dict[str, Any]:
    SAYS.clear()
    wanted = Wanted(Asked(kind, **options.pop("asked", {})), out, **options)
    located = Located("gguf" if folder.is_file() else "hf", folder, folder.name)
    return convert(located, wanted, lambda done, total: None, SAYS.append)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(tiny for tiny in every_tiny() if tiny.architecture == "LlamaForCausalLM")
    options = dict(tiny.options) | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return folder_of(tmp_path_factory.mktemp("llama") / "model", "LlamaForCausalLM", options)


@pytest.mark.parametrize("tiny", every_tiny(), ids=lambda tiny: tiny.name)
def test_a_file_of_every_family_computes_what_its_folder_does(tiny: Tiny, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", tiny.architecture, dict(tiny.options))
    out = tmp_path / "model.gguf"
    if tiny.options.get("use_sliding_window"):
        with pytest.raises(UsageError, match="don't store sliding windows"):
            converted(folder, out)
        return
    converted(folder, out)
    ignored = open_folder(folder).architecture in NO_WINDOW and tiny.options.get("sliding_window")
    assert any("llama.cpp runs this architecture without one" in line for line in SAYS) == bool(ignored)
    ours, wanted = (run(load(opened, 64)[0], TOKENS).logits for opened in (open_gguf_file(out), open_folder(folder)))
    assert distance(ours, wanted) < 1e-4
    reader = gguf.GGUFReader(out)
    names = {tensor.name for tensor in reader.tensors}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == open_gguf_file(out).architecture)
    table = gguf.get_tensor_name_map(arch, tiny.options["num_hidden_layers"])
    for name in safetensors.torch.load_file(folder / "model.safetensors"):
        assert table.get_name(name, try_suffixes=(".weight", ".bias")) in names


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_of_both_config_styles_is_kept(kind: str, style: str, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((llama / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    scaling = SCALED[kind] | {"rope_type": kind}
    config |= (
        {style: scaling | {"rope_theta": 500.0}}
        if style == "rope_parameters"
        else {style: scaling, "rope_theta": 500.0}
    )
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    converted(folder, tmp_path / "m.gguf")
    ours, wanted = open_gguf_file(tmp_path / "m.gguf").config.rope, open_folder(folder).config.rope
    assert torch.allclose(frequencies(ours, 512), frequencies(wanted, 512), rtol=1e-6)
    assert ours.magnitude == pytest.approx(wanted.magnitude)


def test_what_no_key_says_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text()) | {"hidden_act": "gelu"}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(llama / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="activation silu; this model has gelu"):
        converted(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("kind", ["q4_k_m", "q8_0", "f16", "bf16", "iq4_xs"])
def test_tensors_are_what_the_gguf_package_reads_and_the_quantiser_writes(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "m.gguf"
    results = converted(llama, out, kind)
    stored = safetensors.torch.load_file(llama / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    down = tensors["blk.1.ffn_down.weight"]
    weight = stored["model.layers.1.mlp.down_proj.weight"].float()
    assert down.shape.tolist() == list(weight.shape)[::-1]
    if kind in ("f16", "bf16"):
        dtype = torch.float16 if kind == "f16" else torch.bfloat16
        assert (
            torch.from_numpy(np.array(down.data))
            .flatten()
            .view(torch.uint8)
            .equal(weight.to(dtype).flatten().view(torch.uint8))
        )
    else:
        want = Kernels("cpu").get("quantize_blocks")(weight.numpy(), down.tensor_type.name)
        assert np.array_equal(down.data, want)
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    q = stored["model.layers.0.self_attn.q_proj.weight"].float()
    rows = q.unflatten(0, (4, 2, -1)).transpose(1, 2).flatten(0, 2)
    error = (
        gguf.dequantize(tensors["blk.0.attn_q.weight"].data, tensors["blk.0.attn_q.weight"].tensor_type) - rows.numpy()
    )
    assert float(np.sqrt((error**2).mean())) < 0.1 * float(rows.std())
    assert results["bytes"] == out.stat().st_size
    assert {t["name"]: t["type"] for t in results["tensors"]} == {n: t.tensor_type.name for n, t in tensors.items()}


@pytest.mark.parametrize("model", MODELS)
def test_types_are_those_that_llama_quantize_chooses(model: str) -> None:
    shape, letters = MODELS[model], STORED["letters"]
    sizes = Sizes(shape.architecture, shape.layers, shape.heads // shape.kv_heads)
    for mixture, wanted in STORED["types"][model].items():
        chosen = choose(shape.shapes(), sizes, Asked(mixture))
        kinds = [chosen[name].kind if name in chosen else "F32" for name in sorted(shape.shapes())]
        assert "".join(letters[kind] for kind in kinds) == wanted, mixture


def test_a_user_chooses_types_of_tensors(llama: Path, tmp_path: Path) -> None:
    asked = {"overrides": [parse_override(r"blk\.0\.ffn_(up|gate)=q8_0")], "embedding": "Q4_0", "pure": True}
    results = converted(llama, tmp_path / "m.gguf", "q5_k_m", asked=asked)
    kinds = {tensor["name"]: tensor["type"] for tensor in results["tensors"]}
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.1.ffn_up.weight"]) == ("Q8_0", "Q5_K")
    assert kinds["token_embd.weight"] == "Q4_0"
    assert kinds["output.weight"] == kinds["blk.0.ffn_down.weight"] == "Q5_K"
    with pytest.raises(UsageError, match="must be REGEX=TYPE"):
        parse_override("q8_0")
    with pytest.raises(UsageError, match="is no regular expression"):
        parse_override("(=q8_0")
    with pytest.raises(UsageError, match="--output-type q9 is no type"):
        parse_type("q9", "--output-type")


def test_rows_that_are_no_whole_blocks_can_be_an_error() -> None:
    tensors = {"blk.0.ffn_up.weight": (64, 96), "token_embd.weight": (8, 96)}
    assert choose(tensors, Sizes("llama", 1, 1), Asked("q4_k_s"))["blk.0.ffn_up.weight"].kind == "Q5_0"
    with pytest.raises(UsageError, match=r"Rows of 1 of 2 tensors are no whole blocks: blk\.0\.ffn_up\.weight has 96"):
        choose(tensors, Sizes("llama", 1, 1), Asked("q4_k_s", fallback=False))


def test_a_file_copied_is_the_same_but_for_nothing(llama: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    converted(llama, first, "q4_k_m")
    converted(first, second, "copy")
    assert first.read_bytes() == second.read_bytes()


def test_a_file_is_converted_as_the_folder_is(llama: Path, tmp_path: Path) -> None:
    whole, direct, again = (tmp_path / f"{name}.gguf" for name in ("f32", "direct", "again"))
    converted(llama, whole)
    converted(llama, direct, "q5_k_m")
    converted(whole, again, "q5_k_m")
    one, other = (gguf.GGUFReader(path) for path in (direct, again))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert direct.stat().st_size == again.stat().st_size
    converted(again, tmp_path / "twice.gguf", "q2_k", force=True)
    assert "are quantised already" in SAYS[-1]


def test_a_split_model_is_the_whole_one(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "whole.gguf", "q8_0")
    results = converted(llama, tmp_path / "parts.gguf", "q8_0", most=300_000)
    paths = [Path(path) for path in results["paths"]]
    assert len(paths) > 2
    assert paths[1].name == f"parts-00002-of-{len(paths):05}.gguf"
    assert sum(path.stat().st_size for path in paths) == results["bytes"]
    whole, parts = open_gguf(tmp_path / "whole.gguf"), open_gguf(paths[1])
    assert list(whole.names()) == list(parts.names())
    assert all(torch.equal(whole.read(name), parts.read(name)) for name in whole.names())
    fields = gguf.GGUFReader(paths[0]).fields
    assert fields["split.count"].types == fields["split.no"].types == [gguf.GGUFValueType.UINT16]
    assert fields["split.tensors.count"].contents() == len(whole.names())
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_nothing_is_left_of_what_fails(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).symlink_to(file)
    stored = safetensors.torch.load_file(llama / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    (folder / "model.safetensors").unlink()
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(LlmxError, match=r"blk\.1\.ffn_up\.weight holds infinities or what is no number"):
        converted(folder, tmp_path / "m.gguf", "q8_0")
    stored["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    with pytest.raises(LlmxError, match="has numbers too large for f16"):
        converted(folder, tmp_path / "m.gguf", "f16")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_incomplete_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(llama / name)
    stored = safetensors.torch.load_file(llama / "model.safetensors")
    del stored["model.layers.2.self_attn.k_proj.weight"]
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    with pytest.raises(UsageError, match=re.escape("has no tensor for blk.2.attn_k.weight")):
        converted(folder, tmp_path / "m.gguf")


def test_metadata_has_the_types_that_llama_cpp_reads(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "m.gguf", "q4_k_m")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    value = gguf.GGUFValueType
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert fields["llama.block_count"].types == [value.UINT32]
    assert fields["llama.attention.layer_norm_rms_epsilon"].types == [value.FLOAT32]
    assert fields["tokenizer.ggml.token_type"].types == [value.ARRAY, value.INT32]
    assert fields["tokenizer.ggml.add_bos_token"].types == [value.BOOL]
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0]['content'] }}"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 160
    assert tokens[150:152] == ["[PAD150]", "[PAD151]"]


def test_importance_is_read_and_used_as_it_was_written(llama: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    sums = {f"blk.{i}.ffn_down.weight": (7 * torch.rand(512, generator=generator), 7) for i in range(3)}
    write_importance(tmp_path / "i.gguf", sums, 64, "text")
    found = read_importance(tmp_path / "i.gguf")
    assert np.allclose(found["blk.2.ffn_down.weight"][0], sums["blk.2.ffn_down.weight"][0] / 7)
    old = b"".join([len(sums).to_bytes(4, "little"), *(
        len(name).to_bytes(4, "little") + name.encode() + (7).to_bytes(4, "little") + (512).to_bytes(4, "little")
        + values.numpy().tobytes() for name, (values, _) in sums.items())])  # fmt: skip
    (tmp_path / "i.dat").write_bytes(old)
    same = read_importance(tmp_path / "i.dat")
    assert all(np.array_equal(same[name], found[name]) for name in found)
    converted(llama, tmp_path / "m.gguf", "q4_k_s", imatrix=tmp_path / "i.dat", asked={"importance": True})
    down = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.ffn_down.weight")
    weight = safetensors.torch.load_file(llama / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float()
    want = Kernels("cpu").get("quantize_blocks")(weight.numpy(), down.tensor_type.name, found[down.name][0])
    assert np.array_equal(down.data, want)
    (tmp_path / "newer.dat").write_bytes(old + struct.pack("<2i", 5, 8) + b"some.txt")
    assert about_importance(tmp_path / "newer.dat") == {"dataset": "some.txt", "chunks_count": 5}
    assert read_importance(tmp_path / "newer.dat").keys() == found.keys()
    for broken in (b"", b"\1\0\0\0\xff\0\0\0name", old[:-3]):
        (tmp_path / "broken.dat").write_bytes(broken)
        with pytest.raises(UsageError, match="is no importance matrix"):
            read_importance(tmp_path / "broken.dat")
    write_importance(tmp_path / "i.gguf", {"blk.0.ffn_down.weight": (torch.ones(96), 1)}, 64, "text")
    with pytest.raises(UsageError, match="has 96 numbers, its inputs are 512"):
        converted(llama, tmp_path / "n.gguf", "q4_k_s", imatrix=tmp_path / "i.gguf")


def test_a_kept_importance_says_of_how_many_chunks_it_is(tmp_path: Path) -> None:
    """As llama-imatrix: the rows that most matrices saw, in chunks, to the nearest."""
    for rows, chunks in ((1, 1), (64, 1), (4 * 64, 4), (4 * 64 + 31, 4), (4 * 64 + 33, 5)):
        sums = {"blk.0.ffn_up.weight": (torch.full((32,), 2.0 * rows), rows), "a": (torch.ones(32), min(rows, 64))}
        write_importance(tmp_path / "i.gguf", sums, 64, "some.txt")
        reader = gguf.GGUFReader(tmp_path / "i.gguf")
        assert reader.fields[gguf.Keys.General.TYPE].contents() == gguf.GGUFType.IMATRIX
        assert reader.fields[gguf.Keys.IMatrix.CHUNK_COUNT].contents() == chunks
        assert reader.fields[gguf.Keys.IMatrix.CHUNK_SIZE].contents() == 64
        assert reader.fields[gguf.Keys.IMatrix.DATASETS].contents() == ["some.txt"]
        held = {tensor.name: tensor.data for tensor in reader.tensors}
        assert held["blk.0.ffn_up.weight.counts"].tolist() == [[rows]]
        assert held["blk.0.ffn_up.weight.in_sum2"].tolist() == [[2.0 * rows] * 32]
        assert about_importance(tmp_path / "i.gguf") == {"dataset": "some.txt", "chunks_count": chunks}
        assert read_importance(tmp_path / "i.gguf")["blk.0.ffn_up.weight"].tolist() == [[2.0] * 32]


def test_sums_and_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for sums, counts in (
        (np.ones((1, 32), np.float32), np.ones((3, 1), np.float32)),
        (np.ones((1, 32), np.float16),) * 2,
    ):
        writer = gguf.GGUFWriter(tmp_path / "i.gguf", "imatrix")
        writer.add_tensor("a.in_sum2", sums)
        writer.add_tensor("a.counts", counts)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UsageError, match="are no sums and counts of importance"):
            read_importance(tmp_path / "i.gguf")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_importance_is_what_transformers_sees_come_into_its_linears(architecture: str, tmp_path: Path) -> None:
    tiny = next(tiny for tiny in every_tiny() if tiny.architecture == architecture)
    folder = folder_of(tmp_path / "model", architecture, dict(tiny.options))
    texts = [list(TOKENS), [5, 3, 9, 9]]
    sums = collect(Located("hf", folder, "model"), texts, SAYS.append)
    model = build(tiny.oracle, json.loads((folder / "config.json").read_text()))
    wanted: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor]) -> None:
            wanted[name] = wanted.get(name, 0) + arguments[0].flatten(0, -2).square().sum(0)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    for text in texts:
        logits_of(model, text)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[tiny.family.GGUF_ARCHITECTURES[0].upper()], 3)
    named = {f"{table.get_name(name)}.weight": total for name, total in wanted.items()}
    assert set(sums) == set(named)
    for name, (total, count) in sums.items():
        assert count == sum(map(len, texts))
        assert torch.allclose(total, named[name], rtol=1e-4), name
    assert as_importance(sums)["blk.0.ffn_down.weight"].shape == (1, 96)
