"""What quantization_config says, what is refused of it, and tensors that do not fit: each is one sentence, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.quantization import Rule, of_folder, read
from llmx.formats.safetensors import open_safetensors
from llmx.schemes import awq, compressed, fp8, gptq
from llmx.schemes.whole import around_zero, symmetric

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def packed(targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": WEIGHTS | weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def rule(config: dict[str, Any]) -> Rule:
    (found,) = read(Fields(config, "config.json")).rules
    return found


def test_what_the_tensors_do_not_say_is_read() -> None:
    assert rule(AWQ) == Rule("awq", 4, 32)
    assert rule({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}) == Rule("awq", 4, 64)
    assert rule(GPTQ) == Rule("gptq", 4, 32)
    assert rule(GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}) == Rule("gptq", 4, None, version=2)
    assert rule(GPTQ | {"dynamic": {"-:.*": {}}}).varies
    assert rule({"quant_method": "fp8", "weight_block_size": [128, 64]}) == Rule("fp8", block=(128, 64))
    assert rule({"quant_method": "fp8", "activation_scheme": "static"}) == Rule("fp8")
    assert rule(packed()) == Rule("packed", 4, 32)
    assert rule(packed(symmetric=False)) == Rule("packed", 4, 32, symmetric=False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({}, "quant_method is missing"),
        (AWQ | {"version": "gemv"}, "'gemv' can't be read; gemm can"),
        (AWQ | {"bits": 3}, "AWQ weights of 3 bits"),
        (GPTQ | {"bits": 5}, "GPTQ weights of 5 bits"),
        (GPTQ | {"bits": True}, "bits must be a whole number"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ | {"pack_dtype": "int16"}, "int32"),
        (GPTQ | {"group_size": 2**40}, "group_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' can't be read; e4m3 can"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "outputs and inputs of a block"),
        (packed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (packed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (packed() | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (packed() | {"quantization_status": "frozen"}, "frozen"),
        (packed() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (packed(num_bits=9), "num_bits"),
        (packed(type="float"), "no pack-quantized"),
        (packed(strategy="tensor_group"), "tensor_group"),
        (packed(dynamic=True), "dynamic"),
        (packed(("re:(",)), "no regular expression"),
    ],
)
def test_what_can_not_be_read_is_refused_in_a_sentence(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(Fields(config, "config.json"))
    assert says in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS | {"num_bits": 2}},
        "b": {"targets": ["re:.*down_proj"], "weights": WEIGHTS | {"num_bits": 8}},
        "c": {"targets": ["model.layers.0.mlp.down_proj"], "weights": WEIGHTS | {"num_bits": 6}},
        "d": {"targets": ["model.layers.9"], "weights": None},
    }
    found = read(Fields(packed() | {"config_groups": groups}, "config.json"))
    bits = [found.rule(f"model.layers.{name}") for name in ("0.mlp.down_proj", "1.mlp.down_proj", "1.mlp.up_proj")]
    assert [one and one.bits for one in bits] == [6, 8, 2]


def folder(path: Path, config: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    held = {f"m.q.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(held, path / "model.safetensors")
    return path


def weight(n_out: int = 64, n_in: int = 96) -> torch.Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(1))


def four(method: str) -> dict[str, torch.Tensor]:
    if method == "awq":
        return awq.store(around_zero(weight(), 4, 32, torch.float16))
    grid = symmetric(weight(), 4, 32, torch.float16)
    return gptq.store(grid, 1) if method == "gptq" else compressed.store_packed(grid, True, torch.float16)


def test_old_gptq_folders_say_it_in_a_file_of_its_own_and_others_in_text_config(tmp_path: Path) -> None:
    path = folder(tmp_path, None, four("gptq"))
    with pytest.raises(UsageError, match="no quantization_config says how"):
        open_safetensors(path)
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert of_folder(path) == read(Fields(GPTQ, "config.json"))
    open_safetensors(path)
    (path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": GPTQ | {"bits": 8}}}))
    with pytest.raises(UsageError, match=r"q\.qzeros has numbers of 4 bits, but quantization_config says 8"):
        open_safetensors(path)


GOOD = [(AWQ, four("awq")), (GPTQ, four("gptq")), (packed(), four("packed"))]
FLOATS = {"weight": weight(200, 300).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 3)}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BYTES = {"weight": torch.ones(64, 96, dtype=torch.int8), "weight_scale": torch.ones(64, 1)}
ROWS = packed(num_bits=8, strategy="channel", group_size=None) | {"format": "int-quantized"}


@pytest.mark.parametrize(("config", "tensors"), [*GOOD, (BLOCKS, FLOATS), (ROWS, BYTES)])
def test_tensors_that_fit_are_accepted_and_none_may_be_missing(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    open_safetensors(folder(tmp_path, config, tensors))
    for name in set(tensors) - {"g_idx", "qweight", "weight_packed", "weight"}:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(UsageError, match=rf"m\.q\.{'weight_scale' if 'scale_' in name else name} is missing"):
            open_safetensors(folder(tmp_path, config, rest))


@pytest.mark.parametrize(
    ("config", "tensors", "change", "says"),
    [
        (AWQ, four("awq"), {"qzeros": torch.zeros(3, 9, dtype=torch.int32)}, "m.q.qzeros is stored as 3×9"),
        (AWQ, four("awq"), {"qzeros": torch.zeros(3, 8)}, "m.q.qzeros is stored as F32"),
        (AWQ | {"group_size": 64}, four("awq"), {}, "m.q.scales: 96 inputs are not whole groups of 64"),
        (AWQ | {"group_size": 48}, four("awq"), {}, "m.q.scales has 3 scales for 96 inputs"),
        (AWQ, four("gptq"), {}, "m.q.qweight is stored as 12×64"),
        (GPTQ, four("awq"), {}, "m.q.qweight is stored as 96×8"),
        (GPTQ, four("gptq"), {"qzeros": torch.zeros(3, 7, dtype=torch.int32)}, "m.q.qzeros is stored as 3×7"),
        (GPTQ, four("gptq"), {"g_idx": torch.full((96,), 3, dtype=torch.int32)}, "m.q.g_idx names groups 3 to 3"),
        (GPTQ, four("gptq"), {"g_idx": torch.zeros(95, dtype=torch.int32)}, "m.q.g_idx is stored as 95"),
        (packed(), four("packed"), {"weight_shape": torch.tensor([64, 97])}, "m.q.weight_packed is stored as 64×12"),
        (packed(), four("packed"), {"weight_scale": torch.ones(64, 4)}, "m.q.weight_scale has 4 scales"),
        (packed(symmetric=False), four("packed"), {}, "m.q.weight_zero_point is missing"),
        (packed(num_bits=8), four("packed"), {}, "64×96 weights of 8 bits"),
        (packed(("re:other",)), four("packed"), {}, "leaves this linear out"),
        (packed(), four("gptq"), {}, "m.q.qweight is stored as I32, but quantization_config says packed"),
        (BLOCKS, FLOATS, {"weight_scale_inv": torch.ones(3, 3)}, "m.q.weight_scale_inv is stored as F32 3×3"),
        (ROWS, BYTES, {"weight_scale": torch.ones(63, 1)}, "m.q.weight_scale is stored as F32 63×1"),
        (ROWS, FLOATS, {}, "m.q.weight is stored as F8_E4M3, but quantization_config says int8"),
        (BLOCKS, FLOATS, {"weight": FLOATS["weight"].to(torch.float8_e5m2)}, "stored as F8_E5M2"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], change: dict[str, torch.Tensor], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        open_safetensors(folder(tmp_path, config, tensors | change))
    assert says in str(caught.value)


def test_linears_that_are_stored_plainly_are_left_alone(tmp_path: Path) -> None:
    assert open_safetensors(folder(tmp_path, GPTQ, {"weight": weight()})).quantization is not None


def test_float8_of_a_method_with_blocks_is_stored_so() -> None:
    assert fp8.store_blocks(FLOATS["weight"], FLOATS["weight_scale_inv"])["weight_scale_inv"].dtype == torch.float32
