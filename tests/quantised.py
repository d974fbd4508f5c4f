"""A tiny model as each of Hugging Face's quantised formats stores it, and with the same weights unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tiny_models import Saved, save
from torch import Tensor

from llmx.schemes import awq, compressed, fp8, gptq
from llmx.schemes.fp8 import FP8
from llmx.schemes.int8 import Int8
from llmx.schemes.whole import around_zero, symmetric

Packed = tuple[dict[str, Tensor], Tensor]  # what is stored, and the weights that it stands for


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": said}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return config | {"quantization_status": "compressed"}


def _awq(weight: Tensor) -> Packed:
    grid = around_zero(weight, 4, 32, torch.float16)
    return awq.store(grid), grid.weight()


def _gptq(weight: Tensor, bits: int = 4, version: int = 1) -> Packed:
    grid = (symmetric if version == 1 else around_zero)(weight, bits, 32, torch.float16)
    return gptq.store(grid, version), grid.weight()


def _act_order(weight: Tensor) -> Packed:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    back = order.argsort()
    stored, found = _gptq(weight[:, order])
    codes = gptq.read(stored, 1).codes[:, back]
    mixed = gptq.store(gptq.Grid(codes, *list(vars(gptq.read(stored, 1)).values())[1:]), 1)
    return mixed | {"g_idx": stored["g_idx"][back].contiguous()}, found[:, back]


def _packed(weight: Tensor, is_symmetric: bool) -> Packed:
    grid = (symmetric if is_symmetric else around_zero)(weight, 4, 32, torch.bfloat16)
    return compressed.store_packed(grid, is_symmetric, torch.bfloat16), grid.weight()


def _int8(weight: Tensor) -> Packed:
    stored = Int8().pack(weight, "I8")
    return compressed.store_int8(**_renamed(stored)), stored["weight"].float() * stored["weight_scale"].float()


def _renamed(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"q": stored["weight"], "scale": stored["weight_scale"]}


def _float8(weight: Tensor, block: tuple[int, int], method: str) -> Packed:
    stored = FP8(block, method).pack(weight, "F8_E4M3")
    scales = next(tensor for name, tensor in stored.items() if name != "weight")
    if block != (0, 0):
        again = fp8.store_blocks(stored["weight"], scales)
        scales = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return again, stored["weight"].float() * scales
    if method == "fp8":
        stored |= {"input_scale": torch.tensor([0.1])}
    return stored, stored["weight"].float() * scales.float()


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}
METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": (GPTQ, _gptq),
    "gptq v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: _gptq(weight, 4, 2),
    ),
    "gptq 3 bits": (GPTQ | {"bits": 3}, lambda weight: _gptq(weight, 3)),
    "gptq 8 bits": (GPTQ | {"bits": 8}, lambda weight: _gptq(weight, 8)),
    "gptq act-order": (GPTQ | {"desc_act": True}, _act_order),
    "packed": (_compressed("pack-quantized"), lambda weight: _packed(weight, True)),
    "packed, zeros": (_compressed("pack-quantized", symmetric=False), lambda weight: _packed(weight, False)),
    "int8": (_compressed("int-quantized", num_bits=8, strategy="channel", group_size=None), _int8),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: _float8(weight, (0, 0), "fp8"),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda weight: _float8(weight, (128, 128), "fp8"),
    ),
    "fp8 rows": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None),
        lambda weight: _float8(weight, (0, 0), "compressed-tensors"),
    ),
}


def twins(model: Saved, method: str, folder: Path) -> tuple[Path, Path]:
    """The model quantised, and with the same weights unpacked."""
    config, pack = METHODS[method]
    stored, plain = {}, {}
    for name, tensor in model.tensors.items():
        module, _, _ = name.rpartition(".")
        if tensor.dim() != 2 or "embed_tokens" in name or module in config.get("ignore", ()):
            stored[name] = plain[name] = tensor
            continue
        tensors, weight = pack(tensor)
        plain[name] = weight
        stored |= {f"{module}.{suffix}": part for suffix, part in tensors.items()}
    paths = folder / "quantised", folder / "plain"
    for path, held, more in zip(paths, (stored, plain), ({"quantization_config": config}, {}), strict=True):
        save(path, model.config | more, None, like=path)
        (path / "model.safetensors").unlink()
        safetensors.torch.save_file({n: t.contiguous() for n, t in held.items()}, path / "model.safetensors")
    return paths
