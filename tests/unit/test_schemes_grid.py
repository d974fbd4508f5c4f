"""Weights on a grid as AWQ, GPTQ and compressed-tensors store them: words worked out by hand, and back again."""

from __future__ import annotations

import pytest
import torch

from llmx.errors import UsageError
from llmx.schemes import awq, compressed, fp8, gptq
from llmx.schemes.grid import Grid, from_words, to_words


def grid(n_out: int = 64, n_in: int = 96, bits: int = 4, group: int = 32, low_zero: int = 0) -> Grid:
    generator = torch.Generator().manual_seed(bits)
    groups = n_in // group
    codes = torch.randint(0, 1 << bits, (n_out, n_in), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(low_zero, 1 << bits, (n_out, groups), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n_out, groups, generator=generator) + 0.1).half().float()
    return Grid(codes, scales, zeros, bits, group)


def word(text: str) -> int:
    value = int(text, 16)
    return value - (1 << 32) if value >= 1 << 31 else value


def same(first: Grid, second: Grid) -> bool:
    parts = all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("codes", "scales", "zeros"))
    return parts and (first.bits, first.group) == (second.bits, second.group)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [1, 7, 32, 50, 96])
def test_words_are_the_bits_of_the_numbers_one_after_the_other(bits: int, n: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    packed = to_words(numbers, bits)
    assert packed.shape == (3, -(-n * bits // 32))
    for row, words in zip(numbers.tolist(), packed.tolist(), strict=True):
        whole = sum(number << i * bits for i, number in enumerate(row))
        assert [w % 2**32 for w in words] == [whole >> 32 * i & 0xFFFFFFFF for i in range(len(words))]
    assert torch.equal(from_words(packed, bits, n), numbers)


def test_a_weight_is_code_less_zero_times_the_scale_of_its_group() -> None:
    one = Grid(
        torch.tensor([[0, 15, 3, 8]], dtype=torch.uint8),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[1, 8]], dtype=torch.uint8),
        bits=4,
        group=2,
    )
    assert one.weight().tolist() == [[-0.5, 7.0, -10.0, 0.0]]


def test_awq_words_hold_outputs_0_2_4_6_1_3_5_7() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 32)
    zeros = torch.arange(8, 16, dtype=torch.uint8)[:, None]
    stored = awq.store(Grid(codes, torch.ones(8, 1), zeros, 4, 32))
    assert stored["qweight"].tolist() == [[word("75316420")]] * 32
    assert stored["qzeros"].tolist() == [[word("FDB9ECA8")]]
    assert stored["scales"].dtype == torch.float16
    assert same(awq.read(stored), Grid(codes, torch.ones(8, 1), zeros, 4, 32))


def test_gptq_words_hold_inputs_in_order_and_version_1_zeros_less_one() -> None:
    codes = torch.arange(32, dtype=torch.uint8)[None].repeat(8, 1) % 16
    even = Grid(codes, torch.ones(8, 1), torch.full((8, 1), 8, dtype=torch.uint8), 4, 32)
    first, second = gptq.store(even, 1), gptq.store(even, 2)
    assert first["qweight"][:, 0].tolist() == [word(w) for w in ("76543210", "FEDCBA98")] * 2
    assert first["qzeros"].tolist() == [[word("77777777")]]
    assert second["qzeros"].tolist() == [[word("88888888")]]
    assert first["g_idx"].tolist() == [0] * 32
    assert first["g_idx"].dtype == torch.int32


def test_gptq_words_of_3_bits_are_ten_a_split_one_ten_a_split_one_ten() -> None:
    def stored(at: int) -> list[int]:
        codes = torch.zeros(32, 32, dtype=torch.uint8)
        codes[:, at] = 7
        held = gptq.store(Grid(codes, torch.ones(32, 1), torch.full((32, 1), 4, dtype=torch.uint8), 3, 32), 2)
        return [w % 2**32 for w in held["qweight"][:, 0].tolist()]

    assert stored(9) == [7 << 27, 0, 0]
    assert stored(10) == [3 << 30, 1, 0]
    assert stored(11) == [0, 7 << 1, 0]
    assert stored(20) == [0, 7 << 28, 0]
    assert stored(21) == [0, 1 << 31, 3]
    assert stored(31) == [0, 0, 7 << 29]


def test_compressed_words_hold_codes_and_zero_points_lie_along_the_outputs() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None].repeat(16, 2)
    zeros = torch.arange(16, dtype=torch.uint8)[:, None]
    stored = compressed.store_packed(Grid(codes, torch.ones(16, 1), zeros, 4, 32), False, torch.bfloat16)
    assert stored["weight_packed"][0].tolist() == [word(w) for w in ("76543210", "FEDCBA98")] * 2
    assert stored["weight_zero_point"].tolist() == [[word("76543210")], [word("FEDCBA98")]]
    assert stored["weight_scale"].dtype == torch.bfloat16
    assert stored["weight_shape"].tolist() == [16, 32]


@pytest.mark.parametrize("group", [32, 48, 96])
def test_awq_reads_what_it_stores(group: int) -> None:
    one = grid(group=group)
    assert same(awq.read(awq.store(one)), one)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_reads_what_it_stores(bits: int, version: int) -> None:
    one = grid(bits=bits, low_zero=1 if version == 1 else 0)
    assert same(gptq.read(gptq.store(one, version), version), one)


def test_what_a_format_has_no_place_for_is_refused() -> None:
    with pytest.raises(UsageError, match="zero point of 0"):
        gptq.store(Grid(*vars(grid()).values()), 1)
    with pytest.raises(UsageError, match="not 5"):
        gptq.store(grid(bits=5), 2)
    with pytest.raises(UsageError, match="32 outputs of 3 bits together, so 48"):
        gptq.store(grid(n_out=48, bits=3), 2)
    with pytest.raises(UsageError, match="8 outputs together, so 12"):
        awq.store(grid(n_out=12))
    with pytest.raises(UsageError, match="not 3"):
        awq.store(grid(bits=3))
    with pytest.raises(UsageError, match="symmetric"):
        compressed.store_packed(grid(), True, torch.float16)


def test_float8_and_int8_weights_are_stored_as_they_are() -> None:
    weight, scale = torch.ones(200, 300).to(torch.float8_e4m3fn), torch.ones(2, 3)
    assert set(fp8.store_blocks(weight, scale)) == {"weight", "weight_scale_inv"}
    assert set(compressed.store_fp8(weight, scale, "block")) == {"weight", "weight_scale"}
    assert set(compressed.store_int8(weight.to(torch.int8), torch.ones(200, 1))) == {"weight", "weight_scale"}
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        fp8.store_blocks(weight, torch.ones(1, 3))
