"""Rotary embedding tables: every scaling rule that open models use, from either style of Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.kernels import Kernels

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn a head's first `rotated` dimensions.

    `kind`: one of KINDS. `original`: positions that the model was first trained on. `magnitude` scales cos and sin
    (yarn, longrope). `divisors` divide the frequencies, one each (GGUF's rope_freqs); `long_divisors` take their place
    when the served context is longer than `original` (longrope).
    """

    theta: float
    rotated: int
    kind: str = "default"
    factor: float = 1.0
    original: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


def frequencies(config: RopeConfig, length: int) -> Tensor:
    """(rotated / 2,) f64: angle per position, for a served context of `length`.

    linear: Chen et al. 2023. llama3: the rule of Llama 3.1's release. yarn: Peng et al. 2023. longrope: Ding et al.
    2024. dynamic (NTK-aware): where transformers follows the text's length, the served context decides here once, and
    so does it between longrope's two lists: a text must not depend on how it was cut into chunks.
    """
    exponent = torch.arange(0, config.rotated, 2, dtype=torch.float64) / config.rotated
    theta = config.theta
    if config.kind == "dynamic" and length > config.original:
        stretch = config.factor * length / config.original - (config.factor - 1)
        theta = theta * stretch ** (config.rotated / (config.rotated - 2))
    inverse = theta**-exponent
    divisors = config.long_divisors if config.long_divisors and length > config.original else config.divisors
    if divisors:
        inverse = inverse / torch.tensor(divisors, dtype=torch.float64)
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = ((config.original / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse * (smooth + (1 - smooth) / config.factor)
    if config.kind == "yarn":
        keep = 1 - _yarn_ramp(config)
        return inverse * (keep + (1 - keep) / config.factor)
    return inverse


def _yarn_ramp(config: RopeConfig) -> Tensor:
    """0 where a frequency turns often enough in the original context to be kept, 1 where it is interpolated."""

    def dimension(turns: float) -> float:
        return config.rotated * math.log(config.original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotated - 1)
    span = high - low if high != low else 0.001
    return ((torch.arange(config.rotated // 2, dtype=torch.float64) - low) / span).clamp(0, 1)


class Rope:
    """cos and sin for every position below `length`: tables (length, rotated / 2) f32 on the device."""

    def __init__(self, config: RopeConfig, length: int, device: torch.device, kernels: Kernels) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(config, length))
        cos, sin = angles.cos() * config.magnitude, angles.sin() * config.magnitude
        self.cos, self.sin = cos.float().to(device), sin.float().to(device)
        self._take = kernels.get("take_rows")

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, rotated / 2) each. Positions past the table (guesses of a step in flight) are clamped."""
        return self._take(self.cos, positions), self._take(self.sin, positions)


def rope_from_hf(
    fields: Fields,
    head_dim: int,
    position: int,
    *,
    theta: float = 10000.0,
    layer_type: str | None = None,
    original: int | None = None,
    partial: bool = False,
) -> RopeConfig:
    """From config.json of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters, perhaps by `layer_type`).

    position: of max_position_embeddings. theta: the family's default. original: overrules what is read. partial:
    whether the family may turn a part of each head. UsageError for a rule that is not built, or a value out of range.
    """
    scaling = fields.section("rope_scaling", None) or fields.section("rope_parameters", None)
    theta = fields.number("rope_theta", theta, low=1)
    share = fields.number("partial_rotary_factor", 1.0, low=0, high=1)
    if scaling is not None and layer_type is not None and layer_type in scaling:
        scaling = scaling.section(layer_type)
    if scaling is not None:
        share = scaling.number("partial_rotary_factor", share, low=0, high=1)
    if share != 1 and not partial:
        raise UsageError(f"{fields.where}: partial_rotary_factor is {share}; this architecture turns whole heads.")
    rotated = _rotated(head_dim, share)
    if scaling is None:
        return RopeConfig(theta, rotated, original=original or position)
    theta = scaling.number("rope_theta", theta, low=1)
    kind = scaling.text("rope_type", "") or scaling.text("type", "default")
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):  # Phi-3's first names for it
        kind = "longrope"
    if kind not in KINDS:
        raise UsageError(f"{fields.where}: RoPE kind {kind!r} is not built; there are {', '.join(KINDS)}.")
    original = original or fields.integer("original_max_position_embeddings", None, low=1)
    original = original or scaling.integer("original_max_position_embeddings", None, low=1) or position
    plain = RopeConfig(theta, rotated, kind, original=original)
    return plain if kind == "default" else _scaled(plain, scaling, position, fields.where)


def _rotated(head_dim: int, partial: float) -> int:
    rotated = int(head_dim * partial)
    if rotated < 2 or rotated % 2:
        raise UsageError(f"Rotary embedding can't turn {rotated} of {head_dim} dimensions; it needs an even number.")
    return rotated


def _scaled(plain: RopeConfig, scaling: Fields, position: int, where: str) -> RopeConfig:
    """The rules other than "default"."""
    factor = scaling.number("factor", None, low=1)
    if factor is None:
        if plain.kind not in ("yarn", "longrope"):
            raise UsageError(f"{where}: rope_scaling.factor is missing; {plain.kind} needs it.")
        factor = position / plain.original
    made = RopeConfig(plain.theta, plain.rotated, plain.kind, factor, plain.original)
    match plain.kind:
        case "dynamic":
            return RopeConfig(plain.theta, plain.rotated, plain.kind, factor, position)
        case "llama3":
            low, high = scaling.number("low_freq_factor", 1.0, low=0), scaling.number("high_freq_factor", 4.0, low=0)
            if low >= high:
                raise UsageError(f"{where}: low_freq_factor {low} must lie below high_freq_factor {high}.")
            return RopeConfig(plain.theta, plain.rotated, plain.kind, factor, plain.original, low, high)
        case "yarn":
            return RopeConfig(
                plain.theta,
                plain.rotated,
                plain.kind,
                factor,
                plain.original,
                beta_fast=scaling.number("beta_fast", 32.0, low=0),
                beta_slow=scaling.number("beta_slow", 1.0, low=0),
                truncate=scaling.boolean("truncate", True),
                magnitude=_yarn_magnitude(scaling, factor),
            )
        case "longrope":
            return _longrope(plain, scaling, factor, where)
    return made


def _yarn_magnitude(scaling: Fields, factor: float) -> float:
    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if (given := scaling.number("attention_factor", None)) is not None:
        return given
    above, below = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    return scale(above) / scale(below) if above and below else scale(1.0)


def _longrope(plain: RopeConfig, scaling: Fields, factor: float, where: str) -> RopeConfig:
    short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
    for name, listed in (("short_factor", short), ("long_factor", long)):
        if len(listed) != plain.rotated // 2 or min(listed) <= 0:
            raise UsageError(f"{where}: {name} must hold {plain.rotated // 2} positive numbers, not {len(listed)}.")
    magnitude = scaling.number("attention_factor", None)
    if magnitude is None:
        magnitude = _longrope_magnitude(factor, plain.original)
    return RopeConfig(
        plain.theta, plain.rotated, plain.kind, factor, plain.original,
        magnitude=magnitude, divisors=short, long_divisors=long,
    )  # fmt: skip


def _longrope_magnitude(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def rope_from_gguf(
    fields: Fields, checkpoint: Gguf, architecture: str, head_dim: int, theta: float = 10000.0
) -> RopeConfig:
    """From GGUF's rope keys and tensors: rope_freqs.weight (llama3), rope_factors_short and _long (longrope)."""

    def at(key: str) -> str:
        return f"{architecture}.rope.{key}"

    theta = fields.number(at("freq_base"), theta, low=1)
    rotated = fields.integer(at("dimension_count"), head_dim, low=2, high=head_dim)
    context = fields.integer(f"{architecture}.context_length", 2048, low=1)
    original = fields.integer(at("scaling.original_context_length"), context, low=1)
    if "rope_freqs.weight" in checkpoint:
        divisors = _divisors(checkpoint, "rope_freqs.weight", rotated, fields.where)
        return RopeConfig(theta, rotated, original=original, divisors=divisors)
    if "rope_factors_long.weight" in checkpoint:
        short = _divisors(checkpoint, "rope_factors_short.weight", rotated, fields.where)
        long = _divisors(checkpoint, "rope_factors_long.weight", rotated, fields.where)
        magnitude = fields.number(at("scaling.attn_factor"), None) or _longrope_magnitude(context / original, original)
        return RopeConfig(
            theta, rotated, "longrope", context / original, original,
            magnitude=magnitude, divisors=short, long_divisors=long,
        )  # fmt: skip
    kind = fields.text(at("scaling.type"), "none", one_of=("none", "linear", "yarn", "longrope"))
    if kind in ("none", "longrope"):
        return RopeConfig(theta, rotated, original=original)
    factor = fields.number(at("scaling.factor"), low=1)
    if kind == "linear":
        return RopeConfig(theta, rotated, kind, factor, original)
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    magnitude *= fields.number(at("scaling.attn_factor"), 1.0)
    fast, slow = fields.number(at("scaling.yarn_beta_fast"), 32.0), fields.number(at("scaling.yarn_beta_slow"), 1.0)
    return RopeConfig(theta, rotated, kind, factor, original, beta_fast=fast, beta_slow=slow, magnitude=magnitude)


def _divisors(checkpoint: Gguf, name: str, rotated: int, where: str) -> tuple[float, ...]:
    if name not in checkpoint:
        raise UsageError(f"{where}: the tensor {name} is missing.")
    found = checkpoint.read(name).float()
    if found.shape != (rotated // 2,) or not bool((found > 0).all()):
        raise UsageError(f"{where}: {name} must hold {rotated // 2} positive numbers.")
    return tuple(found.tolist())
