"""Windows and figures: what is scored, and the statistics, against plain loops and numpy's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from llmx.errors import UsageError
from llmx.evals import figures, measures
from llmx.evals.protocol import HF, LLAMA, Protocol

COUNT, VOCAB = 400, 50


def test_llama_cpp_scores_the_second_half_of_each_window_behind_a_bos() -> None:
    protocol = Protocol(LLAMA, 8)
    windows = protocol.windows(range(100, 127), None)
    assert windows == [tuple(range(100, 108)), tuple(range(108, 116)), tuple(range(116, 124))]
    assert protocol.prompt(windows[1], 7) == (7, 109, 110, 111, 112, 113, 114)
    assert protocol.prompt(windows[1], None) == (108, 109, 110, 111, 112, 113, 114)
    assert (protocol.first, protocol.scored) == (4, 3)  # the logits of positions 4, 5, 6, for tokens 5, 6, 7
    assert Protocol(LLAMA, 512).scored == 255
    assert len(protocol.windows(range(27), 2)) == 2


def test_the_papers_protocol_scores_all_but_the_first_token() -> None:
    protocol = Protocol(HF, 8)
    (window,) = protocol.windows(range(15), None)
    assert protocol.prompt(window, 7) == tuple(range(7))  # no BOS is put in
    assert (protocol.first, protocol.scored) == (0, 7)


def test_windows_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="The text has 7 tokens; a window of 8"):
        Protocol(LLAMA, 8).windows(range(7), None)
    with pytest.raises(UsageError, match="--ctx must be at least 4, not 3"):
        Protocol(HF, 3)
    with pytest.raises(UsageError, match="--protocol gptq is not known"):
        Protocol("gptq", 8)


def test_positions_are_measured_as_a_plain_loop_does() -> None:
    """In float64, token by token: log-likelihood, KL divergence over what is above -16, likeliest tokens, Δp."""
    logits = torch.randn(60, VOCAB) * 4
    base = (logits + torch.randn(60, VOCAB) * torch.linspace(0, 3, 60)[:, None]).log_softmax(-1)
    targets = torch.randint(VOCAB, (60,))
    found = measures.compare(logits, base, targets)
    assert torch.equal(measures.log_likelihoods(logits, targets), found["ln_p"])
    left_out = 0
    for row in range(60):
        ours, theirs, token = logits[row].tolist(), base[row].tolist(), int(targets[row])
        total = math.log(math.fsum(map(math.exp, ours)))
        kept = [(a, b - total) for a, b in zip(theirs, ours, strict=True) if a > -16]
        left_out += VOCAB - len(kept)
        kld = math.fsum(math.exp(a) * (a - b) for a, b in kept)
        assert float(found["ln_p"][row]) == pytest.approx(ours[token] - total, abs=1e-5)
        assert float(found["ln_p_base"][row]) == pytest.approx(theirs[token])
        assert float(found["kld"][row]) == pytest.approx(kld, abs=2e-6, rel=1e-5)
        p_diff = math.exp(ours[token] - total) - math.exp(theirs[token])
        assert float(found["p_diff"][row]) == pytest.approx(p_diff, abs=1e-6)
        assert bool(found["same_top"][row]) == (ours.index(max(ours)) == theirs.index(max(theirs)))
    assert left_out > 10
    assert 0 < found["same_top"].mean() < 1


def test_of_equally_likely_tokens_the_first_counts() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [2.0, 2.0, 1.0], [1.0, 3.0, 2.0]])
    base = torch.tensor([[-3.0, -1.0, -1.0], [-3.0, -1.0, -1.0], [-3.0, -1.0, -1.0]])
    assert measures.compare(logits, base, torch.tensor([0, 0, 0]))["same_top"].tolist() == [1.0, 0.0, 1.0]


@pytest.fixture
def values() -> dict[str, Any]:
    random = np.random.default_rng(0)
    base = -random.gamma(2.0, 1.0, COUNT)
    own = base - 0.05 + 0.2 * random.standard_normal(COUNT)
    return {
        "ln_p": own,
        "ln_p_base": base,
        "kld": random.gamma(1.0, 0.02, COUNT),
        "p_diff": 0.05 * random.standard_normal(COUNT),
        "same_top": (random.random(COUNT) < 0.9).astype(float),
    }


def test_figures_are_those_of_the_textbook(values: dict[str, Any]) -> None:
    found = figures.perplexity(values["ln_p"]) | figures.distance(values)
    nll, base = -values["ln_p"], -values["ln_p_base"]
    error = nll.std(ddof=1) / math.sqrt(COUNT)
    assert found["nll"] == pytest.approx({"mean": nll.mean(), "se": error})
    assert found["perplexity"] == pytest.approx({"mean": math.exp(nll.mean()), "se": math.exp(nll.mean()) * error})
    assert found["reference_perplexity"]["mean"] == pytest.approx(math.exp(base.mean()))
    difference = nll - base  # its error is that of the pairs, which the covariance must give
    ratio = {"mean": difference.mean(), "se": difference.std(ddof=1) / math.sqrt(COUNT)}
    assert found["ln_ppl_ratio"] == pytest.approx(ratio)
    assert found["ppl_ratio"]["se"] == pytest.approx(math.exp(ratio["mean"]) * ratio["se"])
    weighted = math.exp(nll.mean()) * nll - math.exp(base.mean()) * base
    assert found["ppl_difference"]["mean"] == pytest.approx(math.exp(nll.mean()) - math.exp(base.mean()))
    assert found["ppl_difference"]["se"] == pytest.approx(weighted.std(ddof=1) / math.sqrt(COUNT))
    assert found["nll_correlation"] == pytest.approx(np.corrcoef(nll, base)[0, 1])
    assert found["ln_ppl_ratio"]["se"] < found["nll"]["se"] / 2  # correlated: far below the two errors together
    share = values["same_top"].mean()
    assert found["same_top"] == pytest.approx({"share": share, "se": math.sqrt(share * (1 - share) / (COUNT - 1))})
    assert found["delta_p"]["rms"] == pytest.approx(math.sqrt((values["p_diff"] ** 2).mean()))
    squares = values["p_diff"] ** 2
    assert found["delta_p"]["rms_se"] == pytest.approx(
        squares.std(ddof=1) / math.sqrt(COUNT) / 2 / math.sqrt(squares.mean())
    )
    for name in ("kld", "delta_p"):
        raw = np.sort(values["kld" if name == "kld" else "p_diff"])
        assert found[name]["mean"] == pytest.approx(raw.mean())
        for label, fraction in (("p1", 0.01), ("median", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            place = fraction * (COUNT - 1)  # linear between ranks
            low = int(place)
            wanted = raw[low] * (1 - place + low) + raw[min(low + 1, COUNT - 1)] * (place - low)
            assert found[name][label] == pytest.approx(wanted), (name, label)
        assert (found[name]["min"], found[name]["max"]) == (raw[0], raw[-1])


def test_every_figure_has_its_name_in_the_list_that_gates_are_checked_by(values: dict[str, Any]) -> None:
    from llmx.gates import figures as flat

    assert {name for name, _ in flat(figures.perplexity(values["ln_p"]))} == set(figures.NAMES["perplexity"])
    assert {name for name, _ in flat(figures.distance(values))} == set(figures.NAMES["distance"])


def test_equal_models_and_a_single_position_give_finite_figures(values: dict[str, Any]) -> None:
    same = values | {"ln_p_base": values["ln_p"], "kld": np.zeros(COUNT), "p_diff": np.zeros(COUNT)}
    found = figures.distance(same | {"same_top": np.ones(COUNT)})
    assert found["ln_ppl_ratio"] == {"mean": 0.0, "se": pytest.approx(0.0, abs=1e-9)}
    assert found["delta_p"]["rms_se"] == 0.0
    assert found["same_top"] == {"share": 1.0, "se": 0.0}
    one = figures.distance({name: value[:1] for name, value in values.items()})
    assert one["kld"]["se"] == 0.0
    assert one["nll_correlation"] is None
