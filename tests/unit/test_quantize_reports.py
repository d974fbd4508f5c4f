"""What users of other quantizers reported, kept from happening here.

A Qwen2 of tied embeddings, biases and float16 numbers goes through every method and format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quantizing import TINIES, whole
from tiny_models import make
from torch import Tensor

from llmx.formats.hub import locate
from llmx.formats.safetensors import open_safetensors
from llmx.inspect.examine import examine
from llmx.quantize.options import choose

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("awq", {}),
    ("awq", {"form": "compressed-tensors"}),
    ("gptq", {}),
    ("gptq", {"form": "gptq_v2", "symmetric": False}),
    ("gptq", {"form": "compressed-tensors"}),
    ("fp8", {}),
    ("fp8", {"fp8_mode": "static"}),
    ("fp8", {"fp8_mode": "block"}),
    ("int8", {}),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    made = make(TINIES["Qwen2-0"], folder / "made")
    tensors = {name: tensor.half() for name, tensor in made.tensors.items() if name != "lm_head.weight"}
    target = folder / "qwen"
    target.mkdir()
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(made.config | {"tie_word_embeddings": True, "dtype": "float16"}))
    (target / "generation_config.json").write_text('{"do_sample": false,   "use_cache": true}')
    return target


def linears(names: Any) -> set[str]:
    return {name.rpartition(".")[0] for name in names if "_proj." in name}


@pytest.mark.parametrize(("method", "more"), WAYS, ids=str)
def test_heads_biases_dtypes_and_settings_are_the_sources(
    method: str, more: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    whole(source, out, choose(method, **more), group=32 if method in ("awq", "gptq") else None)
    before, after = open_safetensors(source), open_safetensors(out)
    # sglang#2935, llm-compressor#2798: one embedding, no head, the flag kept
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert not [name for name in after.names() if name.startswith("lm_head")]
    # AutoGPTQ#555, optimum#1827: a bias where the source has one, and nowhere else, in its dtype
    biases = {name for name in before.names() if name.endswith(".bias")}
    assert biases == {name for name in after.names() if name.endswith(".bias")}
    assert len(biases) == 9
    for name in biases:
        assert after.stored(name).kind == "F16"
        scaled = method in ("awq", "int8") and "v_proj" in name  # o_proj's scales are folded into v's outputs
        assert scaled or torch.equal(after.read(name), before.read(name))
    # GPTQModel casts to bfloat16, AutoAWQ changes generation_config.json
    floats = {after.stored(name).kind for name in after.names()} & {"F16", "BF16", "F32"}
    assert floats == ({"F16", "F32"} if more.get("fp8_mode") == "block" else {"F16"})
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    # llm-compressor#1533: every linear is packed
    assert linears(before.names()) == linears(after.names())
    for module in linears(before.names()):
        assert f"{module}.weight" not in after or after.stored(f"{module}.weight").kind in ("I8", "F8_E4M3")
    # vllm#48148: nothing that is sorted by activation
    said = config["quantization_config"]
    assert not said.get("desc_act")
    groups = said.get("config_groups", {}).values()
    assert all(group["weights"].get("actorder") is None for group in groups)
    for name in (name for name in after.names() if name.endswith("g_idx")):
        index = after.read(name)
        assert torch.equal(index, torch.arange(len(index), dtype=torch.int32) // 32)
    # compressed-tensors#1618: asymmetric weights are AutoAWQ's unless another format is asked for
    assert said["quant_method"] == {"awq": "awq", "gptq": "gptq"}.get(method, said["quant_method"]) or more.get("form")
    assert not [one.message for one in examine(locate(str(out))).findings if one.level == "error"]


def test_a_group_whose_weights_are_all_positive_survives_every_format(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ#354, GPTQModel#2350: its zero point is 0, which version 1 of GPTQ's format can't hold."""
    folder = tmp_path / "positive"
    folder.mkdir()
    tensors: dict[str, Tensor] = safetensors.torch.load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].abs() + 0.01
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    for method, more in (("awq", {}), ("gptq", {"form": "gptq_v2", "symmetric": False})):
        out = tmp_path / method
        whole(folder, out, choose(method, **more))
        stored = open_safetensors(out)
        assert int((stored.read(f"{name}.qzeros") == 0).sum()) == stored.read(f"{name}.qzeros").numel()
        findings = examine(locate(str(out)), stats=True)
        assert findings.stats[f"{name}.qweight"]["min"] == 0
        assert not [one for one in findings.findings if one.level == "error"]
