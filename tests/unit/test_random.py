"""Philox4x32-10 against the known answers of its authors' library, and the uniform numbers made of it."""

from __future__ import annotations

import pytest
import torch

from llmx.kernels import Kernels
from llmx.kernels.reference.random import philox4x32, philox_uniform

KNOWN = [  # kat_vectors of Random123: counter, key, result
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def signed(low: int, high: int) -> int:
    value = high << 32 | low
    return value - 2**64 if value >= 2**63 else value


@pytest.fixture(params=["reference", "cpu"])
def uniform(request):
    kernels = Kernels("cpu", forced=request.param)
    if request.param == "cpu":
        cpu = pytest.importorskip("llmx.kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.describe())
    return kernels.get("philox_uniform")


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_the_known_answers(counter, key, want):
    words = philox4x32([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert [int(word) for word in words] == want


@pytest.mark.parametrize(("counter", "key", "want"), [k for k in KNOWN if k[0][3] < 2**20])
def test_the_words_become_the_four_indices_of_a_group(uniform, counter, key, want):
    seeds, positions = torch.tensor([signed(*key)]), torch.tensor([signed(*counter[:2])])
    first = 4 * counter[3]
    got = uniform(seeds, positions, counter[2], first + 4)[0, first:]
    assert got.tolist() == [((word >> 9) + 0.5) / 2**23 for word in want]


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 63, 64, 65, 1000])
def test_each_backend_equals_a_plain_python_computation(uniform, vocab):
    seeds, positions = torch.tensor([0, -1, 2**62 + 12345]), torch.tensor([0, 2**40 + 3, 77])
    got = uniform(seeds, positions, 2**32 - 1, vocab)
    assert got.shape == (3, vocab)
    assert got.dtype == torch.float32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for index in {0, vocab // 2, vocab - 1}:
            assert got[row, index].item() == plain(seed, position, 2**32 - 1, index)


def plain(seed: int, position: int, stream: int, index: int) -> float:
    mask = 0xFFFFFFFF
    c, k = [position & mask, position >> 32 & mask, stream, index // 4], [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & mask, p >> 32 ^ c[3] ^ k[1], p & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return ((c[index % 4] >> 9) + 0.5) / 2**23


def test_a_row_does_not_see_its_neighbours_nor_the_vocabulary_size(uniform):
    seeds, positions = torch.arange(9) * 7919 - 3, torch.arange(9) * 11
    whole = uniform(seeds, positions, 5, 130)
    for row in range(9):
        assert torch.equal(uniform(seeds[row : row + 1], positions[row : row + 1], 5, 130)[0], whole[row])
    assert torch.equal(uniform(seeds, positions, 5, 67), whole[:, :67])


def test_no_rows_and_strided_arguments(uniform):
    none = torch.empty(0, dtype=torch.int64)
    assert uniform(none, none, 0, 8).shape == (0, 8)
    pairs = torch.arange(12).reshape(6, 2)
    assert torch.equal(uniform(pairs[:, 0], pairs[:, 1], 1, 9), uniform(pairs[:, 0].clone(), pairs[:, 1].clone(), 1, 9))


def test_the_numbers_are_uniform_and_unlike_across_seed_position_and_stream(uniform):
    seeds, positions = torch.arange(16).repeat_interleave(16), torch.arange(16).repeat(16)
    u = torch.stack([uniform(seeds, positions, stream, 1024) for stream in range(4)]).double()
    assert 0 < u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    assert abs(u.mean() - 0.5) < 6 / (12 * u.numel()) ** 0.5
    counts = torch.histc(u.flatten(), 256, 0, 1)
    expected = u.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5  # chi squared, 6 sigma
    rows = u.flatten(0, 1) - 0.5
    correlation = rows @ rows.T / 1024 * 12
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert off_diagonal.abs().max() < 7 / 1024**0.5


def test_the_extreme_words_stay_inside_the_open_interval():
    for bits in (0, 2**32 - 1):
        value = (torch.tensor(bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
        assert 0 < value < 1
        assert torch.isfinite(-torch.log(-torch.log(value)))


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seeds, positions = torch.tensor([0, -1, 2**62 + 12345]), torch.tensor([0, 2**40 + 3, 77])
    got = philox_uniform(seeds.cuda(), positions.cuda(), 3, 1001)
    assert torch.equal(got.cpu(), philox_uniform(seeds, positions, 3, 1001))
