"""The roofline arithmetic, by hand, and that both rates are measured at all."""

from __future__ import annotations

import pytest

from llmx.bench.ceilings import Ceilings, bound, measure

MACHINE = Ceilings(read=10e9, matmul=100e9, dtype="float32")


def test_one_token_is_bound_by_reading_the_weights() -> None:
    limit = bound(MACHINE, weight_bytes=4e9, parameters=1e9, tokens=1)
    assert limit.by == "memory reads"
    assert limit.seconds == pytest.approx(0.4)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    limit = bound(MACHINE, weight_bytes=4e9, parameters=1e9, tokens=512)
    assert limit.by == "arithmetic"
    assert limit.seconds == pytest.approx(2 * 1e9 * 512 / 100e9)


def test_the_rates_are_measured_on_the_named_device() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ceilings = measure("cpu", "bfloat16")
    assert ceilings.read > 1e6
    assert ceilings.matmul > 1e6
    assert ceilings.dtype == "float32"  # what the CPU computes in
