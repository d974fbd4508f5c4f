"""What a stored-weight scheme is: what lies along the axes of its tensors, how to read them back, how to run them.

Row and column slices, fused linears, stacked experts and padded vocabularies all follow from the axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored
    from llmx.formats.quantization import Quantization

CHUNK = 1 << 24  # weights that `prepare` unpacks at a time: bounds its temporaries to a few times 64 MiB


class Kind(Enum):
    """What an axis of a stored tensor counts. VOCAB is OUT where the model may ask for more rows than are stored."""

    OUT = "output"
    IN = "input"
    EXPERT = "expert"
    VOCAB = "vocabulary"


@dataclass(frozen=True)
class Span:
    """Features [low, high) of `total`. Only along VOCAB may `high` exceed `total`: what is beyond reads as zeros."""

    low: int
    high: int
    total: int

    @property
    def size(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class Axis:
    """One axis of a stored tensor: `elements` stored elements hold `features` features, which can't be cut apart.

    The pair is no fraction: 34 bytes hold 32 weights of GGUF's Q8_0, and 17 bytes hold no 16. With `ceil` the last
    elements may stand for fewer features (576 inputs have 5 scales of 128 each); else all are whole. With `same` an
    element says the same of each of its features (a scale does), so that repeating it allows any cut.
    """

    kind: Kind
    elements: int = 1
    features: int = 1
    ceil: bool = False
    same: bool = False

    def at(self, feature: int, total: int) -> int | None:
        """The stored element that begins at `feature`; None where that is inside a group."""
        groups, rest = divmod(feature, self.features)
        if rest == 0:
            return groups * self.elements
        return self.length(feature) if self.ceil and feature == total else None

    def length(self, features: int) -> int:
        """Stored elements of so many features, the last group filled up."""
        return -(-features // self.features) * self.elements

    @property
    def single(self) -> bool:
        """Whether every feature has an element of its own."""
        return self.elements == self.features == 1


Dims = tuple[Axis | int, ...]  # per axis of a tensor; a plain number is an axis that never is cut
Layout = Mapping[str, Dims]  # per stored tensor of a linear, by the last component of its name
Tensors = Mapping[str, Tensor]


class KernelTable(Protocol):
    """The part of `llmx.kernels.Kernels` that a scheme uses."""

    activations: str

    def get(self, op: str) -> Callable[..., Any]: ...

    def has(self, op: str) -> bool: ...


def ranges(where: str, dims: Dims, spans: Mapping[Kind, Span], cover: bool = False) -> dict[int, tuple[int, int]]:
    """Stored elements [start, stop) per axis that holds one of `spans`. UsageError if a span cuts a stored element.

    `cover`: elements that `repeat` can take apart are cut, and count as in the span with any of their features.
    """
    found = {}
    for index, axis in enumerate(dims):
        if isinstance(axis, int) or axis.kind not in spans:
            continue
        span = spans[axis.kind]
        low, high = span.low, span.high
        if axis.kind is Kind.VOCAB:
            low, high = min(low, span.total), min(high, span.total)
        start, stop = axis.at(low, span.total), axis.at(high, span.total)
        if cover and axis.same:
            start, stop = low // axis.features, axis.length(high)
        if start is None or stop is None:
            whole = axis.features
            raise UsageError(
                f"{where} can't be cut to {axis.kind.value} features {low} to {high} of {span.total}: "
                f"its scheme stores {whole} of them together.",
                hint=f"use a number of ranks that gives each a multiple of {whole} features",
            )
        found[index] = (start, stop)
    return found


def repeat(tensor: Tensor, dims: Dims, spans: Mapping[Kind, Span]) -> tuple[Tensor, Dims]:
    """What `ranges` read to cover the spans, cut to them; and its axes: elements that were cut are repeated.

    Then each stands for as many features as divide every part of an element that was cut.
    """
    axes = list(dims)
    for index, axis in enumerate(dims):
        if isinstance(axis, int) or not axis.same or axis.kind not in spans:
            continue
        span, size = spans[axis.kind], axis.features
        low, high = span.low, min(span.high, span.total)
        if axis.at(low, span.total) is not None and axis.at(high, span.total) is not None:
            continue
        fine = gcd(size, low, high - low, span.size)
        tensor = tensor.repeat_interleave(size // fine, index).narrow(index, low % size // fine, (high - low) // fine)
        axes[index] = replace(axis, features=fine)
    return tensor, tuple(axes)


def narrow(tensors: Tensors, layout: Layout, spans: Mapping[Kind, Span]) -> dict[str, Tensor]:
    """Views of the spans of a linear's tensors."""
    cut = {}
    for name, tensor in tensors.items():
        for axis, (start, stop) in ranges(name, layout[name], spans).items():
            tensor = tensor.narrow(axis, start, stop - start)
        cut[name] = tensor
    return cut


