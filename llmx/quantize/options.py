"""What a user can ask a quantizer for, checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmx.errors import UsageError

METHODS = ("awq", "gptq", "fp8", "int8")
FORMS = {
    "awq": ("awq", "compressed-tensors"),
    "gptq": ("gptq", "gptq_v2", "compressed-tensors"),
    "fp8": ("compressed-tensors", "fp8"),
    "int8": ("compressed-tensors",),
}
FP8_MODES = ("dynamic", "static", "block")
GROUPS = (128, 64, 32)
MOST_NAMED = 6
OWNERS = {
    "--group-size": ("awq", "gptq"),
    "--sym/--asym": ("awq", "gptq"),
    "--fp8-mode": ("fp8",),
    "--damp": ("gptq",),
    "--act-order/--no-act-order": ("gptq",),
}
HEAD = "lm_head"


@dataclass(frozen=True)
class Options:
    """bits, group: of grids (group 0: 8-bit weights have none). form: how files are laid out. damp: part of the mean
    diagonal added to Hessians. ignore: a regex; linears in whose name it is found stay as they are. head: the head is
    quantized too."""

    method: str
    form: str
    bits: int
    group: int
    symmetric: bool
    fp8_mode: str = "dynamic"
    damp: float = 0.01
    act_order: bool = True
    ignore: str | None = None
    strict: bool = False
    head: bool = False

    @property
    def grids(self) -> bool:
        return self.method in ("awq", "gptq")

    @property
    def calibrates(self) -> bool:
        return self.method != "fp8" or self.fp8_mode == "static"

    @property
    def label(self) -> str:
        """What tells an output apart: "awq-w4g128"."""
        more = "-head" if self.head else ""
        if self.grids:
            return f"{self.method}-w{self.bits}g{self.group}{more}"
        plain = self.method == "int8" or self.fp8_mode == "dynamic"
        return (self.method if plain else f"fp8-{self.fp8_mode}") + more

    def ignores(self, name: str) -> bool:
        return self.ignore is not None and re.search(self.ignore, name) is not None


def check_own(method: str, given: Mapping[str, object]) -> None:
    """UsageError for a flag that says nothing to `method`. given: of OWNERS; None: not given."""
    for flag, value in given.items():
        if value is not None and method not in OWNERS[flag]:
            owners = " and ".join(f"--{owner}" for owner in OWNERS[flag])
            raise UsageError(f"{flag} is of {owners}; --{method} has no use for it.", hint="leave it out")


def choose(
    method: str,
    *,
    form: str | None = None,
    bits: int | None = None,
    symmetric: bool | None = None,
    fp8_mode: str = "dynamic",
    damp: float = 0.01,
    act_order: bool = True,
    ignore: str | None = None,
    strict: bool = False,
    head: bool = False,
) -> Options:
    """Defaults filled in, group 0 for `with_group` to replace. UsageError for what no format or engine can hold."""
    assert method in METHODS
    if fp8_mode not in FP8_MODES:
        raise UsageError(f"--fp8-mode {fp8_mode} is not known; there are {', '.join(FP8_MODES)}.")
    if method == "gptq" and form is None:
        form = "gptq" if symmetric is not False else "gptq_v2"
    block = method == "fp8" and fp8_mode == "block"
    form = form or ("fp8" if block else FORMS[method][0])
    if form not in FORMS[method]:
        raise UsageError(f"--format {form} does not hold {method} weights; there are {', '.join(FORMS[method])}.")
    if form == "fp8" and not block:
        raise UsageError("--format fp8 is DeepSeek's, with blocks.", hint="add --fp8-mode block, or leave --format out")
    grids = method in ("awq", "gptq")
    bits = _bits(method, form, bits)
    symmetric = grids and ((method == "gptq") if symmetric is None else symmetric)
    if form == "gptq" and not symmetric:
        raise UsageError(
            "Version 1 of GPTQ's format can't hold every zero point of --asym.", hint="--format gptq_v2 can"
        )
    if not 0 <= damp <= 1:
        raise UsageError(f"--damp must be from 0 to 1, not {damp}.")
    if ignore is not None:
        try:
            re.compile(ignore)
        except re.error as error:
            raise UsageError(f"--ignore {ignore!r} is no regular expression: {error}.") from error
    if head and form == "fp8":
        raise UsageError(
            "DeepSeek's fp8 format has no quantized head: loaders read it as plain numbers.",
            hint="leave --quantize-lm-head or --fp8-mode block out",
        )
    if head and ignore is not None and re.search(ignore, HEAD):
        raise UsageError(f"--ignore {ignore!r} leaves {HEAD} out, which --quantize-lm-head asks for.")
    return Options(method, form, bits, 0, symmetric, fp8_mode, damp, act_order, ignore, strict, head)


def _bits(method: str, form: str, bits: int | None) -> int:
    if method not in ("awq", "gptq"):
        if bits not in (None, 8):
            raise UsageError(f"--{method} has 8 bits, not {bits}.")
        return 8
    allowed = {"awq": (4,), "gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "compressed-tensors": tuple(range(2, 9))}
    bits = 4 if bits is None else bits
    if bits not in allowed[form]:
        fits = ", ".join(map(str, allowed[form]))
        raise UsageError(f"The format {form} holds weights of {fits} bits, not {bits}.")
    return bits


def parse_group(text: str) -> int | None:
    """--group-size; None for "auto"."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--group-size must be auto or a whole number of at least 1, not {text!r}.")
    return int(text)


def group_for(asked: int | None, widths: Sequence[tuple[str, int]]) -> int:
    """The group size: that asked for, or the largest of GROUPS that divides every (name, input width).

    UsageError that lists the linears which no group, or not the one asked for, divides.
    """
    fitting = [size for size in GROUPS if all(width % size == 0 for _, width in widths)]
    if asked is None and fitting:
        return fitting[0]
    size = asked or GROUPS[-1]
    bad = [f"{name} ({width} inputs)" for name, width in widths if width % size]
    if not bad:
        return size
    more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    hint = f"--group-size {fitting[0]} divides all" if fitting else "leave them out with --ignore"
    raise UsageError(f"Groups of {size} do not divide {', '.join(bad[:MOST_NAMED])}{more}.", hint=hint)
