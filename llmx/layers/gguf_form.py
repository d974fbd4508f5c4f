"""What a family writes into a GGUF file about itself: the way back from a Shape to the keys that `from_gguf` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from llmx.errors import UsageError
from llmx.layers.rope import RopeConfig, frequencies
from llmx.layers.shape import Shape

Value = bool | int | float | str | Sequence[int]


@dataclass(frozen=True)
class GgufForm:
    """pairs: metadata by whole key. tensors: small float32 ones that no checkpoint has. norms: added to the weights of
    every norm. notes: what other readers of the file do not do, a sentence each."""

    architecture: str
    pairs: dict[str, Value]
    tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    norms: float = 0.0
    notes: Sequence[str] = ()


def form_of(
    shape: Shape,
    architecture: str,
    *,
    rope: RopeConfig | None = None,
    activation: str = "silu",
    more: Mapping[str, Value] | None = None,
    norms: float = 0.0,
    notes: Sequence[str] = (),
) -> GgufForm:
    """What every family writes alike, and `more` (keys without the architecture). rope: of the layers that turn.

    UsageError for what no key says.
    """
    if shape.activation != activation:
        raise UsageError(
            f"GGUF files of {architecture} are run with the activation {activation}; this model has {shape.activation}."
        )
    rope = rope or shape.rope
    assert rope is not None, "a family without one rule for all layers names that which is stored"
    pairs: dict[str, Value] = {
        "block_count": shape.layers,
        "context_length": shape.max_position,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": float(shape.eps),
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "vocab_size": shape.vocab,
        "rope.dimension_count": rope.rotated,
        "rope.freq_base": float(rope.theta),
    }
    scaling, tensors = _scaling(rope, architecture)
    pairs |= scaling | dict(more or {})
    named = {f"{architecture}.{key}": value for key, value in pairs.items()}
    return GgufForm(architecture, named, tensors, norms, notes)


def _scaling(rope: RopeConfig, architecture: str) -> tuple[dict[str, Value], dict[str, tuple[float, ...]]]:
    """The keys and tensors of a scaling rule."""
    kind, factor = rope.kind, float(rope.factor)
    if rope.kind == "default" and rope.divisors:
        return {}, {"rope_freqs.weight": rope.divisors}
    if kind == "default":
        return {}, {}
    if kind == "llama3":
        plain = frequencies(RopeConfig(rope.theta, rope.rotated), 1)
        divisors = (plain / frequencies(rope, 1)).to(torch.float32)
        return {}, {"rope_freqs.weight": tuple(divisors.tolist())}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
    if kind == "longrope":
        pairs: dict[str, Value] = {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": rope.original,
            "rope.scaling.attn_factor": float(rope.magnitude),
        }
        return pairs, {"rope_factors_long.weight": rope.long_divisors, "rope_factors_short.weight": rope.divisors}
    if kind != "yarn" or not rope.truncate:
        what = kind if kind != "yarn" else "yarn with truncate false"
        raise UsageError(f"GGUF files of {architecture} have no RoPE scaling {what}.")
    pairs = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.original,
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if not math.isclose(rope.magnitude, usual, rel_tol=1e-7):
        pairs["rope.scaling.attn_factor"] = rope.magnitude / usual
    return pairs, {}


def without_windows(shape: Shape, architecture: str) -> None:
    """UsageError if a layer looks back over less than the longest text: these files don't say that."""
    if narrow := [window for window in shape.windows if window is not None and window < shape.max_position]:
        raise UsageError(
            f"GGUF files of {architecture} don't store sliding windows; this model has one of {narrow[0]} tokens."
        )


def one_window(shape: Shape) -> tuple[dict[str, Value], list[str]]:
    """A window over every layer, as llmx reads it; llama.cpp runs such files without."""
    window = shape.windows[0]
    if window is None:
        return {}, []
    note = f"The window of {window} tokens is stored; llama.cpp runs this architecture without one."
    return {"attention.sliding_window": window}, [note] if window < shape.max_position else []


def in_pattern(flags: Sequence[bool], every: int, what: str) -> None:
    """UsageError unless each `every`-th layer, and no other, is False: the order is the architecture's, not stored."""
    if list(flags) != [bool((i + 1) % every) for i in range(len(flags))]:
        raise UsageError(
            f"GGUF files don't store which layers {what}; this model has another order than each {every}th."
        )