def pad(tensor: Tensor, dims: Dims, spans: Mapping[Kind, Span]) -> Tensor:
    """`tensor` with zeros for the rows of a VOCAB span that lie beyond the stored ones. Zero bytes are zero weights."""
    for index, axis in enumerate(dims):
        if isinstance(axis, int) or axis.kind is not Kind.VOCAB or Kind.VOCAB not in spans:
            continue
        if missing := axis.length(spans[Kind.VOCAB].size) - tensor.shape[index]:
            shape = list(tensor.shape)
            shape[index] = missing
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], index)
    return tensor


def join(layout: Layout, first: Tensors, n_out: int, second: Tensors) -> dict[str, Tensor] | None:
    """Tensors of two linears with the same input, one above the other; None where their scheme can't hold both in one.

    `n_out` is that of `first`. Tensors without an output axis (a scale for all) must be equal.
    """
    joined = {}
    for name, dims in layout.items():
        upper, lower = first[name], second[name]
        out = [i for i, axis in enumerate(dims) if isinstance(axis, Axis) and axis.kind in (Kind.OUT, Kind.VOCAB)]
        if not out:
            if not torch.equal(upper, lower):
                return None
            joined[name] = upper
            continue
        axis = dims[out[0]]
        assert isinstance(axis, Axis)
        assert upper.dim() == lower.dim()
        others = (upper.select(out[0], 0), lower.select(out[0], 0))
        if upper.dtype != lower.dtype or others[0].shape != others[1].shape or axis.at(n_out, -1) is None:
            return None
        joined[name] = torch.cat([upper, lower], out[0])
    return joined


def as_vocabulary(layout: Layout) -> dict[str, Dims]:
    """The layout of a linear that is a head or an embedding: its outputs are the vocabulary."""

    def renamed(axis: Axis | int) -> Axis | int:
        return replace(axis, kind=Kind.VOCAB) if isinstance(axis, Axis) and axis.kind is Kind.OUT else axis

    return {name: tuple(renamed(axis) for axis in dims) for name, dims in layout.items()}


