"""The half of a Hessian that is kept, against whole matrices in float64; what becomes of freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

from llmx.quantize.gptq import invert_lower
from llmx.quantize.gram import PANEL, Gram


def seen(n: int, tokens: int = 300) -> tuple[Tensor, Gram]:
    x = torch.randn(tokens, n, generator=torch.Generator().manual_seed(n))
    made = Gram(n)
    for part in x.split(128):
        made.add(part)
    return x.double(), made


@pytest.mark.parametrize("n", [1, 96, PANEL, PANEL + 1, 2 * PANEL + 160])
def test_half_a_hessian_is_the_whole_one(n: int) -> None:
    x, made = seen(n)
    whole = x.T @ x
    torch.testing.assert_close(made.square(0, n).double(), whole, rtol=1e-4, atol=1e-3)
    assert torch.equal(made.square(0, n), made.square(0, n).T)
    assert torch.equal(made.diagonal(), made.square(0, n).diagonal())
    assert float(made.diagonal().mean()) == float(made.square(0, n).diagonal().mean())
    errors = torch.randn(7, n, generator=torch.Generator().manual_seed(1))
    losses = ((errors.double() @ whole) * errors.double()).sum(1)
    torch.testing.assert_close(made.losses(errors).double(), losses, rtol=1e-5, atol=1e-3)


def test_it_is_arranged_cut_and_read_back_bit_for_bit() -> None:
    n = 2 * PANEL + 128  # whole groups of 96
    _, made = seen(n)
    whole = made.square(0, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
    assert torch.equal(made.arranged(order), whole[order][:, order])
    for low, high in ((0, 32), (PANEL - 16, PANEL + 16), (PANEL, 2 * PANEL), (100, n - 3)):
        assert torch.equal(made.square(low, high), whole[low:high, low:high])
    blocks = [whole[at : at + 96, at : at + 96] for at in range(0, n, 96)]
    assert torch.equal(made.blocks(96), torch.stack(blocks))
    assert torch.equal(Gram.of(whole).square(0, n), whole)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_none_is_seen_wherever_it_is(value: float) -> None:
    for at in (0, PANEL + 3):
        x = torch.ones(2, PANEL + 8)
        x[1, at] = value
        made = Gram(PANEL + 8)
        made.add(x)
        assert not made.is_finite()
    assert seen(PANEL + 8)[1].is_finite()


def test_a_triangle_is_inverted_in_its_place() -> None:
    x, _ = seen(300, 900)
    lower = torch.linalg.cholesky(x.T @ x)
    found = lower.float()
    invert_lower(found)
    torch.testing.assert_close(found.double(), torch.linalg.inv(lower), rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are glibc's settings")
def test_large_pieces_go_back_to_the_system_while_small_ones_stay_between_them() -> None:
    """In a process of its own, as the allocator's settings are the whole process's."""
    script = """
        import pathlib, torch
        from llmx.quantize.memory import given_back

        def taken():
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

        first = torch.ones(7 * 2**20)
        del first  # 29 MB: from here on glibc takes pieces of up to that size from its heap
        before = taken()
        with given_back():
            large, small = [], []
            for _ in range(32):
                large.append(torch.ones(2**20))
                small.append(torch.ones(2**12))
            assert taken() - before > 100e6
            del large
            assert taken() - before < 20e6, taken() - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
