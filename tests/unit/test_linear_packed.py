"""Linear layers straight from packed weights: the weights are the scheme's, bit for bit, and so is every chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.schemes import schemes
from llmx.schemes.base import Axis, Kind, Layout, Scheme
from llmx.schemes.blocks import BlockScheme
from llmx.schemes.dense import DTYPES

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
DENSE: Layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN))}
BLOCKS = [scheme for scheme in schemes().values() if isinstance(scheme, BlockScheme)]
KERNELS = Kernels("cpu", forced="cpu")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(scheme: BlockScheme, n_out: int, n_in: int) -> Tensor:
    """Any bytes are blocks; those with enormous or no numbers are made 0."""
    generator = torch.Generator().manual_seed(sum(map(ord, scheme.kind)))
    each = n_in // scheme.size
    blocks = torch.randint(0, 256, (n_out * each, scheme.block_bytes), dtype=torch.uint8, generator=generator)
    blocks[~(scheme.unpack_blocks(blocks).abs() < 1e6).all(1)] = 0
    return blocks.reshape(n_out, each * scheme.block_bytes)


def packed_of(scheme: Scheme, weight: Tensor) -> tuple[str, Tensor]:
    layout: Layout = DENSE
    if isinstance(scheme, BlockScheme):
        layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN, scheme.block_bytes, scheme.size))}
    ((name, packed),) = scheme.prepare({"weight": weight}, layout, torch.float32, KERNELS).items()
    return name, packed


def as_plain(weight: Tensor) -> Tensor:
    packed: Tensor = KERNELS.get("new_packed")("F32", *weight.shape)
    KERNELS.get("pack_numbers")(packed, weight)
    return packed


def linear(x: Tensor, packed: Tensor, layout: str, n_out: int, bias: Tensor | None = None) -> Tensor:
    result: Tensor = KERNELS.get("linear_packed")(x, [(layout, packed, n_out, bias)])
    return result


@pytest.mark.parametrize("scheme", BLOCKS, ids=lambda s: s.kind)
@pytest.mark.parametrize(("n_out", "n_in"), [(40, 512), (16, 256), (1, 768)])
def test_packed_weights_are_the_schemes(isa: str, scheme: BlockScheme, n_out: int, n_in: int) -> None:
    weight = random_blocks(scheme, n_out, n_in)
    layout, packed = packed_of(scheme, weight)
    assert torch.equal(KERNELS.get("unpack_linear")(packed, layout, n_out, n_in), scheme.unpack_blocks(
        weight.reshape(-1, scheme.block_bytes)).reshape(n_out, n_in))  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("n_in", [1, 31, 33, 100, 300])
def test_packed_numbers_are_those_that_were_stored(isa: str, kind: str, n_in: int) -> None:
    dense = next(scheme for scheme in schemes().values() if scheme.name == "dense")
    weight = draw(19, n_in).to(DTYPES[kind])
    weight[0, 0], weight[1, 0], weight[2, 0] = 6e-8, float("inf"), -0.0  # a float16 below the normal ones, too
    layout, packed = packed_of(dense, weight)
    assert layout == kind
    assert torch.equal(KERNELS.get("unpack_linear")(packed, layout, 19, n_in), weight.float())


def test_small_blocks_of_k_types_keep_their_bits_in_fewer_bytes() -> None:
    """The point of it: what a pass reads is about what the file holds, where a layout has been made for it."""
    bits = {s.kind: packed_of(s, random_blocks(s, 16, 512))[1].numel() * 8 / (16 * 512) for s in BLOCKS}
    assert {k: round(v, 4) for k, v in bits.items() if v < 32} == {
        **{"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625, "Q5_0": 5.5, "Q5_1": 6, "Q5_K": 5.625, "Q6_K": 6.625, "Q8_0": 8.5},
        **{"Q3_K": 4.625, "Q2_K": 5.125, "IQ4_NL": 8.5, "IQ4_XS": 8.375},
    }


@pytest.mark.parametrize("scheme", BLOCKS, ids=lambda s: s.kind)
def test_a_product_is_that_of_the_same_weights_as_plain_numbers(isa: str, scheme: BlockScheme) -> None:
    weight = random_blocks(scheme, 70, 512)
    layout, packed = packed_of(scheme, weight)
    plain = as_plain(scheme.unpack_blocks(weight.reshape(-1, scheme.block_bytes)).reshape(70, 512))
    for rows in (1, 2, 3, 4, 5, 9, 33):
        x = draw(rows, 512, seed=rows)
        assert torch.equal(linear(x, packed, layout, 70), linear(x, plain, "F32", 70))


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (15, 33), (16, 32), (17, 576), (130, 300), (1000, 256)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_right(isa: str, n_out: int, n_in: int, bias: bool) -> None:
    weight, added = draw(n_out, n_in, seed=1), draw(n_out, seed=2) if bias else None
    packed = as_plain(weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 33):
        x = draw(rows, n_in, seed=3)
        want = x.double() @ weight.double().T + (0 if added is None else added.double())
        scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) + 1
        got = linear(x, packed, "F32", n_out, added)
        assert float(((got - want).abs() / scale).max()) < 3e-7


@pytest.mark.parametrize("layout", ["F32", "q4+m", "q6*f"])
def test_a_rows_bits_depend_on_neither_rows_nor_threads(isa: str, layout: str) -> None:
    kinds = {"q4+m": "Q4_1", "q6*f": "Q6_K"}
    if layout == "F32":
        packed = as_plain(draw(100, 512))
    else:
        scheme = next(s for s in BLOCKS if s.kind == kinds[layout])
        packed = packed_of(scheme, random_blocks(scheme, 100, 512))[1]
    x, threads = draw(33, 512, seed=4), torch.get_num_threads()
    alone = torch.cat([linear(row[None], packed, layout, 100) for row in x])
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for rows in range(1, 34):
                assert torch.equal(linear(x[:rows], packed, layout, 100), alone[:rows])
    finally:
        torch.set_num_threads(threads)


def test_other_dtypes_are_rounded_once() -> None:
    packed, x = as_plain(draw(24, 64)), draw(5, 64, seed=5).bfloat16()
    want = linear(x.float(), packed, "F32", 24).bfloat16()
    got = linear(x, packed, "F32", 24)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


def test_no_rows_give_no_rows() -> None:
    assert linear(draw(0, 64), as_plain(draw(24, 64)), "F32", 24).shape == (0, 24)
