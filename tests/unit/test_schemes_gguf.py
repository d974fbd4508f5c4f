"""GGUF's types: stored blocks with their weights, every entry of the tables, and types mixed in a fused projection."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import AsStored, dequantized, randn, random_blocks, write
from torch import Tensor

from llmx.errors import UsageError
from llmx.kernels import Kernels
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.schemes import schemes
from llmx.schemes.blocks import BlockScheme
from llmx.schemes.grids import GRIDS

BLOCKS = json.loads((Path(__file__).parents[1] / "data" / "gguf_blocks.json").read_text())
TYPES = {scheme.kind: scheme for scheme in schemes().values() if isinstance(scheme, BlockScheme)}
CPU = torch.device("cpu")


def unpack(kind: str, raw: Tensor) -> Tensor:
    return TYPES[kind].unpack({"weight": raw}, torch.float32)


def bits(values: Tensor) -> Tensor:
    """float32 as whole numbers, so that -0 is not 0."""
    return values.view(torch.int32)


def test_every_type_that_the_gguf_package_reads_is_here_and_has_stored_blocks() -> None:
    assert set(BLOCKS) == set(TYPES)
    for kind in gguf.GGMLQuantizationType:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        if size > 1 and kind.name not in TYPES:
            with pytest.raises(NotImplementedError):
                dequantized(torch.zeros(1, nbytes, dtype=torch.uint8), kind.name)


@pytest.mark.parametrize("kind", BLOCKS)
def test_three_stored_blocks_have_the_weights_they_had(kind: str) -> None:
    raw = torch.tensor([list(bytes.fromhex(block)) for block in BLOCKS[kind]["blocks"]], dtype=torch.uint8)
    expected = bytearray(zlib.decompress(base64.b85decode(BLOCKS[kind]["weights"])))
    got = unpack(kind, raw)
    assert got.shape == (3, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])
    assert torch.equal(bits(got), torch.frombuffer(expected, dtype=torch.int32).reshape(got.shape))
    assert got[0].unique().numel() > 2, "blocks of one weight would show little"


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_one_byte_and_of_ordinary_weights_unpack_as_in_the_gguf_package(kind: str) -> None:
    nbytes = TYPES[kind].block_bytes
    uniform = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, nbytes)
    raw = torch.cat([uniform.contiguous(), random_blocks(kind, 64, TYPES[kind].size)])
    expected, got = dequantized(raw, kind), unpack(kind, raw)
    known = expected.isfinite()
    assert torch.equal(bits(got)[known], bits(expected)[known])
    assert torch.equal(got.isnan(), expected.isnan())


def indexed(kind: str) -> Tensor:
    """Blocks of scale 1 that hold every index of the type's grid, uint8."""
    index = torch.arange(len(grid_of(kind)))
    low, one = (index & 255).byte(), torch.tensor([0, 0x3C], dtype=torch.uint8)
    rows = low.reshape(-1, 64 if kind.startswith("IQ3") else 32)
    high = (index >> 8).reshape(rows.shape)
    raw = torch.zeros(len(rows), TYPES[kind].block_bytes, dtype=torch.uint8)
    if kind == "IQ2_XXS":
        raw[:, 2:].view(-1, 8, 8)[..., :4] = rows.view(-1, 8, 4)
    elif kind == "IQ2_XS":
        raw[:, 2:66] = torch.stack([rows, high.byte()], -1).flatten(1)
    else:
        raw[:, 2 : 2 + rows.shape[1]] = rows
    if kind == "IQ2_S":
        raw[:, 66:74] = (high.view(-1, 8, 4) << torch.tensor([0, 2, 4, 6])).sum(-1).byte()
    if kind == "IQ3_S":
        raw[:, 66:74] = (high.view(-1, 8, 8) << torch.arange(8)).sum(-1).byte()
    if kind == "IQ1_S":
        word = (high.view(-1, 8, 4) << torch.tensor([0, 3, 6, 9])).sum(-1)
        raw[:, 34:] = torch.stack([word & 255, word >> 8], -1).flatten(1).byte()
    raw[:, :2] = one
    return raw


