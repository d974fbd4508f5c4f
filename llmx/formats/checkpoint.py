"""What every weight file gives: stored tensors by name, and slices of them read from a private mapping of the file."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from llmx.errors import LlmxError, UsageError

if TYPE_CHECKING:
    import torch

    from llmx.formats.quantization import Quantization

Slices = Mapping[int, tuple[int, int]]
WHOLE: Slices = MappingProxyType({})
DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python names it from 3.13 on

# Stored kinds that are plain arrays: bits of an element and torch's name of the dtype.
PLAIN = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "F32": (32, "float32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}


@dataclass(frozen=True)
class Stored:
    """A tensor as the file holds it.

    `kind`: "F32", "F16", "BF16", "F8_E4M3", "I8", "I32", "U8"... or a GGUF block type such as "Q4_1". `shape` is
    logical and row-major: a linear is (n_out, n_in), in GGUF too.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of what `read` returns: `shape`, and for block types the last axis counted in bytes."""
        if self.kind in PLAIN:
            return self.shape
        return (*self.shape[:-1], self.nbytes // prod(self.shape[:-1]))


class Checkpoint(Protocol):
    """An open, checked weight file or set of files. `bytes_read`: sum of the bytes of all slices handed out.

    `quantization`: how its linears are stored, where the tensors do not say it all and a config beside them does.
    """

    kind: str
    bytes_read: int
    quantization: Quantization | None

    def names(self) -> Sequence[str]:
        """Names of all stored tensors, in the order of the file."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def stored(self, name: str) -> Stored:
        """What is stored under `name`; KeyError if nothing is."""
        ...

    def read(self, name: str, slices: Slices = WHOLE) -> torch.Tensor:
        """The stored tensor, or the part `slices` = {axis: (start, stop)} of it, in stored elements.

        Plain kinds give a tensor of that dtype and shape. Block types give uint8 (..., bytes of a row): their last axis
        is sliced in bytes. Slices of the leading axis are views of the file's private mapping, others are copies; only
        the bytes of the slice are touched.
        """
        ...


class MappedFile:
    """A file mapped copy-on-write: writes to a tensor on it stay in this process, and pages are shared until then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise UsageError(f"{path} is empty.")
                self.data = _map(file.fileno())
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error.strerror}.") from error


def _map(descriptor: int) -> mmap.mmap:
    if sys.platform == "linux":
        # Without NORESERVE Linux refuses to map a file larger than memory and swap, though nothing is written to it.
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True)
class Region:
    """Where a stored tensor lies: `offset` bytes into `file`."""

    stored: Stored
    file: MappedFile
    offset: int


class MappedCheckpoint:
    """A Checkpoint over regions of mapped files, whose bounds the format's own reader has checked."""

    def __init__(self, kind: str, regions: Mapping[str, Region], quantization: Quantization | None = None) -> None:
        self.kind, self.quantization = kind, quantization
        self.bytes_read = 0
        self._regions = regions

    def names(self) -> Sequence[str]:
        return tuple(self._regions)

    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors, each once, in the order of the tensors."""
        return tuple(dict.fromkeys(region.file.path for region in self._regions.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._regions

    def stored(self, name: str) -> Stored:
        return self._regions[name].stored

    def region(self, name: str) -> Region:
        return self._regions[name]

    def read(self, name: str, slices: Slices = WHOLE) -> torch.Tensor:
        import torch

        region = self._regions[name]
        dtype = _dtype(region.stored)
        # Tensors lie on whole elements; old safetensors files do not promise that, and are read as bytes.
        whole = region.offset % dtype.itemsize == 0
        view = _view(region, dtype if whole else None)
        for axis, (start, stop) in slices.items():
            assert 0 <= start <= stop <= view.shape[axis], (
                f"{name}: [{start}, {stop}) of axis {axis}, {tuple(view.shape)}"
            )
            view = view.narrow(axis, start, stop - start)
        part = view.contiguous() if whole else _elements(view.clone(memory_format=torch.contiguous_format), dtype)
        self.bytes_read += part.numel() * part.element_size()
        return part

    def raw(self, name: str) -> memoryview:
        """All of the stored tensor's bytes: a view of the file's private mapping, so nothing is read yet."""
        region = self._regions[name]
        self.bytes_read += region.stored.nbytes
        return memoryview(region.file.data)[region.offset : region.offset + region.stored.nbytes]

    def release(self, name: str) -> None:
        """The tensor's pages count no longer as this process's memory, until they are read again. Nothing may have been
        written to them."""
        region = self._regions[name]
        first = -(-region.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (region.offset + region.stored.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and DONTNEED is not None:
            region.file.data.madvise(DONTNEED, first, length)


def _elements(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 (..., bytes of an element) -> (...)"""
    return raw.view(dtype).squeeze(-1)


def _dtype(stored: Stored) -> torch.dtype:
    import torch

    if stored.kind not in PLAIN:
        return torch.uint8
    found: torch.dtype | None = getattr(torch, PLAIN[stored.kind][1], None)
    if found is None:
        raise LlmxError(
            f"{stored.name} is stored as {stored.kind}, which torch {torch.__version__} does not have.",
            hint="Install a newer torch.",
        )
    return found


def _view(region: Region, dtype: torch.dtype | None) -> torch.Tensor:
    """Of the mapping. dtype: None for uint8 with one more axis, the bytes of an element."""
    import torch

    stored, kind = region.stored, dtype or torch.uint8
    shape = stored.read_shape
    if dtype is None:
        shape = (*shape, PLAIN[stored.kind][0] // 8)
    if stored.nbytes == 0:
        return torch.empty(shape, dtype=kind)
    count = stored.nbytes // kind.itemsize
    return torch.frombuffer(region.file.data, dtype=kind, count=count, offset=region.offset).reshape(shape)


def by(shape: tuple[int, ...]) -> str:
    """A shape as messages show it: "576×1536"."""
    return "×".join(map(str, shape)) or "a single number"
