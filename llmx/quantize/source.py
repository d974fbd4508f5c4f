"""A model whose linears are read when they are needed: its own constructor says which there are, and where.

Nothing here names a model: blocks are walked for the linears in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmx.kernels import Kernels
from llmx.layers.embedding import Embedding
from llmx.layers.linear import Linear
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened
from llmx.quantize.grids import rows_of
from llmx.schemes.base import Kind, Span

CPU = torch.device("cpu")
WIDENED = 2**22  # weights that are widened to float32 at a time
Watch = Callable[[Tensor], None]


@dataclass(frozen=True)
class Unit:
    """A linear as it is stored: `name` without `.weight`, (n_out, n_in)."""

    name: str
    n_out: int
    n_in: int

    @property
    def last(self) -> str:
        return self.name.rsplit(".", 1)[-1]


class Lazy(Linear):
    """A linear of one or more units with the same input, without weights until it is `load`ed.

    The units' weights (n_out, n_in) stay as they were given: of a mapped file they take no memory. watch: sees each
    input. idle: nobody needs what it makes, which is zeros.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.n_in, self.n_out = units[0].n_in, sum(unit.n_out for unit in units)
        self._weights: list[Tensor] = []
        self.bias: Tensor | None = None
        self.watch: Watch | None = None
        self.idle = False

    def __call__(self, x: Tensor) -> Tensor:
        assert self._weights, f"{self.units[0].name} is not loaded"
        if self.watch is not None:
            self.watch(x)
        if self.idle:
            return x.new_zeros(*x.shape[:-1], self.n_out)
        if self.n_out * self.n_in <= WIDENED:
            return functional.linear(x, rows_of(self._weights, 0, self.n_out), self.bias)
        out = x.new_empty(*x.shape[:-1], self.n_out)
        step = max(1, WIDENED // self.n_in)
        for low in range(0, self.n_out, step):  # widened piece by piece: never twice in memory
            high = min(low + step, self.n_out)
            torch.matmul(x, rows_of(self._weights, low, high).T, out=out[..., low:high])
        return out if self.bias is None else out.add_(self.bias)

    def load(self, read: Callable[[Unit], tuple[Tensor, Tensor | None]]) -> None:
        """`read` gives a unit's weight (n_out, n_in) and bias."""
        found = [read(unit) for unit in self.units]
        self._weights = [weight for weight, _ in found]
        zeros = [torch.zeros(u.n_out) if b is None else b for u, (_, b) in zip(self.units, found, strict=True)]
        self.bias = None if all(b is None for _, b in found) else torch.cat(zeros)

    def parts(self) -> Iterator[tuple[Unit, Tensor]]:
        """Each unit with its weight."""
        yield from zip(self.units, self._weights, strict=True)

    def drop(self) -> None:
        self._weights, self.bias, self.watch = [], None, None


class LateEmbedding:
    """An embedding that is read when it is used, the first time and after each `drop`: it may have to be unpacked."""

    dtype = torch.float32

    def __init__(self, read: Callable[[], Embedding]) -> None:
        self._read = read
        self._made: Embedding | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        if self._made is None:
            self._made = self._read()
        return self._made(ids)

    def drop(self) -> None:
        self._made = None


class SourceWeights(CheckpointWeights):
    """Weights whose linears are `Lazy`. `vectors`: those asked for, and their sizes; `replaced` takes the place of
    stored ones."""

    def __init__(self, opened: Opened, replaced: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(opened.checkpoint, opened.names, Shard(), torch.float32, CPU, Kernels("cpu"))
        self.vectors: dict[str, int] = {}
        self._replaced = replaced or {}

    def column(self, parts: Sequence[Part], n_in: int) -> Linear:
        units = {part.name: Unit(part.name, part.total or part.n_out, n_in) for part in parts}
        return Lazy(list(units.values()))

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Linear:
        return Lazy([Unit(name, n_out, n_in)])

    def vector(self, name: str, n: int) -> Tensor:
        self.vectors[name] = n
        found = super().vector(name, n)
        return self._replaced.get(name, found)

    def embedding(self, name: str, vocab: int, hidden: int) -> Any:
        if not self._has(name):
            raise self._missing(self._names.stored(name, "weight"))

        def read() -> Embedding:
            made = super(SourceWeights, self).embedding(name, vocab, hidden)
            self._vocabulary.pop(name)  # nobody else is to hold it
            return made

        return LateEmbedding(read)

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Linear:
        return Lazy([Unit(name, vocab, hidden)])

    def read(self, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """A unit's weight, as it is stored if that is plain, else f32; and its bias, f32."""
        spans = {Kind.OUT: Span(0, unit.n_out, unit.n_out), Kind.IN: Span(0, unit.n_in, unit.n_in)}
        piece = self._piece(unit.name, spans)
        stored = piece.tensors["weight"].dtype if len(piece.tensors) == 1 else torch.float32
        dtype = stored if stored in (torch.bfloat16, torch.float16) else torch.float32
        weight = piece.scheme.unpack(piece.tensors, dtype)
        return weight, None if piece.bias is None else piece.bias.float()

    def is_tied(self, head: Unit) -> bool:
        """Whether nothing is stored for it."""
        return not self._has(head.name)

    def rows(self, unit: Unit, low: int, high: int) -> Tensor:
        """Some rows of a unit's weight, f32: (high - low, n_in)."""
        spans = {Kind.OUT: Span(low, high, unit.n_out), Kind.IN: Span(0, unit.n_in, unit.n_in)}
        piece = self._piece(unit.name, spans)
        return piece.scheme.unpack(piece.tensors, torch.float32)

    def kind_of(self, unit: Unit) -> str:
        """What numbers a unit's weight is stored in."""
        return self._group(unit.name)["weight"].kind


def build(opened: Opened, length: int, replaced: Mapping[str, Tensor] | None = None) -> tuple[Any, SourceWeights]:
    """The model over its files, without its linears, for texts of up to `length` tokens."""
    weights = SourceWeights(opened, replaced)
    with torch.inference_mode():
        model = opened.family.Model(opened.config, weights, weights.kernels, length=length, device=CPU)
    return model, weights


def linears(block: object) -> list[Lazy]:
    """The linears inside a block, in the order in which it made them."""
    found: list[Lazy] = []
    seen: set[int] = set()

    def walk(thing: object) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Lazy):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            for inner in thing:
                walk(inner)
        elif type(thing).__module__.startswith("llmx.") and hasattr(thing, "__dict__"):
            for inner in vars(thing).values():
                walk(inner)

    walk(block)
    return found
