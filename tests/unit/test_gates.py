"""Gates on a report's figures: what they mean, and what is said when they fail or can't be read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmx.errors import CheckFailed, UsageError
from llmx.gates import enforce, judge, parse_gates, require

RESULTS: dict[str, Any] = {
    "kld": {"mean": 0.0612, "se": 0.001, "p99": 0.5},
    "same_top": {"share": 0.94, "se": 0.01},
    "serving": {"ttft_ms": {"mean": 100.0, "p99": 512.0}, "failed": 0, "done": True, "slo": None},
    "decode": {"tokens_per_second": {"mean": 50.0, "sd": 1.0}, "p99": math.nan},
    "text": {"source": "file"},
}


def failed(expression: str) -> bool:
    (verdict,) = judge(parse_gates([expression]), RESULTS)
    return verdict.failed


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("kld.mean>0.05", True),
        ("kld.mean > 0.0612", False),
        ("kld.mean>=0.0612", True),
        ("kld.mean<0.0612", False),
        ("kld.mean<=6.12e-2", True),
        ("kld.mean==0.0612", True),
        ("kld.mean!=0.0612", False),
        ("kld>0.05", True),  # a measured value is its mean
        ("same_top.share<95%", True),
        ("same_top.share<94 %", False),
        ("serving.ttft_ms.p99>500", True),
        ("serving.ttft_ms.p99>0.5s", True),
        ("serving.ttft_ms.p99>0.6s", False),
        ("ttft_ms.p99>500ms", True),  # the only figure that ends so
        ("serving.failed>0", False),
        ("decode.tokens_per_second<-.5", False),
        ("decode.p99<0", True),  # not a number: it can't be shown to hold
        ("serving.slo>1", True),
    ],
)
def test_a_gate_fails_where_its_condition_holds(expression: str, wanted: bool) -> None:
    assert failed(expression) is wanted


@pytest.mark.parametrize(
    "expression",
    [
        *("", "kld.mean", "kld.mean>", ">0.05", "kld.mean=0.05", "kld.mean>>1", "kld.mean>0.05x", "kld.mean>nan"),
        *("a b>1", "kld.mean>1e999", "kld..mean>1", "kld.mean>0.05>1", "kld.mean>5ms", "1>kld.mean", "kld.mean>0x10"),
    ],
)
def test_a_malformed_gate_is_a_usage_error_that_quotes_it(expression: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_gates([expression])
    assert repr(expression) in error.value.message
    assert error.value.exit_code == 2


def test_an_unknown_figure_names_the_closest_and_the_report_s_parts() -> None:
    with pytest.raises(UsageError) as error:
        judge(parse_gates(["kld.maen>1"]), RESULTS)
    assert "no figure kld.maen" in error.value.message
    assert error.value.hint
    assert "kld.mean" in error.value.hint
    assert "kld, same_top, serving, decode" in error.value.hint
    with pytest.raises(UsageError, match=r"no figure text\.source"):  # not a number
        judge(parse_gates(["text.source>1"]), RESULTS)


def test_an_ambiguous_figure_names_the_candidates() -> None:
    with pytest.raises(UsageError, match=r"kld\.p99, serving\.ttft_ms\.p99, decode\.p99"):
        judge(parse_gates(["p99>1"]), RESULTS)


def test_figures_known_before_the_run_are_checked_before_it() -> None:
    require(parse_gates(["kld.mean>1", "p99>1"]), ["kld.mean", "kld.p99"])
    with pytest.raises(UsageError, match=r"no figure kld\.p98"):
        require(parse_gates(["kld.p98>1"]), ["kld.mean", "kld.p99"])


def test_a_failed_gate_says_which_figure_the_bound_and_by_how_much() -> None:
    verdicts = judge(parse_gates(["kld.mean>0.05", "same_top.share<95%", "kld.p99>1"]), RESULTS)
    with pytest.raises(CheckFailed) as error:
        enforce(verdicts)
    assert error.value.exit_code == 3
    assert error.value.message == (
        "2 of 3 gates failed: kld.mean is 0.0612: 0.0112 (22.4 %) above the bound 0.05 (kld.mean>0.05); "
        "same_top.share is 0.94: 0.01 (1.05 %) below the bound 0.95 (same_top.share<95%)."
    )
    enforce(verdicts[2:])


def test_a_bound_of_zero_and_an_equal_figure_are_said_plainly() -> None:
    (above, equal) = judge(parse_gates(["serving.done_late>0", "kld.mean>=0.0612"]), RESULTS | {"serving.done_late": 3})
    assert above.says == "serving.done_late is 3: 3 above the bound 0 (serving.done_late>0)"
    assert equal.says == "kld.mean is 0.0612: at the bound 0.0612 (kld.mean>=0.0612)"
