"""From positions to a report's figures, by llama-perplexity's formulae."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

FRACTIONS = {"p0.1": 0.001, "p1": 0.01, "p5": 0.05, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75} | {
    "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999,
}  # fmt: skip
SPREAD = ("min", *FRACTIONS, "max")
NAMES = {  # what `perplexity` gives, and what `distance` adds
    "perplexity": ("perplexity", "perplexity.mean", "perplexity.se", "nll", "nll.mean", "nll.se"),
    "distance": (
        *("reference_perplexity", "reference_perplexity.mean", "reference_perplexity.se"),
        *("kld", *(f"kld.{name}" for name in ("mean", "se", *SPREAD))),
        *("same_top.share", "same_top.se"),
        *("delta_p", *(f"delta_p.{name}" for name in ("mean", "se", "rms", "rms_se", *SPREAD))),
        *(f"{name}{end}" for name in ("ppl_ratio", "ln_ppl_ratio", "ppl_difference") for end in ("", ".mean", ".se")),
        "nll_correlation",
    ),
}
DEFINITIONS: dict[str, str] = {
    "perplexity": "exp(mean of -ln p(token that came)) over all scored positions; se = perplexity * nll.se",
    "nll": "mean of -ln p; se = sqrt((mean of squares - square of mean) / (n - 1)), positions taken as independent",
    "text.scored": "positions whose prediction is scored: windows * (ctx - 1 - ctx // 2) by llama.cpp's protocol, where"
    " BOS stands in place of a window's first token if the model adds one; windows * (ctx - 1) by hf's",
    "reference_perplexity": "the same of the reference, from its stored log-probabilities (16 bits a token)",
    "kld": "Kullback-Leibler divergence from the reference, in nats: sum over tokens with ln p_ref > -16 of"
    " p_ref * (ln p_ref - ln p), at each scored position; pNN linear between ranks",
    "same_top": "share of positions where both find the same token likeliest; se = sqrt(s * (1 - s) / (n - 1))",
    "delta_p": "p - p_ref of the token that came, as shares of 1; rms = sqrt(mean of squares)",
    "ln_ppl_ratio": "nll - nll of the reference; se from both variances and their covariance over the same positions",
    "ppl_ratio": "exp(ln_ppl_ratio); se = ratio * ln_ppl_ratio.se",
    "ppl_difference": "perplexity - reference_perplexity; se with the covariance",
    "nll_correlation": "of the two models' -ln p over the scored positions",
}


def mean_of(values: Any) -> dict[str, float]:
    """{"mean", "se"}; se 0 for one value."""
    count = len(values)
    mean = float(np.mean(values))
    variance = float(np.mean(np.square(values))) - mean * mean
    return {"mean": mean, "se": math.sqrt(max(0.0, variance) / (count - 1)) if count > 1 else 0.0}


def exponential(log: Mapping[str, float]) -> dict[str, float]:
    """Of a mean of logarithms and its error."""
    value = math.exp(log["mean"]) if log["mean"] < 700 else math.inf
    return {"mean": value, "se": value * log["se"]}


def spread_of(values: Any) -> dict[str, float]:
    found = np.quantile(values, list(FRACTIONS.values()))
    between = dict(zip(FRACTIONS, map(float, found), strict=True))
    return {"min": float(np.min(values)), **between, "max": float(np.max(values))}


def perplexity(ln_p: Any) -> dict[str, Any]:
    """Figures of one model's log-likelihoods (n,) f64."""
    nll = mean_of(-np.asarray(ln_p))
    return {"perplexity": exponential(nll), "nll": nll}


def distance(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of `measures.compare`'s values, (n,) f64 each; those of `perplexity` are not among them."""
    nll, base = -values["ln_p"], -values["ln_p_base"]
    own, other, count = mean_of(nll), mean_of(base), len(nll)
    covariance = (float(np.mean(nll * base)) - own["mean"] * other["mean"]) / max(1, count - 1)
    ppl, ppl_base = exponential(own), exponential(other)

    def error(a: float, b: float, both: float) -> float:
        return math.sqrt(max(0.0, a * a + b * b - 2 * both))

    ratio = {"mean": own["mean"] - other["mean"], "se": error(own["se"], other["se"], covariance)}
    both = ppl["mean"] * ppl_base["mean"] * covariance
    spread = own["se"] * other["se"]
    same = float(np.mean(values["same_top"]))
    squares = mean_of(np.square(values["p_diff"]))
    rms = math.sqrt(squares["mean"])
    return {
        "reference_perplexity": ppl_base,
        "kld": mean_of(values["kld"]) | spread_of(values["kld"]),
        "same_top": {"share": same, "se": math.sqrt(same * (1 - same) / max(1, count - 1))},
        "delta_p": mean_of(values["p_diff"])
        | {"rms": rms, "rms_se": 0.5 / rms * squares["se"] if rms else 0.0}
        | spread_of(values["p_diff"]),
        "ppl_ratio": exponential(ratio),
        "ln_ppl_ratio": ratio,
        "ppl_difference": {
            "mean": ppl["mean"] - ppl_base["mean"],
            "se": error(ppl["se"], ppl_base["se"], both),
        },
        "nll_correlation": covariance / spread if spread else None,
    }