def weight_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the reference computes with: float32 on the CPU, whatever the activations are; their dtype elsewhere."""
    return torch.float32 if device.type == "cpu" else dtype


@dataclass(frozen=True)
class Segment:
    """`n_out` outputs of a linear that are stored alike. `tensors`: as stored, or what `prepare` made of them.

    `layout` is that of the stored tensors. `bias`: (n_out,) in `weight_dtype`, or None. `prepared`: see `prepare`.
    """

    scheme: Scheme
    n_out: int
    layout: Layout
    tensors: Tensors
    bias: Tensor | None = None
    prepared: bool = False


@dataclass(frozen=True)
class Case:
    """A model that the conformance test stores in this scheme. `kind`: that of the tensor that holds the weights.

    Its attention has `heads` heads, `head_dim` wide; its MLP is `inner` wide; both are cut for 1, 2 and 3 ranks, and
    `hidden`, the width of its state, is not. `error`: largest root mean square error of packing, relative to the
    weights' own (0: exact); None: this version does not pack `kind`. `stacked`: whether the weights of several experts
    may be stored as one tensor. `rows`: outputs of a matrix whose cuts are tried. `merges`: whether the tensors of two
    linears always fit into one. `config`: the quantization_config that says what the tensors don't.
    """

    kind: str
    error: float | None
    stacked: bool = True
    rows: int = 96
    merges: bool = True
    config: Mapping[str, Any] | None = None
    hidden: int = 192
    heads: int = 6
    head_dim: int = 32
    inner: int = 192


class Scheme(ABC):
    """One way to store a linear's weights. A file in this folder has one instance of it, called SCHEME."""

    name: str
    cases: Sequence[Case]
    whole_numbers = False  # weights are small whole numbers times scales: rows may be rounded to 8 bits for them
    unread: frozenset[str] = frozenset()  # tensors that say nothing of the weights, such as scales of activations

    def configured(self, quantization: Quantization) -> Sequence[Scheme]:
        """This scheme as a checkpoint with such a config has it: one for each way that it stores linears in it."""
        return (self,)

    @abstractmethod
    def matches(self, stored: Mapping[str, Stored]) -> bool:
        """Whether these tensors (by the last component of their names, without `bias`) are a linear in this scheme.

        Tensors that it names as `unread` may be among them.
        """

    @abstractmethod
    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        """(n_out, n_in), or (experts, n_out, n_in), as stored."""

    @abstractmethod
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        """What lies along the axes of each tensor as `Checkpoint.read` gives it. May depend on what is stored."""

    @abstractmethod
    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The weights, (..., n_out, n_in): this defines the scheme. Computed in float32, then rounded to `dtype`."""

    def row_kind(self, tensors: Tensors) -> str | None:
        """The kind that the rows of `weight`, which is all that is stored, are; None: they are no such plain rows."""
        return None

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        """Float weights (..., n_out, n_in) as stored tensors whose weights have kind `kind`. UsageError if it can't."""
        raise UsageError(f"llmx reads weights stored as {kind}, but has no quantizer that makes them.")

    def prepare(self, tensors: Tensors, layout: Layout, dtype: torch.dtype, kernels: KernelTable) -> dict[str, Tensor]:
        """What `apply` runs on: the unpacked `weight`, or packed for a kernel that multiplies straight from it.

        Then the one tensor's name is that of the kernel's layout.
        """
        if kernels.has("linear_packed") and in_steps(layout, tensors) is not None:
            return self.pack_for_kernel(tensors, layout, kernels)
        return {"weight": self.unpack_in_steps(tensors, layout, dtype)}

    def pack_for_kernel(self, tensors: Tensors, layout: Layout, kernels: KernelTable) -> dict[str, Tensor]:
        """In the kernel's layout that loses nothing: plain float32 for schemes that have none of their own."""
        weight = self.unpack_in_steps(tensors, layout, torch.float32)
        packed: Tensor = kernels.get("new_packed")("F32", *weight.shape)
        kernels.get("pack_numbers")(packed, weight)
        return {"F32": packed}

    def apply(self, x: Tensor, segments: Sequence[Segment], kernels: KernelTable) -> list[Tensor]:
        """Outputs of neighbouring segments of this scheme: x (rows, n_in) -> (rows, n_out) each, in x.dtype."""
        return [self._apply(x, segment, kernels) for segment in segments]

    def _apply(self, x: Tensor, segment: Segment, kernels: KernelTable) -> Tensor:
        if (packed := packed_of(segment)) is not None:
            return multiply(x, [packed], kernels)
        if segment.prepared:
            weight = segment.tensors["weight"]
        else:
            weight = self.unpack_in_steps(segment.tensors, segment.layout, weight_dtype(x.dtype, x.device))
        if self.whole_numbers and kernels.activations != "bf16" and x.shape[1] % 32 == 0:
            x = kernels.get("round_rows")(x, kernels.activations == "int8-pow2")
        result: Tensor = kernels.get("linear")(x, weight, segment.bias)
        return result

    def unpack_in_steps(self, tensors: Tensors, layout: Layout, dtype: torch.dtype) -> Tensor:
        """`unpack`, some rows at a time where the tensors can be cut between rows, to bound temporaries."""
        steps = in_steps(layout, tensors)
        if steps is None:
            return self.unpack(tensors, dtype)
        kind, n_out, grain = steps
        few = narrow(tensors, layout, {kind: Span(0, min(grain, n_out), n_out)})
        n_in = self.unpack(few, dtype).shape[-1]
        step = max(1, CHUNK // max(1, n_in * grain)) * grain
        if step >= n_out:
            return self.unpack(tensors, dtype)
        result = torch.empty(n_out, n_in, dtype=dtype, device=next(iter(tensors.values())).device)
        for low in range(0, n_out, step):
            high = min(low + step, n_out)
            result[low:high] = self.unpack(narrow(tensors, layout, {kind: Span(low, high, n_out)}), dtype)
        return result


def in_steps(layout: Layout, tensors: Tensors) -> tuple[Kind, int, int] | None:
    """(OUT or VOCAB, outputs, how many of them all tensors keep together); None for stacked experts."""
    axes = [axis for dims in layout.values() for axis in dims if isinstance(axis, Axis)]
    if any(axis.kind is Kind.EXPERT for axis in axes):
        return None
    for name, dims in layout.items():
        for index, axis in enumerate(dims):
            if isinstance(axis, Axis) and axis.kind in (Kind.OUT, Kind.VOCAB) and axis.single:
                grain = lcm(*(other.features for other in axes if other.kind is axis.kind))
                return axis.kind, tensors[name].shape[index], grain
    return None


def row_axes(layout: Layout) -> dict[str, int] | None:
    """Per tensor the axis with one element per output, if each has one: such a linear can be read row by row."""
    found = {}
    for name, dims in layout.items():
        axes = [axis for axis in dims if isinstance(axis, Axis)]
        rows = [axis for axis in axes if axis.kind in (Kind.OUT, Kind.VOCAB) and axis.single]
        if not rows or any(axis.kind is Kind.EXPERT for axis in axes):
            return None
        found[name] = dims.index(rows[0])
    return found


def kept_together(layout: Layout) -> int | None:
    """How many outputs no tensor can be cut inside of; None for stacked experts."""
    axes = [axis for dims in layout.values() for axis in dims if isinstance(axis, Axis)]
    if any(axis.kind is Kind.EXPERT for axis in axes):
        return None
    return lcm(*(axis.features for axis in axes if axis.kind in (Kind.OUT, Kind.VOCAB)))


def apply(x: Tensor, segments: Sequence[Segment], kernels: KernelTable) -> Tensor:
    """A fused linear: x (rows, n_in) -> (rows, sum of n_out); one call of the kernel where all segments are packed."""
    packed = [found for segment in segments if (found := packed_of(segment)) is not None]
    if len(packed) == len(segments):
        return multiply(x, packed, kernels)
    outputs: list[Tensor] = []
    start = 0
    for stop in range(1, len(segments) + 1):
        if stop == len(segments) or segments[stop].scheme is not segments[start].scheme:
            outputs += segments[start].scheme.apply(x, segments[start:stop], kernels)
            start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def packed_of(segment: Segment) -> tuple[str, Tensor, int, Tensor | None] | None:
    """(layout, blocks, n_out, bias) of a segment that a kernel multiplies straight from; None for others."""
    if not segment.prepared:
        return None
    ((layout, tensor),) = segment.tensors.items()
    return None if layout == "weight" else (layout, tensor, segment.n_out, segment.bias)


def multiply(x: Tensor, packed: Sequence[tuple[str, Tensor, int, Tensor | None]], kernels: KernelTable) -> Tensor:
    result: Tensor = kernels.get("linear_packed")(x, packed, kernels.activations)
    return result