def grid_of(kind: str) -> Tensor:
    table = getattr(gguf.quants, kind)
    table.init_grid()
    return torch.from_numpy(table.grid.reshape(table.grid_shape))


@pytest.mark.parametrize("kind", GRIDS)
def test_every_point_of_a_grid_is_the_gguf_packages(kind: str) -> None:
    raw = indexed(kind)
    got = unpack(kind, raw)
    assert torch.equal(got, dequantized(raw, kind))
    points = grid_of(kind)
    unit = {"IQ1_S": 1.0, "IQ3_XXS": 4.0, "IQ3_S": 1.0}.get(kind, 8.0)  # one over the factor of scale 1
    shift = 0.125 if kind == "IQ1_S" else 0.0
    assert torch.equal(got.reshape(points.shape) * unit - shift, points)


MIXED = {"q": ("Q5_0", 8), "k": ("Q4_K", 2), "v": ("Q8_0", 2)}  # type and heads of 32, as in Gemma's Q4_K_M files


@pytest.mark.parametrize("prepare", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2])
def test_types_mixed_in_a_fused_projection_are_segments(
    size: int, prepare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMX_PREPARE", prepare)
    stored = {f"{n}.weight": random_blocks(kind, heads * 32, 512, seed=heads) for n, (kind, heads) in MIXED.items()}
    kinds = {f"{n}.weight": kind for n, (kind, _) in MIXED.items()}
    whole = {n: unpack(kind, stored[f"{n}.weight"]) for n, (kind, _) in MIXED.items()}
    mixed, dense = write(tmp_path / "gguf", stored, kinds), write(tmp_path / "dense", as_weights(whole))
    x = randn(5, 512)
    for rank in range(size):
        linears = []
        for checkpoint in (mixed, dense):
            kernels = Kernels("cpu", "reference")
            weights = CheckpointWeights(checkpoint, AsStored(), Shard(rank, size), torch.float32, CPU, kernels)
            parts = [Part(n, heads * 32, heads) for n, (_, heads) in MIXED.items()]
            linears.append((weights.column(parts, 512), [weights.column([part], 512) for part in parts]))
        (fused, _), (plain, apart) = linears
        assert [(s.scheme.name, s.n_out) for s in fused.segments] == [
            (kind, heads * 32 // size) for kind, heads in MIXED.values()
        ]
        assert torch.equal(fused(x), torch.cat([linear(x) for linear in apart], 1))
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-4)
        expected = torch.cat([weight.chunk(size)[rank] for weight in whole.values()])
        torch.testing.assert_close(fused(x), x @ expected.T, rtol=1e-5, atol=1e-3)


def as_weights(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.weight": tensor for name, tensor in whole.items()}


def test_a_width_that_ranks_would_cut_inside_a_block_is_one_sentence(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {"o.weight": random_blocks("Q4_K", 8, 768)}, {"o.weight": "Q4_K"})
    kernels = Kernels("cpu", "reference")
    with pytest.raises(UsageError, match=r"o can't be cut to input features 0 to 384 of 768.* stores 256 of them"):
        CheckpointWeights(checkpoint, AsStored(), Shard(0, 2), torch.float32, CPU, kernels).row("o", 8, 768)


def test_a_type_without_a_quantizer_says_so() -> None:
    with pytest.raises(UsageError, match="weights stored as Q6_K, but has no quantizer that makes them"):
        TYPES["Q6_K"].pack(torch.zeros(2, 256), "Q6_K")
    with pytest.raises(UsageError, match="Q6_K stores 256 inputs together, so 576 do not fit"):
        TYPES["Q6_K"].pack(torch.zeros(2, 576), "Q6_K")
