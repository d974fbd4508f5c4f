"""What the compressed-tensors package writes, we read as it does; what we write, it reads as we do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import randn
from torch import Tensor

from llmx.formats.fields import Fields
from llmx.formats.quantization import read
from llmx.schemes import compressed
from llmx.schemes.compressed import Packed
from llmx.schemes.fp8 import FP8
from llmx.schemes.int8 import Int8
from llmx.schemes.whole import around_zero, symmetric

theirs = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
N_OUT, N_IN = 96, 160


def scheme_of(**weights: Any) -> Any:
    """Theirs, for weights with these arguments."""
    return quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights, observer=None)
    )


def ours(form: str, **weights: Any) -> Any:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    (rule,) = read(Fields(config, "config.json")).rules
    return {"packed": Packed(rule), "int8": Int8(rule.group), "fp8": FP8(rule.block or (0, 0))}[rule.format]


def scales_of(weight: Tensor, groups: int, top: float) -> Tensor:
    return (weight.reshape(N_OUT, groups, -1).abs().amax(-1) / top).bfloat16()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("even", [True, False])
def test_packed_weights(bits: int, strategy: str, even: bool) -> None:
    args = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": even}
    args |= {"group_size": 32} if strategy == "group" else {}
    weight = randn(N_OUT, N_IN).bfloat16()
    scale = scales_of(weight, 5 if strategy == "group" else 1, (1 << bits) / 2)
    state = {"weight": weight, "weight_scale": scale}
    if not even:
        low = 1 << bits - 1
        state["weight_zero_point"] = torch.randint(-low, low, scale.shape, dtype=torch.int8)
    scheme, compressor = scheme_of(**args), theirs.PackedQuantizationCompressor
    written = compressor.compress(dict(state), scheme)
    found = ours("pack-quantized", **args).unpack(written, torch.bfloat16)
    assert torch.equal(found, compressor.decompress(dict(written), scheme)["weight"])

    grid = (symmetric if even else around_zero)(weight, bits, 32 if strategy == "group" else N_IN, torch.bfloat16)
    stored = compressed.store_packed(grid, even, torch.bfloat16)
    assert {name: t.shape for name, t in stored.items()} == {name: t.shape for name, t in written.items()}
    assert {name: t.dtype for name, t in stored.items()} == {name: t.dtype for name, t in written.items()}
    assert torch.equal(compressor.decompress(dict(stored), scheme)["weight"], grid.weight().bfloat16())


@pytest.mark.parametrize(("strategy", "groups"), [("tensor", 0), ("channel", 1), ("group", 5)])
def test_int8_weights(strategy: str, groups: int) -> None:
    args: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True}
    args |= {"group_size": 32} if strategy == "group" else {}
    weight = randn(N_OUT, N_IN).bfloat16()
    scale = scales_of(weight, groups, 127) if groups else (weight.abs().amax() / 127)[None]
    scheme, compressor = scheme_of(**args), theirs.IntQuantizationCompressor
    written = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert written["weight"].dtype == torch.int8
    found = ours("int-quantized", **args).unpack(written, torch.bfloat16)
    assert torch.equal(found, compressor.decompress(dict(written), scheme)["weight"])


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_float8_weights(strategy: str) -> None:
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    shape: tuple[int, ...] = {"tensor": (1,), "channel": (N_OUT, 1), "block": (1, 2)}[strategy]
    args |= {"block_structure": [128, 128]} if strategy == "block" else {}
    weight = randn(N_OUT, N_IN).bfloat16()
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 50 + 0.01).bfloat16()
    scheme, compressor = scheme_of(**args), theirs.FloatQuantizationCompressor
    written = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert written["weight"].dtype == torch.float8_e4m3fn
    found = ours("float-quantized", **args).unpack(written, torch.bfloat16)
    assert torch.equal(found, compressor.decompress(dict(written), scheme)["weight"])
    again = compressed.store_fp8(written["weight"], scale, strategy)
    assert {name: t.shape for name, t in again.items()} == {name: t.shape for name, t in written.items()}
