"""`llmx inspect`: each planted fault is found by name, and files without one give no finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quantised import METHODS, twins
from tiny_gguf import write_gguf
from tiny_models import Saved, every_tiny, make
from torch import Tensor

from llmx.formats.hub import locate
from llmx.inspect.examine import Examined, examine
from llmx.schemes import gptq
from llmx.schemes.grid import from_words, to_words
from llmx.schemes.whole import around_zero, symmetric

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")  # plain; with biases; stored fused
TINY = {t.architecture: t for t in reversed(every_tiny()) if t.architecture in ARCHITECTURES}
Q, UP, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj"
# What vLLM refuses of a format that is otherwise right.
REFUSED = {"gptq v2": "sym", "gptq 3 bits": "bits", "gptq act-order": "order", "fp8 blocks": "one rank"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(architecture: str, home: Path) -> Saved:
    return make(TINY[architecture], home / architecture)


@cache
def stored(method: str, home: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and config of a tiny Llama in one of METHODS, or plain, in which case its head is of its own."""
    source = saved("LlamaForCausalLM", home)
    if method == "plain":
        return source.tensors, source.config
    folder = twins(source, method, home / method)[0]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return safetensors.torch.load_file(folder / "model.safetensors"), config


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(held, folder / "model.safetensors")
    return folder


def changed(method: str, change: Change, home: Path, folder: Path) -> Examined:
    """What is found in a copy that `change` has altered."""
    tensors, config = stored(method, home)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    config = json.loads(json.dumps(config))
    change(tensors, config)
    return examine(locate(str(write(folder / "model", tensors, config))))


def as_gguf(source: Saved, folder: Path) -> Path:
    write_gguf(folder / "it.gguf", "LlamaForCausalLM", "llama", source.config, source.tensors)
    return folder / "it.gguf"


def said(found: Examined) -> set[tuple[str, str, str]]:
    return {(one.level, one.check, one.kind) for one in found.findings}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", METHODS)
def test_files_without_a_fault_give_no_finding(method: str, architecture: str, home: Path, tmp_path: Path) -> None:
    folder = twins(saved(architecture, home), method, tmp_path)[0]
    found = examine(locate(str(folder)), stats=True)
    expected = {("warning", "vllm", REFUSED[method])} if method in REFUSED else set()
    if architecture == "Phi3ForCausalLM" and method == "fp8 blocks":
        expected = set()  # fused as it is stored, so no two of its linears share a block
    assert said(found) == expected, [one.message for one in found.findings]
    assert found.unchecked == []
    assert found.ranks["llmx"][1] is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_plain_model_and_its_gguf_give_no_finding(architecture: str, home: Path, tmp_path: Path) -> None:
    source = saved(architecture, home)
    assert said(examine(locate(str(source.folder)))) == set()
    if architecture == "LlamaForCausalLM":
        assert said(examine(locate(str(as_gguf(source, tmp_path))))) == set()


def _set(name: str, change: Callable[[Tensor], Any]) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        made = change(tensors[name])
        tensors[name] = tensors[name] if made is None else made

    return apply


def _at(name: str, index: Any, value: float) -> Change:
    return _set(name, lambda tensor: tensor.__setitem__(index, value))


def _nan_code(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 5:7] = 0xFF


def _config(**more: Any) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] |= more

    return apply


def _weights(**more: Any) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= more

    return apply


def _drop(*names: str) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return apply


def _plain(module: str) -> Change:
    """The linear as it was before it was quantised."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        sizes = {Q: (64, 64), UP: (96, 64)}[module]
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.randn(*sizes)

    return apply


def _off_by_one(tensors: Tensors, config: dict[str, Any]) -> None:
    """All zero points as version 2 has them, in a file of version 1."""
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = torch.full_like(tensors[name], -0x77777778)


def _asymmetric(version: int, config_version: int | None = None) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))
        grid = around_zero(weight, 4, 32, torch.float16)
        grid.zeros.clamp_(min=1)
        tensors.update({f"{UP}.{part}": tensor for part, tensor in gptq.store(grid, version).items()})
        name = "gptq" if (config_version or version) == 1 else "gptq_v2"
        config["quantization_config"] |= {"sym": False, "checkpoint_format": name}

    return apply


def _zero_of_one(count: int) -> Change:
    """`count` neighbouring zero points of 0 in version 1, as AutoGPTQ stores them."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        _asymmetric(1)(tensors, config)
        numbers = from_words(tensors[f"{UP}.qzeros"], 4, 96)
        numbers[0, :count] = 15
        tensors[f"{UP}.qzeros"] = to_words(numbers, 4)

    return apply


