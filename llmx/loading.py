"""Builds the layers a model asks for from a checkpoint, or from random numbers. Names no model and no scheme.

A tensor is read, cut to this rank's part, unpacked or repacked, and let go before the next one.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN, Checkpoint, Stored, by
from llmx.layers.embedding import Embedding
from llmx.layers.linear import Linear
from llmx.layers.weights import Part
from llmx.schemes import find
from llmx.schemes.base import (
    Axis,
    Dims,
    KernelTable,
    Kind,
    Layout,
    Scheme,
    Segment,
    Span,
    as_vocabulary,
    join,
    pad,
    ranges,
    repeat,
    row_axes,
    weight_dtype,
)


@dataclass(frozen=True)
class Shard:
    """Which of how many tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


class Names(Protocol):
    """From a model's tensor names to those stored."""

    def stored(self, name: str, suffix: str) -> str:
        """The stored name of tensor `suffix` ("weight") of linear or vector `name`."""

    def permute(self, name: str) -> int | None:
        """Number of heads of a linear whose rows are stored with the two halves of each head interleaved."""


@dataclass(frozen=True)
class Piece:
    """A span of one stored linear, as stored, on the device."""

    scheme: Scheme
    layout: Layout
    tensors: Mapping[str, Tensor]
    n_out: int
    bias: Tensor | None


