"""What a GGUF file is made from: tensors by GGUF's names, rows of numbers on demand, and the metadata.

Two kinds: a Hugging Face folder (what is packed there is unpacked), and another GGUF file, of any architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from llmx.convert.arrays import Bytes, Numbers, in_steps
from llmx.convert.gguf_types import PLAIN, Sizes
from llmx.errors import UsageError
from llmx.formats.checkpoint import Stored
from llmx.formats.fields import Fields
from llmx.formats.gguf import open_gguf, stored_pairs
from llmx.formats.hub import Located
from llmx.kernels import Kernels

if TYPE_CHECKING:
    from llmx.schemes.base import Scheme


class GgufSource(ABC):
    """shapes: name -> (rows..., n_in). kinds: what is stored, or would be if nothing were changed. pairs: metadata,
    encoded. nbytes: what is stored now. notes: what a user should know."""

    def __init__(self, sizes: Sizes, pairs: dict[str, bytes]) -> None:
        self.sizes, self.pairs = sizes, pairs
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}
        self.nbytes = 0
        self.notes: list[str] = []
        self.found_by = "the file"  # its tokenizer's name
        self.stored_order: Sequence[str] = ()  # of a GGUF file's tensors

    @abstractmethod
    def numbers(self, name: str) -> Iterator[Rows]:
        """The tensor as float32 rows (n, n_in), in order, about plain.CHUNK numbers at a time."""

    @abstractmethod
    def as_stored(self, name: str, kind: str) -> Iterator[Bytes] | None:
        """The tensor in pieces, rows in order, if what is stored is of `kind` already and is to stay as it is."""

    @abstractmethod
    def release(self, name: str) -> None:
        """All of the tensor was read: its pages need not stay in memory."""

    @abstractmethod
    def kept(self, name: str) -> str:
        """The type of a tensor that is not quantised."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor. make: float32 (count, n_in); any thread may call it."""

    count: int
    make: Callable[[], Numbers]


class FileSource(GgufSource):
    """Another GGUF file: its tensors and metadata under the names that they have."""

    def __init__(self, located: Located) -> None:
        checkpoint = open_gguf(located.path)
        fields = Fields(checkpoint.metadata, located.path.name)
        architecture = fields.text("general.architecture")
        heads = _first(checkpoint.metadata, f"{architecture}.attention.head_count", 1)
        super().__init__(
            Sizes(
                architecture,
                fields.integer(f"{architecture}.block_count", 0, low=0),
                heads // max(1, _first(checkpoint.metadata, f"{architecture}.attention.head_count_kv", heads)),
                fields.integer(f"{architecture}.expert_count", 0, low=0),
            ),
            {key: raw for key, raw in stored_pairs(checkpoint.path).items() if not key.startswith("split.")},
        )
        self._checkpoint = checkpoint
        self._widen = Kernels("cpu").get("widen_halves")
        self.stored_order = tuple(checkpoint.names())
        for name in checkpoint.names():
            stored = checkpoint.stored(name)
            self.shapes[name], self.kinds[name] = stored.shape, stored.kind
            self.nbytes += stored.nbytes

    def numbers(self, name: str) -> Iterator[Rows]:
        stored = self._checkpoint.stored(name)
        scheme = None if stored.kind in PLAIN else _scheme(stored)
        rows = self._rows(name)
        for first, last in in_steps((len(rows), stored.shape[-1])):
            part = rows[first:last]
            yield Rows(len(part), partial(self._floats, stored.kind, scheme, part))

    def _rows(self, name: str) -> Bytes:
        """(n, bytes of a row): a view of the file."""
        stored = self._checkpoint.stored(name)
        raw = np.frombuffer(self._checkpoint.raw(name), np.uint8)
        return raw.reshape(prod(stored.shape[:-1]), -1)

    def _floats(self, kind: str, scheme: Scheme | None, rows: Bytes) -> Numbers:
        if scheme is not None:
            return _unpacked(scheme, rows)
        if kind == "F32":
            return rows.view(np.float32)
        made: Numbers = self._widen(rows.view(np.uint16), kind)
        return made

    def as_stored(self, name: str, kind: str) -> Iterator[Bytes] | None:
        if self.kinds[name] != kind:
            return None
        rows = self._rows(name)
        return (rows[first:last] for first, last in in_steps(rows.shape))

    def release(self, name: str) -> None:
        self._checkpoint.release(name)

    def kept(self, name: str) -> str:
        return self.kinds[name]


def _scheme(stored: Stored) -> Scheme:
    """How the tensor's rows are stored. UsageError for a type that can't be read."""
    from llmx.schemes import find  # imports torch, as `unpack` needs it

    rows = prod(stored.shape[:-1])
    return find(stored.name, {"weight": Stored(stored.name, stored.kind, (rows, stored.shape[-1]), stored.nbytes)})


def _unpacked(scheme: Scheme, rows: Bytes) -> Numbers:
    import torch

    made: Numbers = scheme.unpack({"weight": torch.from_numpy(rows)}, torch.float32).numpy()
    return made


def _first(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """Of a number, or of a list with one for each layer."""
    value = metadata.get(key, default)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and value > 0 else default


def source_of(located: Located, pretokenizer: str | None) -> GgufSource:
    """UsageError, with nothing read but headers, for what can't be converted."""
    if located.kind == "gguf":
        if pretokenizer is not None:
            raise UsageError("--pretokenizer is for Hugging Face folders; a GGUF file says what it has.")
        return FileSource(located)
    if not (located.path / "config.json").is_file():
        raise UsageError(f"{located.path} has no config.json.")
    from llmx.convert.gguf_folder import FolderSource  # imports torch

    return FolderSource(located, pretokenizer)
