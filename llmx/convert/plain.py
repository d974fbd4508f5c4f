"""Any checkpoint that llmx reads as one of plain numbers, with transformers' names and conventions.

Nothing is converted before it is read: what comes of a tensor is in memory while it is looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import WHOLE, Slices, Stored
from llmx.models import Opened
from llmx.schemes import find
from llmx.schemes.base import row_axes

if TYPE_CHECKING:
    from torch import Tensor

    from llmx.formats.quantization import Quantization

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
        """rows: those that are wanted. Only they are unpacked where each lies by itself in the file."""
        cut = {} if rows is None else {0: rows}
        if entry.same:
            return self._checkpoint.read(entry.stored.name, cut)
        if rows is not None and entry.heads is None and len(entry.stored.shape) > 1:
            scheme = find(entry.owner, entry.group, self._checkpoint.quantization)
            if (axes := row_axes(scheme.axes(entry.group))) is not None:
                return self._make(entry, {suffix: {axis: rows} for suffix, axis in axes.items()})
        made = self._make(entry, {})
        return made if rows is None else made[rows[0] : rows[1]]

    def _make(self, entry: _Entry, cuts: Mapping[str, Slices]) -> Tensor:
        """cuts: of the stored tensors, between rows."""
        tensors = {s: self._checkpoint.read(stored.name, cuts.get(s, WHOLE)) for s, stored in entry.group.items()}
        if len(entry.stored.shape) == 1:
            ((stored, tensor),) = zip(entry.group.values(), tensors.values(), strict=True)
            if stored.kind not in FLOATS:
                raise UsageError(f"{stored.name} is stored as {stored.kind}; it must be floating-point numbers.")
            made = (tensor.float() - entry.less).to(self._dtype)
        else:
            scheme = find(entry.owner, entry.group, self._checkpoint.quantization)
            made = scheme.unpack_in_steps(tensors, scheme.axes(entry.group), self._dtype)
        if entry.heads is not None:  # (head, pair, half) -> (head, half, pair)
            made = made.unflatten(0, (entry.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if self._dtype == torch.float16 and not made.isfinite().all():
            raise LlmxError(
                f"{entry.stored.name} has numbers too large for float16.", hint="--dtype bfloat16 holds them"
            )
        return made


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