class _Loader(ABC):
    """What checkpoints and random weights share: from pieces to layers.

    `parameters`: of the whole model, as far as it was asked for. `bytes`: of this rank's part as it is stored. `held`:
    of what the layers keep in memory (or mapped). `schemes`: names of those found, sorted.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype, device: torch.device, kernels: KernelTable) -> None:
        assert 0 <= shard.rank < shard.size, shard
        self.shard, self.dtype, self.device, self.kernels = shard, dtype, torch.device(device), kernels
        self.parameters = self.bytes = 0
        self._prepare = os.environ.get("LLMX_PREPARE") != "0"
        self._found: set[str] = set()
        self.pass_bytes = 0  # of the weights of linears, as held
        self._storages: dict[int, int] = {}  # address -> bytes of what the layers hold
        self._vocabulary: dict[str, Piece] = {}  # embeddings by name: a tied head shares their bytes

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(sorted(self._found))

    @property
    def held(self) -> int:
        return sum(self._storages.values())

    def column(self, parts: Sequence[Part], n_in: int) -> Linear:
        """See Weights.column. UsageError if the heads can't be divided among the ranks."""
        pieces = []
        for part in parts:
            share = self._share(part.name, part.n_out, part.heads, replicate=True)
            span = Span(part.first + share.low, part.first + share.high, part.total or part.n_out)
            pieces.append(self._piece(part.name, {Kind.OUT: span, Kind.IN: Span(0, n_in, n_in)}))
        return self._linear(pieces, n_in)

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Linear:
        """See Weights.row. The bias is rank 0's alone, since the ranks' results are added."""
        span = self._share(name, n_in, heads, replicate=False)
        piece = self._piece(name, {Kind.OUT: Span(0, n_out, n_out), Kind.IN: span})
        return self._linear([piece if self.shard.rank == 0 else replace(piece, bias=None)], span.size)

    def embedding(self, name: str, vocab: int, hidden: int) -> Embedding:
        """See Weights.embedding. The rows stay as stored and are unpacked when they are looked up."""
        piece = self._rows(name, vocab, hidden, keep=True)
        axes = row_axes(piece.layout)
        if axes is None:
            raise UsageError(f"{name} is stored as {piece.scheme.name}, which can't be read row by row.")
        self._hold(piece.tensors)
        span = self._vocabulary_span(vocab)
        return Embedding(
            piece.scheme, piece.tensors, axes, self.dtype,
            first=span.low, rows=span.size, whole=self.shard.size == 1, hidden=hidden, kernels=self.kernels,
        )  # fmt: skip

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Linear:
        """See Weights.head."""
        tied = tied_to is not None and not self._has(name)
        source = tied_to if tied_to is not None and tied else name
        return self._linear([self._rows(source, vocab, hidden, keep=tied)], hidden)

    @abstractmethod
    def vector(self, name: str, n: int) -> Tensor:
        """See Weights.vector."""

    @abstractmethod
    def _has(self, name: str) -> bool:
        """Whether linear `name` is there."""

    @abstractmethod
    def _piece(self, name: str, spans: Mapping[Kind, Span]) -> Piece:
        """A part of linear `name`; `spans` holds IN, and OUT or VOCAB."""

    def _rows(self, name: str, vocab: int, hidden: int, keep: bool) -> Piece:
        if (found := self._vocabulary.get(name)) is not None:
            return found
        piece = self._piece(name, {Kind.VOCAB: self._vocabulary_span(vocab), Kind.IN: Span(0, hidden, hidden)})
        if keep:
            self._vocabulary[name] = piece
        return piece

    def _vocabulary_span(self, vocab: int) -> Span:
        rows = -(-vocab // self.shard.size)
        return Span(self.shard.rank * rows, (self.shard.rank + 1) * rows, vocab)

    def _share(self, name: str, total: int, heads: int | None, replicate: bool) -> Span:
        """This rank's part of `total` features in `heads` units; with fewer units than ranks, if `replicate`, one.

        Without `heads` the parts are equal; where they can't be, as nearly so as whole blocks of a scheme allow.
        """
        rank, size = self.shard.rank, self.shard.size
        if heads is None:
            grain = _grain(total, size)
            return Span(rank * (total // grain) // size * grain, (rank + 1) * (total // grain) // size * grain, total)
        units = heads
        assert total % units == 0, f"{name}: {total} features are not {units} heads"
        each = total // units
        if units % size == 0:
            return Span(rank * units // size * each, (rank + 1) * units // size * each, total)
        if replicate and size % units == 0:
            unit = rank * units // size
            return Span(unit * each, (unit + 1) * each, total)
        fits = [str(n) for n in range(1, min(units, 64) + 1) if units % n == 0]
        raise UsageError(
            f"{name} has {units} heads, which {size} tensor-parallel ranks can't share evenly.",
            hint=f"sizes that divide them: {', '.join(fits)}",
        )

    def _linear(self, pieces: Sequence[Piece], n_in: int) -> Linear:
        segments = [self._segment(piece) for piece in _merged(pieces)]
        return Linear(segments, n_in, self.kernels)

    def _segment(self, piece: Piece) -> Segment:
        tensors = piece.tensors
        dtype = weight_dtype(self.dtype, self.device)
        if self._prepare:
            tensors = piece.scheme.prepare(tensors, piece.layout, dtype, self.kernels)
        bias = None if piece.bias is None else piece.bias.to(dtype)
        self._hold(tensors)
        self.pass_bytes += sum(tensor.nbytes for tensor in tensors.values())
        return Segment(piece.scheme, piece.n_out, piece.layout, tensors, bias, self._prepare)

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            self._storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()


class CheckpointWeights(_Loader):
    """`llmx.layers.weights.Weights` from a checkpoint: only this rank's bytes are read.

    progress: called with (bytes of the tensors asked for so far, bytes of all tensors). LLMX_PREPARE=0 leaves linears
    as they are stored; each call then unpacks them, to the same bits. UsageError for what is missing or misshapen.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelTable,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(shard, dtype, device, kernels)
        self._checkpoint, self._names, self._progress = checkpoint, names, progress
        self._groups: dict[str, dict[str, Stored]] = {}  # name without its last component -> last component -> tensor
        for stored_name in checkpoint.names():
            prefix, _, suffix = stored_name.rpartition(".")
            self._groups.setdefault(prefix, {})[suffix] = checkpoint.stored(stored_name)
        self._asked: set[str] = set()
        self._done = 0
        self._total = sum(stored.nbytes for group in self._groups.values() for stored in group.values())

    def unused(self) -> tuple[str, ...]:
        """Stored tensors that nothing asked for."""
        return tuple(name for name in self._checkpoint.names() if name not in self._asked)

    def vector(self, name: str, n: int) -> Tensor:
        stored_name = self._names.stored(name, "weight")
        if stored_name not in self._checkpoint:
            raise self._missing(stored_name)
        stored = self._checkpoint.stored(stored_name)
        _check_shape(stored_name, stored.shape, (n,))
        return self._plain(stored, {}).to(torch.float32)

    def _has(self, name: str) -> bool:
        return bool(self._group(name))

    def _group(self, name: str) -> dict[str, Stored]:
        return self._groups.get(self._names.stored(name, "weight").rpartition(".")[0], {})

    def _missing(self, stored_name: str) -> UsageError:
        return UsageError(
            f"The checkpoint has no tensor {stored_name}, which the model's config asks for.",
            hint="the file may be incomplete, or made for another model",
        )

    def _piece(self, name: str, spans: Mapping[Kind, Span]) -> Piece:
        group = dict(self._group(name))
        bias = group.pop("bias", None)
        if not group:
            raise self._missing(self._names.stored(name, "weight"))
        scheme = find(name, group, self._checkpoint.quantization)
        for suffix in scheme.unread & set(group):
            self._asked_for(group.pop(suffix))
        out = Kind.VOCAB if Kind.VOCAB in spans else Kind.OUT
        _check_shape(name, scheme.shape(group), (spans[out].total, spans[Kind.IN].total))
        layout = dict(scheme.axes(group) if out is Kind.OUT else as_vocabulary(scheme.axes(group)))
        self._found.add(scheme.name)
        self.parameters += prod(scheme.shape(group))
        order = self._row_order(name, spans[out])
        tensors = {}
        for suffix, stored in group.items():
            _check_axes(stored, layout[suffix], spans)
            read = self._read(stored, ranges(name, layout[suffix], spans, cover=True))
            read, layout[suffix] = repeat(read, layout[suffix], spans)
            tensors[suffix] = _reorder(pad(read, layout[suffix], spans), layout[suffix], order)
        read_bias = None if bias is None else self._bias(bias, spans[out], order)
        return Piece(scheme, layout, tensors, spans[out].size, read_bias)

    def _bias(self, stored: Stored, span: Span, order: Tensor | None) -> Tensor:
        _check_shape(stored.name, stored.shape, (span.total,))
        bias = self._plain(stored, {0: (min(span.low, span.total), min(span.high, span.total))})
        bias = torch.nn.functional.pad(bias, (0, span.size - bias.shape[0]))
        return bias if order is None else bias.index_select(0, order)

    def _plain(self, stored: Stored, slices: Mapping[int, tuple[int, int]]) -> Tensor:
        self.parameters += prod(stored.shape)
        tensor = self._read(stored, slices)
        if stored.kind not in PLAIN or not tensor.is_floating_point():
            raise UsageError(f"{stored.name} is stored as {stored.kind}; it must be floating-point numbers.")
        return tensor

    def _read(self, stored: Stored, slices: Mapping[int, tuple[int, int]]) -> Tensor:
        tensor = self._checkpoint.read(stored.name, slices)
        self._asked_for(stored)
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor.to(self.device)

    def _asked_for(self, stored: Stored) -> None:
        if stored.name not in self._asked:
            self._asked.add(stored.name)
            self._done += stored.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _row_order(self, name: str, span: Span) -> Tensor | None:
        """For rows stored as (head, pair, half) instead of (head, half, pair): which stored row is each output."""
        heads = self._names.permute(name)
        if heads is None:
            return None
        each = span.total // heads
        assert span.low % each == span.high % each == 0, f"{name}: heads of {each} rows are cut at {span}"
        rows = torch.arange(span.size, device=self.device)
        return rows.reshape(-1, each // 2, 2).transpose(1, 2).flatten()


class RandomWeights(_Loader):
    """The same interface over numbers that follow from (seed, name, row, column), about normal of deviation `std`.

    Equal on every device and, each rank its part, for every number of ranks. Vectors have mean 1, as norms want, and
    weights mean 0. They count as stored in `dtype`.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelTable,
        *,
        shard: Shard | None = None,
        std: float = 0.02,
    ) -> None:
        super().__init__(shard or Shard(), dtype, device, kernels)
        self._seed, self._std = seed, std
        kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
        self._like = {"weight": Stored("random", kind, (1, 1), dtype.itemsize)}
        self._scheme = find("random weights", self._like)

    def vector(self, name: str, n: int) -> Tensor:
        self._count(name, n, n)
        return 1 + self._numbers(name, Span(0, 1, 1), Span(0, n, n)).flatten().float()

    def _has(self, name: str) -> bool:
        return True

    def _piece(self, name: str, spans: Mapping[Kind, Span]) -> Piece:
        out = Kind.VOCAB if Kind.VOCAB in spans else Kind.OUT
        rows, columns = spans[out], spans[Kind.IN]
        layout = self._scheme.axes(self._like)
        layout = layout if out is Kind.OUT else as_vocabulary(layout)
        self._found.add(self._scheme.name)
        weight = self._numbers(name, Span(min(rows.low, rows.total), min(rows.high, rows.total), rows.total), columns)
        self._count(name, rows.total * columns.total, weight.numel())
        return Piece(self._scheme, layout, {"weight": pad(weight, layout["weight"], spans)}, rows.size, None)

    def _count(self, name: str, parameters: int, here: int) -> None:
        self.parameters += parameters
        self.bytes += here * self.dtype.itemsize

    def _numbers(self, name: str, rows: Span, columns: Span) -> Tensor:
        """(rows.size, columns.size) in `dtype`."""
        key = zlib.crc32(f"{self._seed}/{name}".encode())
        result = torch.empty(rows.size, columns.size, dtype=self.dtype, device=self.device)
        step = max(1, (1 << 22) // max(1, columns.size))
        across = torch.arange(columns.low, columns.high, device=self.device)
        for low in range(0, rows.size, step):
            high = min(low + step, rows.size)
            down = torch.arange(rows.low + low, rows.low + high, device=self.device)
            result[low:high] = _normal(down[:, None] * columns.total + across, key) * self._std
        return result


def _normal(index: Tensor, key: int) -> Tensor:
    """Whole numbers -> float32, mean 0, deviation 1: the sum of the four bytes of a hash (C. Wellons' lowbias32)."""
    mask = 0xFFFFFFFF
    x = index * 0x9E3779B1 + key & mask
    x = (x ^ x >> 16) * 0x7FEB352D & mask
    x = (x ^ x >> 15) * 0x846CA68B & mask
    x = x ^ x >> 16
    total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
    deviation: float = (4 * (256**2 - 1) / 12) ** 0.5
    return (total - 510).float() / deviation


def _grain(total: int, size: int) -> int:
    """Features that stay together when `size` ranks share `total`.

    Where they can't all have as many: a multiple of most schemes' blocks, if the shares then differ by a quarter at
    most.
    """
    if total % size == 0:
        return total // size
    return next((g for g in (256, 128, 64, 32, 16, 8, 4, 2) if total % g == 0 and total // g >= 4 * size), 1)


def _merged(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, with neighbours that one stored matrix can hold made one."""
    last: Piece | None = None
    for piece in pieces:
        joined = None
        if last is not None and last.scheme is piece.scheme and last.layout == piece.layout:
            joined = join(last.layout, last.tensors, last.n_out, piece.tensors)
        if last is not None and joined is not None:
            bias = _joined_bias(last, piece)
            last = Piece(last.scheme, last.layout, joined, last.n_out + piece.n_out, bias)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _joined_bias(first: Piece, second: Piece) -> Tensor | None:
    known = first.bias if first.bias is not None else second.bias
    if known is None:
        return None
    zeros = [known.new_zeros(piece.n_out) if piece.bias is None else piece.bias for piece in (first, second)]
    return torch.cat(zeros)


def _reorder(tensor: Tensor, dims: Dims, order: Tensor | None) -> Tensor:
    """Rows of a stored tensor in `order`, along its output axis."""
    if order is None:
        return tensor
    axis = next((i for i, a in enumerate(dims) if isinstance(a, Axis) and a.kind is Kind.OUT and a.single), None)
    assert axis is not None, "only tensors with a row for each output are stored in another order"
    return tensor.index_select(axis, order)


def _check_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if stored != wanted:
        raise UsageError(f"{name} is stored as {by(stored)}, but the model's config asks for {by(wanted)}.")


def _check_axes(stored: Stored, dims: Dims, spans: Mapping[Kind, Span]) -> None:
    """Every axis that holds features, cut or not, has the length that the config and the scheme ask for."""
    whole = {kind: Span(0, span.total, span.total) for kind, span in spans.items()}
    wanted = {axis: stop for axis, (_, stop) in ranges(stored.name, dims, whole).items()}
    wanted |= {axis: length for axis, length in enumerate(dims) if isinstance(length, int)}
    full = stored.read_shape
    if len(full) != len(dims) or any(full[axis] != length for axis, length in wanted.items()):
        raise UsageError(f"{stored.name} is stored as {by(full)}, which does not fit the model's config.")
