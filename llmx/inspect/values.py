"""Stored numbers, one tensor at a time and some rows of it at once: what is not finite, zero or absurd, zero points
that another convention would explain, groups that g_idx names wrongly. And statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN, Stored
from llmx.formats.quantization import Rule
from llmx.formats.quantized import by_module, sign
from llmx.inspect.contents import Contents, gptq_bits, logical
from llmx.inspect.findings import Finding
from llmx.schemes import find
from llmx.schemes.base import Axis, Scheme, Span, in_steps, narrow
from llmx.schemes.grid import from_words

CHUNK = 1 << 20  # numbers in memory at once: they stay in the processor's cache
LARGEST = 1e4  # weights beyond it are no weights: a sum of some of them leaves float16
SPREAD = 1e5  # of the largest scale to the middle one
SAMPLE = 1 << 16  # weights from which the middle of their codes is taken
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass
class Stats:
    """Of the numbers that are finite, and how many are not. where: the first of those, as an index into all. full: with
    `squares` and `zeros`."""

    full: bool = True
    low: float = float("inf")
    high: float = float("-inf")
    squares: float = 0.0
    count: int = 0
    zeros: int = 0
    odd: int = 0
    where: int | None = None

    def add(self, numbers: Tensor) -> None:
        flat = numbers.flatten()
        if not flat.numel():
            return
        flat = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
        low, high = torch.aminmax(flat)
        if not (low.isfinite() and high.isfinite()):
            finite = flat.isfinite()
            if self.where is None:
                self.where = self.count + int((~finite).int().argmax())
            self.odd += int((~finite).sum())
            self.count += int((~finite).sum())
            flat = flat[finite]
            if not flat.numel():
                return
            low, high = torch.aminmax(flat)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.count += flat.numel()
        if self.full:
            self.squares += float(torch.dot(flat, flat))
            self.zeros += flat.numel() - int(torch.count_nonzero(flat))

    @property
    def all_zero(self) -> bool:
        return self.count > 0 and not self.odd and self.low == self.high == 0

    def figures(self) -> dict[str, float | int | None]:
        finite = self.count - self.odd
        if not finite:
            return {"min": None, "max": None, "absmax": None, "rms": None, "zeros": 0, "not_finite": self.odd}
        return {"min": self.low, "max": self.high, "absmax": max(-self.low, self.high),
                "rms": (self.squares / finite) ** 0.5, "zeros": self.zeros, "not_finite": self.odd}  # fmt: skip


@dataclass
class Values:
    """stats: by stored name; of packed weights those of the weights."""

    findings: list[Finding] = field(default_factory=list)
    stats: dict[str, dict[str, float | int | None]] = field(default_factory=dict)


def look(contents: Contents, *, stats: bool, progress: Callable[[int, int], None] = lambda done, total: None) -> Values:
    """Reads every tensor once. stats: packed weights are unpacked too, which takes longer."""
    found, done = Values(), 0
    total = sum(entry.stored.nbytes for entry in contents.entries)
    for module, linear in by_module(contents.checkpoint).items():
        packed = sign(linear)
        block = packed is None and "weight" in linear and linear["weight"].kind not in PLAIN
        carrier = linear["weight"] if block else packed
        for part, stored in linear.items():
            if stored.kind in FLOATS:
                _plain(contents, found, stored, part, packed is not None, keep=stats and stored is not carrier)
        if carrier is not None and module not in contents.broken and (block or stats):
            _unpacked(contents, found, module, linear, carrier, keep=stats)
        if packed is not None and module not in contents.broken and contents.quantization is not None:
            rule = contents.quantization.rule(module)
            assert rule is not None
            found.findings += _scales(contents, module, linear, rule)
            found.findings += _zeros(contents, module, linear, rule)
            found.findings += _index(contents, module, linear, rule)
        done += sum(stored.nbytes for stored in linear.values())
        progress(done, total)
    return found


def _chunks(contents: Contents, stored: Stored) -> Iterator[Tensor]:
    """A tensor's numbers, some rows at a time."""
    if not stored.shape:
        yield contents.checkpoint.read(stored.name)
        return
    step = max(1, CHUNK // max(1, prod(stored.shape[1:])))
    for low in range(0, stored.shape[0], step):
        yield contents.checkpoint.read(stored.name, {0: (low, min(low + step, stored.shape[0]))})


def _plain(contents: Contents, found: Values, stored: Stored, part: str, packed: bool, *, keep: bool) -> None:
    """Floating-point numbers as they are stored (of FP8 weights, the codes)."""
    stats = Stats(keep)
    for chunk in _chunks(contents, stored):
        stats.add(chunk if stored.kind != "F8_E4M3" or keep else _nan_codes(chunk))
    if keep:
        found.stats[stored.name] = stats.figures()
    if stats.odd:
        what = "NaN codes of FP8" if stored.kind.startswith("F8") else "NaN or infinite numbers"
        found.findings.append(_not_finite(stored, stored.name, stored.shape, stats, what))
    elif stats.all_zero and part != "bias" and not packed:
        found.findings.append(_all_zero(stored.name, stats.count))


def _nan_codes(chunk: Tensor) -> Tensor:
    """1 for a number, NaN for e4m3's code of none: much faster than the numbers themselves."""
    return torch.where(chunk.view(torch.uint8).bitwise_and(127) == 127, torch.nan, 1.0)


def _not_finite(stored: Stored, name: str, shape: tuple[int, ...], stats: Stats, what: str) -> Finding:
    assert stats.where is not None
    at = [int(index) for index in torch.unravel_index(torch.tensor(stats.where), shape)] if shape else []
    return Finding("error", "values", "not finite", stored.name,
                   f"{name} has {stats.odd:,} {what} among {stats.count:,}, the first at {at}.",
                   "The model's outputs would be NaN: make the checkpoint anew.")  # fmt: skip


def _all_zero(name: str, count: int) -> Finding:
    return Finding("error", "values", "all zero", name, f"{name}: all {count:,} numbers are 0.",
                   "It was probably never written: make the checkpoint anew.")  # fmt: skip


def _unpacked(
    contents: Contents, found: Values, module: str, linear: Mapping[str, Stored], carrier: Stored, *, keep: bool
) -> None:
    """The weights that packed tensors stand for."""
    stats = Stats(keep)
    try:
        for rows in _rows(contents, module, linear):
            stats.add(rows)
    except UsageError:  # no scheme has it: whoever asks for it has said so
        return
    if keep:
        found.stats[carrier.name] = stats.figures()
    if contents.checkpoint.kind == "gguf":
        if stats.odd:
            found.findings.append(_not_finite(carrier, carrier.name, carrier.shape, stats, "NaN or infinite weights"))
        elif stats.all_zero:
            found.findings.append(_all_zero(carrier.name, stats.count))
        elif max(-stats.low, stats.high) > LARGEST:
            found.findings.append(_absurd(carrier.name, "a block's scale", max(-stats.low, stats.high)))


def _prepared(
    contents: Contents, module: str, linear: Mapping[str, Stored]
) -> tuple[Scheme, dict[str, Tensor], dict[str, tuple[Axis | int, ...]]]:
    held = {part: stored for part, stored in linear.items() if part != "bias"}
    scheme = find(module, held, contents.quantization)
    held = {part: stored for part, stored in held.items() if part not in scheme.unread}
    return scheme, {part: contents.checkpoint.read(one.name) for part, one in held.items()}, dict(scheme.axes(held))


def _rows(contents: Contents, module: str, linear: Mapping[str, Stored], most: int | None = None) -> Iterator[Tensor]:
    """Weights (rows, n_in) f32, some outputs at a time, the first `most` weights of them."""
    scheme, tensors, layout = _prepared(contents, module, linear)
    steps = in_steps(layout, tensors)
    if steps is None:
        yield scheme.unpack(tensors, torch.float32)
        return
    kind, n_out, grain = steps
    few = scheme.unpack(narrow(tensors, layout, {kind: Span(0, min(grain, n_out), n_out)}), torch.float32)
    n_in = few.shape[-1]
    step = max(1, (most or CHUNK) // max(1, n_in * grain)) * grain
    for low in range(0, n_out, step):
        span = Span(low, min(low + step, n_out), n_out)
        yield scheme.unpack(narrow(tensors, layout, {kind: span}), torch.float32)
        if most is not None:
            return


def _scales(contents: Contents, module: str, linear: Mapping[str, Stored], rule: Rule) -> Iterator[Finding]:
    """Scales of a linear that fits together."""
    stored = next(linear[part] for part in ("scales", "weight_scale", "weight_scale_inv") if part in linear)
    scales = contents.checkpoint.read(stored.name).float().flatten()
    scales = scales[scales.isfinite()]
    if not scales.numel():
        return
    zero, negative = int((scales == 0).sum()), int((scales < 0).sum())
    if zero == scales.numel():
        yield Finding("error", "scales", "all zero", module, f"{stored.name}: all {zero:,} scales are 0.",
                      "Every weight of it is 0: make the checkpoint anew.")  # fmt: skip
        return
    if zero:
        yield Finding("warning", "scales", "zero", module, f"{stored.name}: {zero:,} of {scales.numel():,} scales are "
                      "0, and so are the weights behind them.",
                      "Dead rows of a model look so, and lost scales.")  # fmt: skip
    if negative:
        yield Finding("warning", "scales", "negative", module, f"{stored.name}: {negative:,} of {scales.numel():,} "
                      f"scales are negative, down to {float(scales.min()):.4g}.", "Quantisers make none.")  # fmt: skip
    most = 448.0 if rule.format == "fp8" else 127.0 if rule.format == "int8" else float(1 << _bits(linear, rule) - 1)
    largest, middle = float(scales.abs().max()), float(scales.abs().median())
    if largest * most > LARGEST:
        yield _absurd(stored.name, f"the largest scale, {largest:.4g}", largest * most)
    elif middle > 0 and largest > SPREAD * middle:
        yield Finding("warning", "scales", "spread", module, f"{stored.name}: the largest scale, {largest:.4g}, is "
                      f"{largest / middle:,.0f} times the middle one, {middle:.4g}.",
                      "Look at that output's weights.")  # fmt: skip


def _absurd(name: str, what: str, weight: float) -> Finding:
    return Finding("error", "scales", "absurd", name.rpartition(".")[0], f"{name}: {what}, makes weights up to "
                   f"{weight:,.0f}; those of language models are seldom beyond 100.",
                   "The scales may be inverted, or of another dtype than they say.")  # fmt: skip


def _bits(linear: Mapping[str, Stored], rule: Rule) -> int:
    return gptq_bits(linear) if rule.format == "gptq" else rule.bits


def _zeros(contents: Contents, module: str, linear: Mapping[str, Stored], rule: Rule) -> Iterator[Finding]:
    if rule.format == "gptq":
        yield from _gptq_zeros(contents, module, linear, rule)
    elif rule.symmetric and rule.format in ("packed", "int8") and "weight_zero_point" in linear:
        words = contents.checkpoint.read(linear["weight_zero_point"].name)
        middle = 0
        if rule.format == "packed":
            middle, n_out = 1 << rule.bits - 1, linear["weight_packed"].shape[0]
            words = from_words(words.T.contiguous(), rule.bits, n_out)
        other = int((words != middle).sum())
        if other:
            yield Finding("error", "zeros", "not symmetric", module, f"{module}.weight_zero_point has {other:,} zero "
                          f"points that are not {middle}, but quantization_config says symmetric: true.",
                          "Loaders that believe it leave them out: set symmetric to false.")  # fmt: skip
    if rule.format == "awq" or (rule.format == "packed" and not rule.symmetric):
        yield from _middle(contents, module, linear, _bits(linear, rule), None)


def _gptq_zeros(contents: Contents, module: str, linear: Mapping[str, Stored], rule: Rule) -> Iterator[Finding]:
    """Version 1 stores a zero less one, so that 0 wraps around; version 2 stores the zero itself."""
    bits = gptq_bits(linear)
    words = contents.checkpoint.read(linear["qzeros"].name)
    stored = from_words(words, bits, linear["scales"].shape[1])
    middle, top, name = 1 << bits - 1, (1 << bits) - 1, f"{module}.qzeros"
    wanted = middle - 1 if rule.version == 1 else middle
    if contents.settings.get("sym", True) is not False:
        if (stored == wanted).all():
            return
        other = middle if rule.version == 1 else middle - 1
        if (stored == other).all():
            yield Finding("error", "zeros", "version", module, f"{name} holds {other} everywhere, as symmetric weights "
                          f"of GPTQ v{3 - rule.version} do, but the config's checkpoint_format says v{rule.version}, "
                          f"in which it would be {wanted}: each weight is off by one step.",
                          f"Set checkpoint_format to {'gptq_v2' if rule.version == 1 else 'gptq'}.")  # fmt: skip
            return
        share = float((stored != wanted).float().mean())
        yield Finding("error", "zeros", "not symmetric", module, f"{name}: {share:.0%} of the zero points are not "
                      f"{wanted}, but quantization_config says sym: true.",
                      "Engines that believe it do not read them: set sym to false.")  # fmt: skip
        return
    if rule.version == 1:
        yield from _wrapped(name, module, words, stored, top)
    yield from _middle(contents, module, linear, bits, rule.version)


def _wrapped(name: str, module: str, words: Tensor, stored: Tensor, top: int) -> Iterator[Finding]:
    whole, single = int((words == -1).sum()), int((stored == top).sum())
    hint = "Store version 2 (checkpoint_format: gptq_v2), which has no such case."
    if whole:
        yield Finding("error", "zeros", "word", module, f"{name}: {whole:,} words are all ones, which is what a zero "
                      "point of 0 makes of its neighbours too in AutoGPTQ's packing of v1.", hint)  # fmt: skip
    elif single:
        yield Finding("warning", "zeros", "wrap", module, f"{name}: {single:,} zero points are stored as {top}, which "
                      f"means 0 to some engines and {top + 1} to others.", hint)  # fmt: skip


def _middle(
    contents: Contents, module: str, linear: Mapping[str, Stored], bits: int, version: int | None
) -> Iterator[Finding]:
    """A matrix's weights are about 0 on average. If they are a step off, its zero points are read wrongly."""
    scheme, tensors, layout = _prepared(contents, module, linear)
    steps = in_steps(layout, tensors)
    if steps is None or not hasattr(scheme, "wholes"):
        return
    kind, n_out, grain = steps
    n_in = _inputs(contents, linear, module)
    rows = max(1, SAMPLE // max(1, n_in * grain)) * grain
    few = narrow(tensors, layout, {kind: Span(0, min(rows, n_out), n_out)})
    mean = float(scheme.wholes(few).numbers.float().mean())
    if abs(abs(mean) - 1) > 0.25 or bits < 3:
        return
    hint = "Make sure that the format's version is right."
    if version is not None:
        hint = f"If so, set checkpoint_format to {'gptq_v2' if version == 1 else 'gptq'}."
    yield Finding("warning", "zeros", "off by one", module, f"{module}: codes less zero points are {mean:+.2f} on "
                  "average, where weights are about 0: zero points may be of another convention.", hint)  # fmt: skip


def _inputs(contents: Contents, linear: Mapping[str, Stored], module: str) -> int:
    assert contents.quantization is not None
    rule = contents.quantization.rule(module)
    assert rule is not None
    return logical(contents.checkpoint, linear, rule)[1]


def _index(contents: Contents, module: str, linear: Mapping[str, Stored], rule: Rule) -> Iterator[Finding]:
    """g_idx, whose range was checked with the shapes."""
    stored = linear.get("g_idx", linear.get("weight_g_idx"))
    if stored is None:
        return
    index = contents.checkpoint.read(stored.name).long()
    groups = linear["scales" if rule.format == "gptq" else "weight_scale"].shape[0 if rule.format == "gptq" else 1]
    size = -(-len(index) // groups)
    counts = torch.bincount(index, minlength=groups)
    full = torch.full_like(counts, size)
    full[-1] = len(index) - size * (groups - 1)
    if not torch.equal(counts.sort().values, full.sort().values):
        worst = int((counts - size).abs().argmax())
        yield Finding("error", "groups", "g_idx", module, f"{stored.name} gives group {worst} {int(counts[worst])} "
                      f"inputs; each of the {groups} groups has {size}.",
                      "Scales of other groups would be used: make the checkpoint anew.")  # fmt: skip
        return
    if torch.equal(index, torch.arange(len(index)) // size):
        return
    said = contents.settings.get("desc_act", False) or rule.format == "packed"
    if not said:
        yield Finding("error", "groups", "unsaid order", module, f"{stored.name} is not in the order of the inputs, "
                      "but quantization_config says desc_act: false.",
                      "Engines that believe it (vLLM) do not read it: set desc_act to true.")  # fmt: skip
