"""Workloads are seeded, in range, free of special tokens, and never share a prefix."""

from __future__ import annotations

import pytest

from llmx.bench.workload import Span, mixed_jobs, mixed_lengths, parse_span, random_prompt, vocabulary
from llmx.errors import UsageError

IDS = vocabulary(1000, {0, 1, 999})


def test_a_span_is_a_length_or_a_range() -> None:
    assert parse_span("128", "--input-len") == Span(128, 128)
    assert parse_span(" 32:512 ", "--input-len") == Span(32, 512)
    assert str(Span(32, 512)) == "32:512"
    assert str(Span(7, 7)) == "7"


WRONG = ["", "a", "0", "5:4", "0:3", "1:2:3", "-1", "1.5", "٣", "9999999999"]
WRONG_CURVES = ["lognormal", "lognormal:24:1.3", "lognormal:24:-1:512", "lognormal:0:1:9", "lognormal:10:1:9"]


@pytest.mark.parametrize("text", WRONG + WRONG_CURVES)
def test_a_wrong_span_names_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len must"):
        parse_span(text, "--input-len")


def test_special_tokens_are_left_out_of_the_vocabulary() -> None:
    assert list(range(2, 999)) == IDS
    assert vocabulary(3, {0, 1, 2}) == [0, 1, 2]  # nothing but special tokens: then they must do


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    first = mixed_jobs(IDS, 8, Span(32, 64), Span(16, 32), seed=3)
    assert first == mixed_jobs(IDS, 8, Span(32, 64), Span(16, 32), seed=3)
    assert first != mixed_jobs(IDS, 8, Span(32, 64), Span(16, 32), seed=4)


def test_lengths_fill_their_ranges_and_ids_are_allowed_ones() -> None:
    jobs = mixed_jobs(IDS, 200, Span(2, 5), Span(1, 3), seed=0)
    assert {len(job.prompt) for job in jobs} == {2, 3, 4, 5}
    assert {job.output_len for job in jobs} == {1, 2, 3}
    assert {token for job in jobs for token in job.prompt} <= set(IDS)


def test_lengths_are_the_same_for_every_vocabulary() -> None:
    lengths = mixed_lengths(32, Span(32, 512), Span(16, 256), seed=1)
    for ids in (IDS, vocabulary(50000, set())):
        jobs = mixed_jobs(ids, 32, Span(32, 512), Span(16, 256), seed=1)
        assert [(len(job.prompt), job.output_len) for job in jobs] == lengths


def test_no_two_prompts_begin_alike() -> None:
    jobs = mixed_jobs(IDS, 64, Span(32, 32), Span(1, 1), seed=0)
    assert len({job.prompt[:8] for job in jobs}) == 64
    assert random_prompt(IDS, 8, "prefill/0/0") != random_prompt(IDS, 8, "prefill/0/1")


def test_log_normal_lengths_have_their_median_and_spread() -> None:
    span = parse_span("lognormal:24:1.3:512", "--output-len")
    assert str(span) == "lognormal:24:1.3:512"
    drawn = sorted(length for length, _ in mixed_lengths(20_000, span, Span(1, 1), seed=0))
    # of a log-normal law half lie below the median, and 15.87 % above median x e^sigma = 88.06
    assert drawn[10_000] in (23, 24, 25)
    assert sum(length > 88 for length in drawn) / len(drawn) == pytest.approx(0.1587, abs=0.01)
    assert (drawn[0], drawn[-1]) == (1, 512)  # cut, not drawn again
