"""From what the algorithms made to the tensors and the `quantization_config` of each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmx.quantize.options import HEAD, Options
from llmx.schemes import awq, compressed, fp8, gptq
from llmx.schemes.grid import Grid


@dataclass(frozen=True)
class Scaled:
    """8-bit numbers and their scales, as `widths` makes them. input_scale: (1,), of static activations."""

    numbers: Tensor
    scale: Tensor
    input_scale: Tensor | None = None


def scale_dtype(options: Options, dtype: torch.dtype) -> torch.dtype:
    """Of stored scales, in a model of `dtype`."""
    if options.form in ("awq", "gptq", "gptq_v2"):
        return torch.float16
    return torch.float32 if options.form == "fp8" else dtype


def store(made: Grid | Scaled, options: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a linear by the last component of their names, without its bias."""
    if isinstance(made, Grid):
        if options.form == "awq":
            return awq.store(made)
        if options.form == "compressed-tensors":
            return compressed.store_packed(made, options.symmetric, dtype)
        return gptq.store(made, 1 if options.form == "gptq" else 2)
    if options.form == "fp8":
        return fp8.store_blocks(made.numbers, made.scale)
    scale = made.scale.to(dtype)
    if options.method == "int8":
        return compressed.store_int8(made.numbers, scale)
    tensors = compressed.store_fp8(made.numbers, scale, fp8_kind(options))
    return tensors if made.input_scale is None else {**tensors, "input_scale": made.input_scale.to(dtype)}


# Which axis of a stored tensor is that of the outputs; what is not named here is the same for all.
OUT = {"qweight": 1, "qzeros": 1, "scales": 1, "weight": 0, "weight_packed": 0, "weight_scale": 0,
       "weight_zero_point": 0, "weight_scale_inv": 0}  # fmt: skip


def stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a linear of which each of `parts` has some outputs, as many as fill whole words."""
    if len(parts) == 1:
        return dict(parts[0])
    made = {name: torch.cat([part[name] for part in parts], OUT[name]) if name in OUT else tensor
            for name, tensor in parts[0].items()}  # fmt: skip
    if "weight_shape" in made:
        n_in = parts[0]["weight_shape"][1]
        made["weight_shape"] = torch.tensor([sum(int(part["weight_shape"][0]) for part in parts), int(n_in)])
    return made


def fp8_kind(options: Options) -> str:
    return {"dynamic": "channel", "static": "tensor", "block": "block"}[options.fp8_mode]


def config(options: Options, ignored: Sequence[str], version: str) -> dict[str, Any]:
    """The `quantization_config` of config.json. ignored: names of linears left as they are, but for the head."""
    names = [*ignored] if options.head else [*ignored, HEAD]
    if options.form == "awq":
        head = {"lm_head": True} if options.head else {}
        return {
            "quant_method": "awq", "bits": options.bits, "group_size": options.group, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": list(ignored) or None, **head,
        }  # fmt: skip
    if options.form in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq", "bits": options.bits, "group_size": options.group, "desc_act": False,
            "sym": options.symmetric, "lm_head": options.head, "checkpoint_format": options.form,
            "format": options.form, "pack_dtype": "int32", "true_sequential": False, "damp_percent": options.damp,
            "dynamic": {f"-:{name}": {} for name in ignored},
            "meta": {"quantizer": [f"llmx:{version}"]},
        }  # fmt: skip
    if options.form == "fp8":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": names,
        }  # fmt: skip
    return _compressed(options, names)


def _compressed(options: Options, names: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": options.bits, "type": "int", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }
    if options.grids:
        kind, inputs = "pack-quantized", None
        weights |= {"strategy": "group", "group_size": options.group, "symmetric": options.symmetric, "actorder": None}
    elif options.method == "int8":
        kind = "int-quantized"
        weights |= {"strategy": "channel"}
    else:
        kind = "float-quantized"
        assert inputs is not None
        weights |= {"type": "float", "strategy": fp8_kind(options)}
        inputs |= {"type": "float"}
        if options.fp8_mode == "static":
            inputs |= {"dynamic": False, "strategy": "tensor"}
        if options.fp8_mode == "block":
            weights |= {"block_structure": [128, 128]}
            inputs |= {"strategy": "group", "group_size": 128}
    group = {
        "targets": ["Linear", HEAD] if options.head else ["Linear"], "weights": weights, "input_activations": inputs,
        "output_activations": None,
        "format": kind,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": names,
        "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.19.0", "global_compression_ratio": None,
    }  # fmt: skip
