"""Writing GGUF files, version 3: metadata and tensor table first, then tensors as they come, one after the other.

A model may be split into several files, name-00001-of-00003.gguf...: the first holds all metadata, as llama.cpp splits.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from llmx.errors import LlmxError, UsageError
from llmx.formats.gguf import ARRAY, BOOL, SCALARS, STRING, TYPES

ALIGNMENT = 32
AHEAD = 1 << 23  # bytes that may be written before the disk is told to begin with them
SYNC_FILE_RANGE_WRITE = 2  # of Linux: start, and wait for nothing
QUANTIZATION_VERSION = 2  # of the layouts of quantised types: llama.cpp refuses others
NUMBERS = {name: (number, block, block_bytes) for number, (name, block, block_bytes) in TYPES.items()}
UINT16, UINT32, INT32, FLOAT32, INT64 = 2, 4, 5, 6, 11
Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: `kind` is GGUF's name of its type, `shape` row-major (a linear is n_out, n_in)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        _, block, block_bytes = NUMBERS[self.kind]
        assert self.shape[-1] % block == 0, f"{self.name}: {self.shape[-1]} is not whole blocks of {self.kind}"
        return prod(self.shape) // block * block_bytes


def encode(value: Value, code: int | None = None) -> bytes:
    """A metadata value with its type in front. Without `code`: whole numbers are uint32 (in lists int32), others
    float32, as llama.cpp's converter writes them."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool | int | float):
        return struct.pack("<I", own := _code(value) if code is None else code) + struct.pack("<" + SCALARS[own], value)
    if not value:
        return struct.pack("<IIQ", ARRAY, STRING, 0)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_texts(value))
    own = code if code is not None else _code(value[0])
    if own == UINT32 and code is None:
        own = INT32
    return struct.pack("<IIQ", ARRAY, own, len(value)) + struct.pack(f"<{len(value)}{SCALARS[own]}", *value)


def _code(value: bool | int | float) -> int:
    if isinstance(value, bool):
        return BOOL
    return UINT32 if isinstance(value, int) else FLOAT32


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _texts(values: Sequence[Any]) -> Iterator[bytes]:
    """Of vocabularies: a hundred thousand at a time."""
    length = struct.Struct("<Q").pack
    for value in values:
        data = value.encode("utf-8")
        yield length(len(data))
        yield data


@dataclass(frozen=True)
class Part:
    """One file: its header (metadata, table, padding) and its tensors, each padded to whole `alignment` bytes."""

    header: bytes
    entries: Sequence[Entry]
    alignment: int

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(padded(entry.nbytes, self.alignment) for entry in self.entries)


def padded(count: int, alignment: int = ALIGNMENT) -> int:
    return -(-count // alignment) * alignment


def plan(metadata: Mapping[str, bytes], entries: Sequence[Entry], most: int | None = None) -> list[Part]:
    """The files that hold all: one, or several of at most `most` bytes of tensors (one larger tensor makes a file of
    its own). `metadata`: encoded values."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if most is not None and groups[-1] and sum(padded(e.nbytes) for e in groups[-1]) + entry.nbytes > most:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        return [_part(metadata, entries)]
    parts = []
    for index, group in enumerate(groups):
        split = {
            "split.no": encode(index, UINT16),
            "split.count": encode(len(groups), UINT16),
            "split.tensors.count": encode(len(entries), INT32),
        }
        parts.append(_part({**(metadata if index == 0 else {}), **split}, group))
    return parts


def _part(metadata: Mapping[str, bytes], entries: Sequence[Entry]) -> Part:
    own = metadata.get("general.alignment")  # of a file that is copied
    alignment = ALIGNMENT if own is None else int(struct.unpack_from("<" + SCALARS[own[0]], own, 4)[0])
    table = []
    offsets = [0, *accumulate(padded(entry.nbytes, alignment) for entry in entries)]
    for entry, offset in zip(entries, offsets, strict=False):
        dims = entry.shape[::-1]
        table.append(_text(entry.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        table.append(struct.pack("<IQ", NUMBERS[entry.kind][0], offset))
    pairs = [_text(key) + value for key, value in metadata.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata)) + b"".join([*pairs, *table])
    return Part(head + bytes(padded(len(head), alignment) - len(head)), entries, alignment)


def part_paths(path: Path, count: int) -> list[Path]:
    """Where the parts go: `path` itself if there is one."""
    if count == 1:
        return [path]
    stem = re.sub(r"\.gguf$", "", path.name, flags=re.IGNORECASE)
    return [path.with_name(f"{stem}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]


def write_parts(
    paths: Sequence[Path],
    parts: Sequence[Part],
    data: Callable[[Entry], Iterator[memoryview]],
    check: Callable[[Path, Part, Path], None] | None = None,
) -> None:
    """All files under temporary names, on the disk, then renamed: all of them or, if anything fails before, none.

    data: the bytes of a tensor, in pieces. check: looks at what was written for a part, where it is and where it is to
    go. LlmxError where the disk refuses them.
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        for path, part in zip(temporary, parts, strict=True):
            with path.open("wb") as file:
                _write(file, part, data)
                file.flush()
                os.fsync(file.fileno())
        for path, part, final in zip(temporary, parts, paths, strict=True):
            if check is not None:
                check(path, part, final)
        for path, final in zip(temporary, paths, strict=True):
            path.replace(final)
        _sync(paths[0].parent)
    except OSError as error:
        raise LlmxError(f"{paths[0]} can't be written: {error.strerror or error}.") from error
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _write(file: BinaryIO, part: Part, data: Callable[[Entry], Iterator[memoryview]]) -> None:
    file.write(part.header)
    begun = 0
    for entry in part.entries:
        written = 0
        for piece in data(entry):
            file.write(piece)
            written += piece.nbytes
            if (at := file.tell()) - begun >= AHEAD:
                file.flush()
                begin_writing(file.fileno(), begun, at - begun)
                begun = at
        assert written == entry.nbytes, f"{entry.name}: {written} bytes came for {entry.nbytes}"
        file.write(bytes(padded(written, part.alignment) - written))


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Have the system write these bytes of a file to the disk now, while more are made, so that fsync finds little left
    to wait for. Only a hint: nothing is lost where there is no such call, and what goes wrong fsync says."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, start, count, SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(text: str) -> int:
    """ "2G", "500M", "300000K" -> bytes, by powers of ten as llama.cpp's gguf-split has them."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"A size must be a whole number with K, M or G behind it, not {text[:40]!r}.")
    return int(match[1]) * SIZES[match[2].upper()]