def _ragged(tensors: Tensors, config: dict[str, Any]) -> None:
    """Groups of 64 over the 96 inputs of down_proj: GPTQModel writes such."""
    config["quantization_config"]["group_size"] = 64
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        n_out = tensors[f"{name}.scales"].shape[1]
        n_in = tensors[f"{name}.g_idx"].shape[0]
        grid = symmetric(torch.randn(n_out, n_in), 4, 32, torch.float16)
        made = gptq.store(grid, 1)
        made["scales"], made["qzeros"] = made["scales"][::2].contiguous(), made["qzeros"][::2].contiguous()
        made["g_idx"] = (torch.arange(n_in) // 64).int()
        tensors.update({f"{name}.{part}": tensor for part, tensor in made.items()})


def _tied(copy: bool) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True
        if copy:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    return apply


FAULTS: list[tuple[str, str, Change, tuple[str, str, str], str]] = [
    # packing
    ("a tensor of a linear is missing", "awq", _drop(f"{UP}.qzeros"), ("error", "packing", "packing"), UP),
    ("bits", "gptq", _config(bits=8), ("error", "packing", "packing"), Q),
    ("group size", "packed", _weights(group_size=64), ("error", "packing", "packing"), Q),
    ("words", "packed", _set(f"{UP}.weight_packed", lambda t: t[:, :-1]), ("error", "packing", "packing"), UP),
    ("groups that do not divide", "awq", _config(group_size=48), ("error", "packing", "packing"), Q),
    ("scales of blocks", "fp8 blocks", _set(f"{UP}.weight_scale_inv", lambda t: t.T.repeat(2, 1)),
     ("error", "packing", "packing"), UP),
    ("scales of activations", "fp8", _drop(f"{UP}.input_scale"), ("error", "packing", "input_scale"), UP),
    ("no quantization_config", "awq", lambda t, c: c.pop("quantization_config"), ("error", "packing", "packing"), Q),
    # groups
    ("ragged", "gptq", _ragged, ("warning", "groups", "ragged"), DOWN),
    ("g_idx out of range", "gptq", _set(f"{UP}.g_idx", lambda t: t + 1), ("error", "packing", "packing"), UP),
    ("g_idx twice", "gptq act-order", _set(f"{UP}.g_idx", lambda t: t.fill_(1)), ("error", "groups", "g_idx"), UP),
    ("order that is not said", "gptq act-order", _config(desc_act=False), ("error", "groups", "unsaid order"), Q),
    # zeros
    ("zeros of v2 in v1", "gptq", _off_by_one, ("error", "zeros", "version"), UP),
    ("zeros of v1 in v2", "gptq", _config(checkpoint_format="gptq_v2"), ("error", "zeros", "version"), UP),
    ("not symmetric", "gptq", _set(f"{UP}.qzeros", lambda t: t + 1), ("error", "zeros", "not symmetric"), UP),
    ("a wrapped zero", "gptq", _zero_of_one(1), ("warning", "zeros", "wrap"), UP),
    ("a wrapped word", "gptq", _zero_of_one(8), ("error", "zeros", "word"), UP),
    ("zeros off by one, v1 as v2", "gptq", _asymmetric(1, 2), ("warning", "zeros", "off by one"), UP),
    ("zeros off by one, v2 as v1", "gptq", _asymmetric(2, 1), ("warning", "zeros", "off by one"), UP),
    ("zeros that config denies", "packed, zeros", _weights(symmetric=True), ("error", "zeros", "not symmetric"), UP),
    # scales
    ("scales of zero", "awq", _set(f"{UP}.scales", lambda t: t.zero_()), ("error", "scales", "all zero"), UP),
    ("a scale of zero", "awq", _at(f"{UP}.scales", (1, 3), 0.0), ("warning", "scales", "zero"),
     UP),
    ("negative", "packed", _set(f"{UP}.weight_scale", lambda t: t.neg_()), ("warning", "scales", "negative"), UP),
    ("absurd", "int8", _set(f"{UP}.weight_scale", lambda t: t * 1e6), ("error", "scales", "absurd"), UP),
    ("inverted", "fp8 blocks", _set(f"{UP}.weight_scale_inv", lambda t: 1 / t), ("error", "scales", "absurd"), UP),
    ("spread", "fp8 rows", _set(f"{UP}.weight_scale", lambda t: torch.cat([t[:-1] / 1e6, t[-1:] / 10])),
     ("warning", "scales", "spread"), UP),
    # values
    ("NaN", "plain", _at(f"{UP}.weight", (2, 3), torch.nan), ("error", "values", "not finite"),
     f"{UP}.weight"),
    ("infinity", "awq", _at(f"{UP}.scales", (1, 3), torch.inf),
     ("error", "values", "not finite"), f"{UP}.scales"),
    ("NaN of FP8", "fp8 rows", _nan_code,
     ("error", "values", "not finite"), f"{UP}.weight"),
    ("all zero", "plain", _set("model.layers.1.input_layernorm.weight", lambda t: t.zero_()),
     ("error", "values", "all zero"), "model.layers.1.input_layernorm.weight"),
    # tensors
    ("a norm is missing", "plain", _drop("model.norm.weight"), ("error", "tensors", "missing"), "model.norm.weight"),
    ("a linear is missing", "awq", _drop(*(f"{UP}.{p}" for p in ("qweight", "qzeros", "scales"))),
     ("error", "tensors", "missing"), f"{UP}.weight"),
    ("a shape", "plain", _set(f"{UP}.weight", lambda t: t[:-1]), ("error", "tensors", "misfit"), UP),
    ("a left-over layer", "plain", lambda t, c: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(96, 64)}),
     ("warning", "tensors", "extra"), "model.layers.7.mlp.up_proj.weight"),
    # tied
    ("a tied head twice", "plain", _tied(copy=True), ("warning", "tied", "stored twice"), "lm_head.weight"),
    ("a tied head that differs", "plain", _tied(copy=False), ("error", "tied", "differs"), "lm_head.weight"),
    ("a tied head, packed", "gptq", _tied(copy=False), ("error", "tied", "packed head"), "lm_head"),
    ("no head", "plain", _drop("lm_head.weight"), ("error", "tied", "no head"), "lm_head.weight"),
    # config
    ("a method that is not read", "awq", _config(quant_method="odd"), ("error", "config", "unreadable"), "config.json"),
    ("lm_head: false", "gptq", _config(lm_head=False), ("error", "config", "left out"), "lm_head"),
    ("quantised and left out", "gptq", _config(dynamic={rf"-:.*{UP.rpartition('.')[2]}": {}}),
     ("error", "config", "left out"), UP),
    ("quantised and ignored", "packed", _config(ignore=["lm_head", "re:.*up_proj"]), ("error", "config", "left out"),
     UP),
    # vllm
    ("nested", "awq", lambda t, c: c.update(text_config={"quantization_config": c.pop("quantization_config")}),
     ("warning", "vllm", "nested"), "config.json"),
    ("groups of 16", "gptq", _config(group_size=16), ("warning", "vllm", "group"), "config.json"),
    ("no zero points", "awq", _config(zero_point=False), ("warning", "vllm", "awq"), "config.json"),
    ("actorder", "packed", _weights(actorder="group"), ("warning", "vllm", "order"), "config.json"),
    ("plain and not left out", "awq", _plain(UP), ("warning", "vllm", "not left out"), UP),
    ("half of a fused linear", "gptq", _plain(Q), ("warning", "vllm", "fused"), Q),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "change", "expected", "tensor"), [pytest.param(*fault[1:], id=fault[0]) for fault in FAULTS]
)
def test_a_planted_fault_is_found_by_name(
    method: str, change: Change, expected: tuple[str, str, str], tensor: str, home: Path, tmp_path: Path
) -> None:
    usual = {("warning", "vllm", REFUSED[method])} if method in REFUSED else set()
    found = changed(method, change, home, tmp_path)
    assert expected in said(found) - usual, [one.message for one in found.findings]
    same = [one for one in found.findings if (one.level, one.check, one.kind) == expected]
    first = next(one for one in same if one.tensor == tensor)
    assert tensor.rpartition(".")[2] in first.message or first.tensor == "config.json"
    assert first.message.endswith(".")


