"""Rotary rules as config.json has them: `rope_theta` beside `rope_scaling`, which transformers 4 and 5 both read."""

from __future__ import annotations

import math
from typing import Any

import torch

from llmx.layers.rope import RopeConfig, frequencies

SAME = 1e-5  # relative: rope_freqs are float32, and so are the frequencies that others compute
# Llama 3.1 and 3.2 have these two; files keep the divisors that follow from them only.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0


def rope_to_hf(rope: RopeConfig, position: int) -> dict[str, Any]:
    """The keys of config.json for a rule that was read from GGUF. position: of max_position_embeddings."""
    written: dict[str, Any] = {"rope_theta": short(rope.theta), "rope_scaling": None}
    if rope.divisors and not rope.long_divisors:
        written["rope_scaling"] = _llama3(rope) or _listed(rope, position)
    elif rope.kind == "longrope":
        written["rope_scaling"] = _longrope(rope, position)
    elif rope.kind == "linear":
        written["rope_scaling"] = {"rope_type": "linear", "factor": short(rope.factor)}
    elif rope.kind == "yarn":
        written["rope_scaling"] = _yarn(rope)
    else:
        assert rope.kind == "default", rope.kind
    return written


def short(number: float) -> float:
    """The decimal with the fewest digits that is the same number in float32, as which GGUF keeps it."""
    stored = torch.tensor(number, dtype=torch.float32)
    for digits in range(1, 10):
        rounded = float(f"{number:.{digits}g}")
        if torch.equal(torch.tensor(rounded, dtype=torch.float32), stored):
            return rounded
    return number


def _yarn(rope: RopeConfig) -> dict[str, Any]:
    written = {
        "rope_type": "yarn", "factor": short(rope.factor), "original_max_position_embeddings": rope.original,
        "beta_fast": short(rope.beta_fast), "beta_slow": short(rope.beta_slow),
    }  # fmt: skip
    usual = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    if abs(rope.magnitude - usual) > SAME:
        written["attention_factor"] = rope.magnitude
    return written


def _longrope(rope: RopeConfig, position: int) -> dict[str, Any]:
    """`type`, and no keys beyond what Phi-3 has: its config in transformers 4 takes no others."""
    written = {
        "type": "longrope", "short_factor": [short(n) for n in rope.divisors],
        "long_factor": [short(n) for n in rope.long_divisors],
    }  # fmt: skip
    stretch = position / rope.original
    usual = math.sqrt(1 + math.log(stretch) / math.log(rope.original)) if stretch > 1 else 1.0
    return written if abs(rope.magnitude - usual) < SAME else {**written, "attention_factor": rope.magnitude}


def _listed(rope: RopeConfig, position: int) -> dict[str, Any]:
    """Divisors that follow from no rule: longrope with the same list for every length, and a magnitude of 1."""
    listed = [short(n) for n in rope.divisors]
    return {
        "rope_type": "longrope", "short_factor": listed, "long_factor": listed, "factor": 1.0,
        "attention_factor": 1.0, "original_max_position_embeddings": position,
    }  # fmt: skip


def _llama3(rope: RopeConfig) -> dict[str, Any] | None:
    """The rule whose divisors these are; None if there is none.

    The largest divisor is the factor. Between 1 and it, 1 / divisor is linear in the frequency: its slope gives the
    original context, once the two bounds are those that all releases have. Without such a divisor, powers of two.
    """
    factor = short(max(rope.divisors))
    if factor <= 1:
        return None
    plain = frequencies(RopeConfig(rope.theta, rope.rotated), 1).tolist()
    guesses = [2**n for n in range(10, 21)]
    for frequency, divisor in zip(plain, rope.divisors, strict=True):
        if 1 < divisor < factor:
            smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            turns = LOW_FREQ_FACTOR + smooth * (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
            guesses.insert(0, round(turns * 2 * math.pi / frequency))
    wanted = frequencies(rope, 1)
    for original in guesses:
        tried = RopeConfig(rope.theta, rope.rotated, "llama3", factor, original, LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR)
        if torch.allclose(frequencies(tried, 1), wanted, rtol=SAME, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": HIGH_FREQ_FACTOR, "original_max_position_embeddings": original,
            }  # fmt: skip
    return None
