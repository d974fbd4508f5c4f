"""Any checkpoint that llmx reads as one of plain numbers, with transformers' names and conventions.

Nothing is converted before it is read, and some rows of a tensor can be read by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, lcm, prod
from typing import TYPE_CHECKING

import torch

from llmx.convert.arrays import in_steps
from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import WHOLE, Checkpoint, MappedCheckpoint, Slices, Stored
from llmx.models import Opened
from llmx.schemes import base, find
from llmx.schemes.base import Kind, Span, kept_together, ranges

if TYPE_CHECKING:
    from torch import Tensor

    from llmx.formats.quantization import Quantization
    from llmx.schemes.base import Scheme

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {dtype: kind for kind, dtype in FLOATS.items()}
WEIGHTS = ("weight", "qweight")  # how the names of a packed linear's first tensors begin
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.(.+)")
# GGUF's tensors that are no weights: what they say is in the config.
SAID = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class _Entry:
    """group: the tensors that `stored` is made of, by the last component of their names. heads: of a linear whose rows
    are interleaved. less: 1 where the file has 1 added. same: as it is in the file."""

    stored: Stored
    owner: str
    group: Mapping[str, Stored]
    heads: int | None = None
    less: float = 0.0
    same: bool = False


class Plain:
    """A Checkpoint: of a GGUF file, all tensors in `dtype`; of a folder, what is packed in `dtype`, the rest as it is.

    offset: the file's norms have 1 added that transformers' have not. left_out: tensors that have no name there.
    Reading: UsageError for what can't be read, LlmxError for numbers that `dtype` can't hold.
    """

    kind = "safetensors"
    quantization: Quantization | None = None

    def __init__(self, opened: Opened, dtype: torch.dtype, *, offset: bool = False) -> None:
        self.bytes_read = 0
        self._checkpoint, self._dtype = opened.checkpoint, dtype
        self.left_out: list[str] = []
        made = self._of_gguf(opened, offset) if opened.names.table else self._of_folder()
        self._entries = {entry.stored.name: entry for entry in sorted(made, key=_place)}

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def stored(self, name: str) -> Stored:
        return self._entries[name].stored

    def read(self, name: str, slices: Slices = WHOLE) -> Tensor:
        entry = self._entries[name]
        rows, others = slices.get(0), {axis: part for axis, part in slices.items() if axis}
        made = self._read(entry, rows)
        for axis, (start, stop) in others.items():
            made = made.narrow(axis, start, stop - start)
        self.bytes_read += made.numel() * made.element_size()
        return made.contiguous()

    def release(self, name: str) -> None:
        """What was read of the tensor is not needed again soon."""
        if isinstance(self._checkpoint, MappedCheckpoint):
            for stored in self._entries[name].group.values():
                self._checkpoint.release(stored.name)

    def together(self, name: str) -> int:
        """Rows that belong together: from a multiple of them to another nothing else is unpacked. 1: any; all of them
        where a tensor can't be cut between rows."""
        entry = self._entries[name]
        shape = entry.stored.shape
        if entry.same:
            return 1
        few = None if len(shape) == 1 else kept_together(self._scheme(entry).axes(entry.group))
        heads = 1 if entry.heads is None else shape[0] // entry.heads
        return max(1, shape[0] if few is None else min(shape[0], lcm(few, heads)))

    def _scheme(self, entry: _Entry) -> Scheme:
        return find(entry.owner, entry.group, self._checkpoint.quantization)

    def _of_gguf(self, opened: Opened, offset: bool) -> Iterable[_Entry]:
        fused = ("qkv_proj", "gate_up_proj")
        names = {
            target: pattern
            for pattern, target in opened.names.table.items()
            if opened.config.fused or not pattern.endswith(fused)
        }
        for stored_name in self._checkpoint.names():
            owner, _, suffix = stored_name.rpartition(".")
            found = _LAYER.match(owner)
            pattern = names.get(owner if found is None else f"blk.{{i}}.{found[2]}")
            if pattern is None or suffix not in ("weight", "bias"):
                if stored_name not in SAID:
                    self.left_out.append(stored_name)
                continue
            named = pattern if found is None else pattern.replace("{i}", found[1])
            stored = self._checkpoint.stored(stored_name)
            less = 1.0 if offset and named.endswith("norm") else 0.0
            as_made = self._stored(f"{named}.{suffix}", stored.shape)
            yield _Entry(as_made, owner, {suffix: stored}, opened.names.permute(named), less)

    def _of_folder(self) -> Iterable[_Entry]:
        groups: dict[str, dict[str, Stored]] = {}
        for name in self._checkpoint.names():
            owner, _, suffix = name.rpartition(".")
            groups.setdefault(owner, {})[suffix] = self._checkpoint.stored(name)
        for owner, group in groups.items():
            packed = {suffix: stored for suffix, stored in group.items() if suffix != "bias"}
            if set(packed) == {"weight"} and packed["weight"].kind in FLOATS:
                packed = {}
            elif any(suffix.startswith(WEIGHTS) for suffix in packed):
                scheme = find(owner, packed, self._checkpoint.quantization)
                packed = {suffix: stored for suffix, stored in packed.items() if suffix not in scheme.unread}
                yield _Entry(self._stored(f"{owner}.weight", scheme.shape(packed)), owner, packed)
                group = {"bias": group["bias"]} if "bias" in group else {}
            for suffix, stored in group.items():
                yield _Entry(stored, owner, {suffix: stored}, same=True)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        return Stored(name, KINDS[self._dtype], shape, prod(shape) * self._dtype.itemsize)

    def _read(self, entry: _Entry, rows: tuple[int, int] | None) -> Tensor:
        """rows: those that are wanted. Only they, and what belongs together with them, are unpacked."""
        if entry.same:
            return self._checkpoint.read(entry.stored.name, {} if rows is None else {0: rows})
        if rows is None:
            return self._make(entry, None)
        count, few = entry.stored.shape[0], self.together(entry.stored.name)
        low, high = rows[0] // few * few, min(count, -(-rows[1] // few) * few)
        made = self._make(entry, None if (low, high) == (0, count) else Span(low, high, count))
        return made[rows[0] - low : rows[1] - low]

    def _make(self, entry: _Entry, span: Span | None) -> Tensor:
        """span: rows between which all stored tensors can be cut; None for all."""
        shape = entry.stored.shape
        if len(shape) == 1:
            made = self._vector(entry)
        else:
            scheme = self._scheme(entry)
            layout = scheme.axes(entry.group)
            cuts = {} if span is None else {Kind.OUT: span, Kind.VOCAB: span}
            tensors = {
                suffix: self._checkpoint.read(stored.name, ranges(stored.name, layout[suffix], cuts))
                for suffix, stored in entry.group.items()
            }
            few = (shape[0] if span is None else span.size) * prod(shape[1:]) <= base.CHUNK
            made = scheme.unpack(tensors, self._dtype) if few else scheme.unpack_in_steps(tensors, layout, self._dtype)
        if entry.heads is not None:  # (head, pair, half) -> (head, half, pair)
            heads = entry.heads * len(made) // shape[0]
            made = made.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if self._dtype == torch.float16 and not made.isfinite().all():
            raise LlmxError(
                f"{entry.stored.name} has numbers too large for float16.", hint="--dtype bfloat16 holds them"
            )
        return made

    def _vector(self, entry: _Entry) -> Tensor:
        (stored,) = entry.group.values()
        if stored.kind not in FLOATS:
            raise UsageError(f"{stored.name} is stored as {stored.kind}; it must be floating-point numbers.")
        return (self._checkpoint.read(stored.name).float() - entry.less).to(self._dtype)


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """A tensor's rows as they are read, some at a time."""
    shape = checkpoint.stored(name).read_shape
    if len(shape) < 2:
        yield checkpoint.read(name)
        return
    for rows in in_steps(shape):
        yield checkpoint.read(name, {0: rows})


