"""Packing in C++ writes the bytes that packing in torch does, for every kind of block and instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.kernels.cpu.pack import KINDS, pack_blocks
from llmx.schemes import schemes
from llmx.schemes.base import Axis, Kind
from llmx.schemes.blocks import PartedScheme

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
PARTED = [scheme for scheme in schemes().values() if isinstance(scheme, PartedScheme)]
KERNELS = Kernels("cpu", forced="cpu")


class InTorch:
    """The table without the packing in C++."""

    activations = "float"

    def has(self, op: str) -> bool:
        return op != "pack_blocks" and KERNELS.has(op)

    def get(self, op: str):  # type: ignore[no-untyped-def]
        return KERNELS.get(op)


def any_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("scheme", PARTED, ids=lambda s: s.kind)
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 256), (15, 512), (16, 768), (49, 256), (700, 512)])
def test_the_bytes_are_those_of_packing_in_torch(isa: str, scheme: PartedScheme, n_out: int, n_in: int) -> None:
    rows = any_bytes(n_out, n_in // scheme.size * scheme.block_bytes)
    layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN, scheme.block_bytes, scheme.size))}
    ((name, want),) = scheme.pack_for_kernel({"weight": rows}, layout, InTorch()).items()
    got: Tensor = KERNELS.get("new_packed")(name, n_out, n_in)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            got.zero_()
            assert pack_blocks(got, name, scheme.kind, rows)
            assert torch.equal(got, want)
    finally:
        torch.set_num_threads(threads)


def test_every_kind_that_kernels_multiply_from_is_packed_in_cpp() -> None:
    assert {scheme.kind for scheme in PARTED} == set(KINDS)
    for scheme in PARTED:
        assert KINDS[scheme.kind][1:] == (scheme.size, scheme.block_bytes)


def test_inputs_of_half_a_wide_block_are_packed_too(isa: str) -> None:
    """Blocks of 32 in a row that 256 does not divide: 576 inputs, as SmolLM2 has."""
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        scheme = next(s for s in PARTED if s.kind == kind)
        rows = any_bytes(33, 576 // 32 * scheme.block_bytes)
        layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN, scheme.block_bytes, 32))}
        ((name, want),) = scheme.pack_for_kernel({"weight": rows}, layout, InTorch()).items()
        ((_, got),) = scheme.pack_for_kernel({"weight": rows}, layout, KERNELS).items()
        assert torch.equal(got, want), name


def test_other_kinds_and_layouts_are_left_to_torch() -> None:
    packed, rows = torch.zeros(1, 4, dtype=torch.uint8), any_bytes(1, 18)
    assert not pack_blocks(packed, "q4", "TQ1_0", rows)
    assert not pack_blocks(packed, "q3", "Q4_0", rows)
    assert not packed.any()