def test_files_that_can_not_be_read_are_named_and_the_others_listed(home: Path, tmp_path: Path) -> None:
    tensors, config = stored("plain", home)
    folder = write(tmp_path / "model", {}, config)
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        halves["a.safetensors" if "layers.0" in name else "b.safetensors"][name] = tensor.contiguous().clone()
    placed = {name: file for file, half in halves.items() for name in half}
    for file, half in halves.items():
        safetensors.torch.save_file(half, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    assert said(examine(locate(str(folder)))) == set()

    safetensors.torch.save_file({"x": torch.ones(2)}, folder / "left.safetensors")
    assert said(examine(locate(str(folder)))) == {("warning", "files", "stray")}
    (folder / "left.safetensors").unlink()

    (folder / "a.safetensors").rename(folder / "gone")
    found = examine(locate(str(folder)))
    (lost,) = [one for one in found.findings if one.check == "files"]
    assert "lacks a.safetensors, which model.safetensors.index.json names" in lost.message
    assert len(found.contents.entries) == len(halves["b.safetensors"])
    assert any("missing" in what for what in found.unchecked)
    assert {one.check for one in found.findings} == {"files"}

    raw = bytearray((folder / "gone").read_bytes())
    at = raw.index(b'"data_offsets":[0,') + len(b'"data_offsets":[')
    raw[at : at + 1] = b"4"
    (folder / "a.safetensors").write_bytes(raw)
    found = examine(locate(str(folder)))
    assert any(one.level == "error" and "a.safetensors" in one.message for one in found.findings)

    raw = bytearray((folder / "b.safetensors").read_bytes())[:-8]
    (folder / "b.safetensors").write_bytes(raw)
    found = examine(locate(str(folder)))
    assert found.contents.entries == []
    assert {"a.safetensors", "b.safetensors"} <= {word for one in found.findings for word in one.message.split(" ")
                                                  for word in (word.rpartition("/")[2].strip(":"),)}  # fmt: skip


def test_two_configs_that_disagree_are_found(home: Path, tmp_path: Path) -> None:
    tensors, config = stored("gptq", home)
    folder = write(tmp_path / "model", tensors, config)
    says = dict(config["quantization_config"])
    (folder / "quantize_config.json").write_text(json.dumps(says))
    assert said(examine(locate(str(folder)))) == set()
    (folder / "quantize_config.json").write_text(json.dumps(says | {"group_size": 128}))
    (found,) = examine(locate(str(folder))).findings
    assert (found.level, found.check) == ("error", "config")
    assert "group_size is 128, config.json says 32" in found.message


def test_blocks_of_a_gguf_file_whose_scale_is_none_are_found(home: Path, tmp_path: Path) -> None:
    path = as_gguf(saved("LlamaForCausalLM", home), tmp_path)
    found = examine(locate(str(path)))
    region = found.contents.checkpoint.region("blk.1.ffn_up.weight")
    raw = bytearray(path.read_bytes())
    raw[region.offset + 4 : region.offset + 8] = b"\x00\x00\xc0\x7f"
    path.write_bytes(raw)
    (one,) = examine(locate(str(path))).findings
    assert (one.level, one.check, one.tensor) == ("error", "values", "blk.1.ffn_up.weight")
    assert "1 NaN or infinite" in one.message
    assert "[0, 1]" in one.message
    path.write_bytes(raw[: len(raw) // 2])
    (one,) = examine(locate(str(path))).findings
    assert one.check == "files"


@pytest.mark.parametrize("method", ["plain", "awq", "fp8 rows", "packed"])
def test_statistics_are_those_of_the_weights(method: str, home: Path, tmp_path: Path) -> None:
    source = saved("LlamaForCausalLM", home)
    if method == "plain":
        folder, unpacked = source.folder, source.tensors
    else:
        folder, plain = twins(source, method, tmp_path)
        unpacked = safetensors.torch.load_file(plain / "model.safetensors")
    found = examine(locate(str(folder)), stats=True)
    parts = {"awq": "qweight", "packed": "weight_packed"}
    for module in (Q, UP, "model.norm", "model.embed_tokens"):
        weight = unpacked[f"{module}.weight"]
        part = parts.get(method, "weight") if module in (Q, UP) else "weight"
        stats = found.stats[f"{module}.{part}"]
        assert stats["min"] == pytest.approx(float(weight.min()), rel=1e-6)
        assert stats["max"] == pytest.approx(float(weight.max()), rel=1e-6)
        assert stats["absmax"] == pytest.approx(float(weight.abs().max()), rel=1e-6)
        assert stats["rms"] == pytest.approx(float(weight.square().mean().sqrt()), rel=1e-4)
        assert stats["zeros"] == int((weight == 0).sum())


def test_ranks_that_would_cut_groups_or_blocks_are_named(home: Path, tmp_path: Path) -> None:
    """4 heads of 16, 2 for keys and values; an MLP 96 wide, in groups of 32: 48 inputs of two ranks are no groups."""
    found = changed("awq", lambda tensors, config: None, home, tmp_path)
    assert found.ranks["llmx"][1] is found.ranks["llmx"][2] is None
    assert "8 ranks" in str(found.ranks["llmx"][8])
    assert found.ranks["vLLM"][1] is None
    assert found.ranks["vLLM"][2] == "model.layers.0.mlp.down_proj has 48 inputs a rank, no whole groups of 32"
    assert "model.layers.0.self_attn.o_proj has 16 inputs a rank" in str(found.ranks["vLLM"][4])
    (tmp_path / "b").mkdir()
    blocks = changed("fp8 blocks", lambda tensors, config: None, home, tmp_path / "b")
    assert blocks.ranks["vLLM"][1] == "model.layers.0.self_attn.q_proj has 64 outputs a rank, no whole blocks of 128"