def finite(numbers: Tensor) -> bool:
    # The sum shows what is no number without a mask of all, which would take longer than rounding does.
    return isfinite(float(numbers.sum(dtype=torch.float32))) or bool(numbers.isfinite().all())


def plain_dtype(opened: Opened) -> torch.dtype | None:
    """The one that all matrices are stored in; None if they are packed, or of several."""
    checkpoint = opened.checkpoint
    stored = [checkpoint.stored(name) for name in checkpoint.names() if name not in SAID]
    kinds = {tensor.kind for tensor in stored if len(tensor.shape) > 1}
    return FLOATS.get(kinds.pop()) if len(kinds) == 1 else None


def dense_dtype(opened: Opened) -> torch.dtype:
    """The dtype of a folder whose linears are packed: that of its dense tensors, of the largest of them."""
    checkpoint = opened.checkpoint
    stored = [checkpoint.stored(name) for name in checkpoint.names() if name.endswith(".weight")]
    dense = [tensor for tensor in stored if tensor.kind in FLOATS]
    return FLOATS[max(dense, key=lambda tensor: tensor.nbytes).kind] if dense else torch.bfloat16


def packing(opened: Opened) -> str | None:
    """How linears are packed, by the names that people have for it; None if all tensors are plain numbers.

    Of a GGUF file the types of its layers' matrices, most bytes first.
    """
    stored = [opened.checkpoint.stored(name) for name in opened.checkpoint.names()]
    packed = [tensor for tensor in stored if tensor.kind not in FLOATS and len(tensor.shape) > 1]
    if packed and (quantization := opened.checkpoint.quantization) is not None:
        return quantization.method
    sizes: Counter[str] = Counter()
    for tensor in [tensor for tensor in packed if _LAYER.match(tensor.name)] or packed:
        sizes[tensor.kind] += tensor.nbytes
    return ", ".join(kind for kind, _ in sizes.most_common()) or None


def bytes_of(opened: Opened) -> int:
    """Of all tensors as the files have them."""
    return sum(opened.checkpoint.stored(name).nbytes for name in opened.checkpoint.names())


def _place(entry: _Entry) -> tuple[int, int]:
    """Embedding, layers, norm, head: the order in which a model needs them."""
    name = entry.stored.name
    if (layer := _LAYER.match(name)) is not None:
        return 1, int(layer[1])
    return (0 if "embed" in name else 3 if name.startswith("lm_head") else 2), 0
