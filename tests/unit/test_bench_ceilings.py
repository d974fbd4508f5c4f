"""The roofline arithmetic, by hand, and that both rates are measured at all."""

from __future__ import annotations

import pytest

from llmx.bench.ceilings import Ceilings, limit, measure_ceilings
from llmx.bench.table import bound_line

MACHINE = Ceilings(read=10e9, matmul=100e9, dtype="float32")


def test_one_token_is_bound_by_reading_the_weights() -> None:
    one = limit(MACHINE, weight_bytes=4 * 10**9, parameters=10**9, tokens=1, reached=2.0)
    assert one.by == "memory reads"
    assert one.tokens_per_second == pytest.approx(2.5)
    assert one.figures()["share_reached"] == pytest.approx(0.8)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    prompt = limit(MACHINE, weight_bytes=4 * 10**9, parameters=10**9, tokens=512, reached=25.0)
    assert prompt.by == "arithmetic"
    assert prompt.tokens_per_second == pytest.approx(100e9 / 2e9)
    assert prompt.figures()["share_reached"] == pytest.approx(0.5)


def test_more_than_a_ceiling_is_explained_by_what_bounds() -> None:
    """Caches can't be why arithmetic outdoes its ceiling, nor 8-bit products why reads outdo theirs."""
    prompt = limit(MACHINE, weight_bytes=4 * 10**9, parameters=10**9, tokens=512, reached=100.0)
    assert "200.0 % reached" in bound_line("prefill", prompt)
    assert "8-bit" in bound_line("prefill", prompt)
    assert "caches" not in bound_line("prefill", prompt)
    one = limit(MACHINE, weight_bytes=4 * 10**9, parameters=10**9, tokens=1, reached=5.0)
    assert "caches" in bound_line("decode", one)
    assert "8-bit" not in bound_line("decode", one)


def test_the_rates_are_measured_on_the_named_device() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ceilings = measure_ceilings("cpu", "bfloat16")
    assert ceilings.read > 1e6
    assert ceilings.matmul > 1e6
    assert ceilings.dtype == "float32"  # what the CPU computes in
