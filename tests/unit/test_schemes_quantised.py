"""Hugging Face's quantised linears on our kernels and in parts: the same weights to the bit, however they are held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import AsStored, randn, write
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint
from llmx.kernels import Kernels
from llmx.kernels.cpu import native
from llmx.kernels.cpu.linear import unpack_linear
from llmx.layers.linear import Linear
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.schemes import awq, compressed, fp8, gptq
from llmx.schemes.compressed import Packed
from llmx.schemes.grid import Grid
from llmx.schemes.whole import around_zero, symmetric

CPU = torch.device("cpu")
N_OUT, N_IN = 256, 384
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
needs_native = pytest.mark.skipif(native() is None, reason="the CPU kernels are not built here")


def packed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said}},
    }


def grid(bits: int = 4, even: bool = False, group: int = 64, dtype: torch.dtype = torch.float16, seed: int = 0) -> Grid:
    return (symmetric if even else around_zero)(randn(N_OUT, N_IN, seed=seed), bits, group, dtype)


def shuffled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the inputs' groups in another order, as act-order leaves them."""
    order = torch.randperm(N_IN, generator=torch.Generator().manual_seed(3))
    return tensors | {"g_idx": tensors["g_idx"][order].contiguous()}


def rows_of(bits: int, q_of: Tensor) -> Tensor:
    """Numbers (rows, n) in words of which each holds whole numbers only: what older compressed-tensors files have."""
    each = 32 // bits
    filled = torch.nn.functional.pad(q_of, (0, -q_of.shape[1] % each)).unflatten(1, (-1, each)).long()
    words = (filled << torch.arange(each) * bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def float8(height: int, width: int) -> tuple[Tensor, Tensor]:
    scales = torch.rand(-(-N_OUT // height), -(-N_IN // width), generator=torch.Generator().manual_seed(4)) + 0.5
    return randn(N_OUT, N_IN).to(torch.float8_e4m3fn), scales


def apart() -> dict[str, Tensor]:
    one = grid(3, even=True)
    return compressed.store_packed(one, True, torch.float16) | {"weight_packed": rows_of(3, one.codes)}


def int8(dtype: torch.dtype) -> dict[str, Tensor]:
    q = torch.randint(-128, 128, (N_OUT, N_IN), generator=torch.Generator().manual_seed(5), dtype=torch.int8)
    return compressed.store_int8(q, (torch.rand(N_OUT, 1, generator=torch.Generator().manual_seed(6)) + 0.1).to(dtype))


def tensors_of(name: str) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """config, tensors, and the layout that the kernels hold them in."""
    rows = {"group_size": None, "strategy": "channel"}
    cases = {
        "awq": lambda: (AWQ, awq.store(grid()), "q5"),
        "awq 32": lambda: (AWQ | {"group_size": 32}, awq.store(grid(group=32)), "q5"),
        "awq 16": lambda: (AWQ | {"group_size": 16}, awq.store(grid(group=16)), "F32"),
        "gptq": lambda: (GPTQ, gptq.store(grid(even=True), 1), "q4"),
        "gptq asymmetric": lambda: (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq.store(grid(), 2), "q5"),
        "gptq act-order": lambda: (GPTQ | {"desc_act": True}, shuffled(gptq.store(grid(even=True), 1)), "F32"),
        "gptq 2": lambda: (GPTQ | {"bits": 2}, gptq.store(grid(2, even=True), 1), "q4"),
        "gptq 3": lambda: (GPTQ | {"bits": 3}, gptq.store(grid(3, even=True), 1), "q4"),
        "gptq 8": lambda: (GPTQ | {"bits": 8}, gptq.store(grid(8, even=True), 1), "q8"),
        "gptq rows": lambda: (GPTQ | {"group_size": -1}, gptq.store(grid(even=True, group=N_IN), 1), "q4"),
        "packed": lambda: (packed(), compressed.store_packed(grid(even=True), True, torch.float16), "q4"),
        "packed float32": lambda: (
            packed(),
            compressed.store_packed(grid(even=True, dtype=torch.float32), True, torch.float32),
            "F32",
        ),
        "packed bfloat16": lambda: (
            packed(symmetric=False),
            compressed.store_packed(grid(dtype=torch.bfloat16), False, torch.bfloat16),
            "q5",
        ),
        "packed rows": lambda: (
            packed(num_bits=6, **rows),
            compressed.store_packed(grid(6, even=True, group=N_IN), True, torch.float16),
            "q8",
        ),
        "packed apart": lambda: (packed(num_bits=3), apart(), "q4"),
        "int8": lambda: (packed("int-quantized", num_bits=8, **rows), int8(torch.bfloat16), "q8"),
        "int8 one scale": lambda: (
            packed("int-quantized", num_bits=8, strategy="tensor"),
            int8(torch.float16) | {"weight_scale": torch.tensor([0.5])},
            "q8",
        ),
        "fp8 blocks": lambda: (BLOCKS, fp8.store_blocks(*float8(128, 128)), "F32"),
        "fp8 rows": lambda: (
            packed("float-quantized", num_bits=8, type="float", **rows),
            compressed.store_fp8(*float8(1, N_IN), "channel"),
            "F32",
        ),
        "fp8 static": lambda: (
            {"quant_method": "fp8", "activation_scheme": "static"},
            {"weight": float8(1, 1)[0], "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(2.0)},
            "F32",
        ),
    }
    return cases[name]()


NAMES = [
    *("awq", "awq 32", "awq 16", "gptq", "gptq asymmetric", "gptq act-order", "gptq 2", "gptq 3", "gptq 8"),
    *("gptq rows", "packed", "packed float32", "packed bfloat16", "packed rows", "packed apart", "int8"),
    *("int8 one scale", "fp8 blocks", "fp8 rows", "fp8 static"),
]


def checkpoint_of(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Checkpoint:
    return write(folder, {f"a.{name}": tensor for name, tensor in tensors.items()}, quantization=config)


def load(checkpoint: Checkpoint, rank: int = 0, size: int = 1, forced: str | None = None) -> CheckpointWeights:
    return CheckpointWeights(
        checkpoint, AsStored(), Shard(rank, size), torch.float32, CPU, Kernels("cpu", forced, activations="bf16")
    )


def whole(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The weights, unpacked from all that is stored."""
    monkeypatch.setenv("LLMX_PREPARE", "0")
    found = unpacked(load(checkpoint).column([Part("a", N_OUT)], N_IN))
    monkeypatch.delenv("LLMX_PREPARE")
    return found


def unpacked(linear: Linear) -> Tensor:
    return torch.cat([s.scheme.unpack(s.tensors, torch.float32) for s in linear.segments])


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_hold_the_same_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, layout = tensors_of(name)
    checkpoint = checkpoint_of(tmp_path, config, tensors)
    weights = load(checkpoint)
    (segment,) = weights.column([Part("a", N_OUT)], N_IN).segments
    assert weights.unused() == ()
    ((held, blocks),) = segment.tensors.items()
    assert held == layout
    assert torch.equal(unpack_linear(blocks, held, N_OUT, N_IN), whole(checkpoint, monkeypatch))


@pytest.mark.parametrize("forced", [None, "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_a_linear_gives_what_its_weights_give(
    name: str, forced: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, _ = tensors_of(name)
    checkpoint = checkpoint_of(tmp_path, config, tensors)
    x = randn(5, N_IN, seed=8)
    found = load(checkpoint, forced=forced).column([Part("a", N_OUT)], N_IN)(x)
    expected = x.double() @ whole(checkpoint, monkeypatch).double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def cut(checkpoint: Checkpoint, rank: int, size: int, unit: int) -> tuple[Tensor, Tensor]:
    """Weights of a rank's rows and columns, cut to whole `unit` features."""
    rows = load(checkpoint, rank, size).column([Part("a", N_OUT, N_OUT // unit)], N_IN)
    columns = load(checkpoint, rank, size).row("a", N_OUT, N_IN, N_IN // unit)
    return unpacked(rows), unpacked(columns)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "packed apart"])
def test_parts_for_ranks_are_parts_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, _ = tensors_of(name)
    checkpoint = checkpoint_of(tmp_path, config, tensors)
    weight = whole(checkpoint, monkeypatch)
    monkeypatch.setenv("LLMX_PREPARE", "0")
    for size in (1, 2, 4):
        for rank in range(size):
            rows, columns = cut(checkpoint, rank, size, 32)
            assert torch.equal(rows, weight.chunk(size, 0)[rank])
            assert torch.equal(columns, weight.chunk(size, 1)[rank])


def test_words_of_whole_numbers_hold_the_same_as_words_that_numbers_lie_across(tmp_path: Path) -> None:
    one = grid(3, even=True)
    scheme = Packed(compressed.Rule("packed", 3, 64))
    assert torch.equal(scheme.unpack(apart(), torch.float32), one.weight())
    both = compressed.store_packed(grid(3), False, torch.float16)
    zeros = both | {"weight_zero_point": rows_of(3, grid(3).zeros.T.contiguous()).T.contiguous()}
    assert torch.equal(scheme.unpack(zeros, torch.float32), grid(3).weight())


def test_words_of_whole_numbers_of_3_bits_are_not_cut_by_inputs(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, *tensors_of("packed apart")[:2])
    with pytest.raises(UsageError, match="a can't be cut to input features 0 to 192 of 384"):
        load(checkpoint, 0, 2).row("a", N_OUT, N_IN, 12)


@pytest.mark.parametrize("sizes", [(576, 200), (200, 576), (130, 450)])
def test_blocks_of_float8_are_cut_anywhere_and_their_edges_are_ragged(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_out, n_in = sizes
    scales = torch.rand(-(-n_out // 128), -(-n_in // 128), generator=torch.Generator().manual_seed(4)) + 0.5
    q = randn(n_out, n_in).to(torch.float8_e4m3fn)
    expected = q.float() * scales.repeat_interleave(128, 0)[:n_out].repeat_interleave(128, 1)[:, :n_in]
    checkpoint = checkpoint_of(tmp_path, BLOCKS, fp8.store_blocks(q, scales))
    monkeypatch.setenv("LLMX_PREPARE", "0")
    for size in (1, 2):
        for rank in range(size):
            rows = load(checkpoint, rank, size).column([Part("a", n_out, 2)], n_in)
            assert torch.equal(unpacked(rows), expected.chunk(size, 0)[rank])
            columns = load(checkpoint, rank, size).row("a", n_out, n_in, 2)
            assert torch.equal(unpacked(columns), expected.chunk(size, 1)[rank])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_of_version_1_that_wrapped_is_read_as_0(bits: int) -> None:
    one = grid(bits)
    none = Grid(one.codes, one.scales, torch.zeros_like(one.zeros), bits, one.group)
    wrapped = gptq.store(none, 2) | {"qzeros": torch.full_like(gptq.store(none, 2)["qzeros"], -1)}
    assert torch.equal(gptq.GPTQ(1, bits, 64).unpack(wrapped, torch.float32), none.weight())


def test_groups_that_are_ragged_are_read_by_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_in, scales = 576, torch.rand(64, 5, generator=torch.Generator().manual_seed(2)).half().float()
    codes = torch.randint(0, 16, (64, n_in), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    stored = gptq.store(Grid(codes, scales, torch.full((64, 5), 8, dtype=torch.uint8), 4, 128), 1)
    expected = (codes.float() - 8) * scales.repeat_interleave(128, 1)[:, :n_in]
    for tensors in (stored, {name: t for name, t in stored.items() if name != "g_idx"}):
        checkpoint = checkpoint_of(tmp_path / str(len(tensors)), GPTQ | {"group_size": 128}, tensors)
        monkeypatch.setenv("LLMX_PREPARE", "0")
        assert torch.equal(unpacked(load(checkpoint).column([Part("a", 64)], n_in)), expected)
        half = load(checkpoint, 1, 2).row("a", 64, n_in, 2)
        assert torch.equal(unpacked(half), expected[:, 288:])
