"""GGUF files, versions 2 and 3, little-endian: checked metadata and tensor table, then mapped bytes.

Every count, length and offset is compared with the file's size before anything is allocated for it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from llmx.errors import UsageError
from llmx.formats.checkpoint import MappedCheckpoint, MappedFile, Region, Stored, check_apart
from llmx.formats.fields import Fields, shown

# ggml's types by number: name, elements in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
# Metadata value types by number: struct code of the plain ones.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_ELEMENTS = 2**22  # of all metadata arrays together: the largest vocabularies need about a third
MAX_TENSORS = 2**16
MAX_DIMS = 4
MAX_NAME = 2**16


class Gguf(MappedCheckpoint):
    """An open GGUF file: a Checkpoint with its `metadata` (whole numbers, floats, bools, strings, and lists of them)."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], regions: Mapping[str, Region]) -> None:
        super().__init__("gguf", regions)
        self.path = path
        self.metadata = metadata


def open_gguf(path: Path) -> Gguf:
    """Opens and checks `path`; anything wrong with it is a UsageError of one sentence."""
    file = MappedFile(path)
    cursor = _Cursor(file)
    tensors, pairs = _read_header(cursor)
    metadata = _read_metadata(cursor, pairs)
    _refuse_split(metadata, path)
    return Gguf(path, metadata, _read_tensors(cursor, tensors, _alignment(cursor, metadata)))


class _Cursor:
    """Reads forward through a file; never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.data = file.data
        self.name = file.path.name
        self.at = 0
        self.elements = 0  # of metadata arrays so far

    @property
    def left(self) -> int:
        return self.file.size - self.at

    def need(self, nbytes: int, what: str) -> int:
        """Moves over `nbytes` and returns where they begin."""
        if nbytes > self.left:
            raise UsageError(
                f"{self.name} is cut short or damaged: {what} needs {nbytes:,} bytes at byte {self.at:,}, and {self.left:,} are left.",
                hint="Was the download complete?",
            )
        start = self.at
        self.at += nbytes
        return start

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code), what))
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("Q", f"the length of {what}")
        if limit is not None and length > limit:
            raise UsageError(f"{self.name}: {what} has {length:,} bytes; at most {limit:,} are allowed.")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.name}: {what} is not UTF-8 text (byte {start + error.start:,}).") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, metadata pairs), both possible in a file of this size."""
    if cursor.data[:4] != b"GGUF":
        raise UsageError(f"{cursor.file.path} is not a GGUF file: it begins with {cursor.data[:4]!r}.")
    cursor.at = 4
    version = cursor.number("I", "the version")
    if version in (0x02000000, 0x03000000):
        raise UsageError(f"{cursor.name} is a big-endian GGUF file; llmx reads little-endian ones.")
    if version not in (2, 3):
        raise UsageError(f"{cursor.name} has GGUF version {version}; llmx reads versions 2 and 3.")
    tensors, pairs = cursor.number("Q", "the tensor count"), cursor.number("Q", "the metadata count")
    if tensors > MAX_TENSORS or tensors > cursor.left // 24:
        raise UsageError(
            f"{cursor.name} says it holds {tensors:,} tensors, too many for a file of {cursor.file.size:,} bytes."
        )
    if pairs > cursor.left // 13:
        raise UsageError(
            f"{cursor.name} says it holds {pairs:,} metadata pairs, too many for a file of {cursor.file.size:,} bytes."
        )
    return tensors, pairs


def _read_metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(pairs):
        key = cursor.text(f"metadata key {index}", MAX_NAME)
        if not key:
            raise UsageError(f"{cursor.name}: metadata key {index} is empty.")
        if key in metadata:
            raise UsageError(f"{cursor.name} names the metadata key {shown(key)} twice.")
        metadata[key] = _read_value(cursor, cursor.number("I", f"the type of {shown(key)}"), f"metadata {shown(key)}")
    return metadata


def _read_value(cursor: _Cursor, code: int, what: str) -> Any:
    if code == STRING:
        return cursor.text(what)
    if code != ARRAY:
        return _scalars(cursor, code, 1, what)[0]
    code, count = cursor.number("I", f"the type of {what}"), cursor.number("Q", f"the length of {what}")
    cursor.elements += count
    if cursor.elements > MAX_ELEMENTS:
        raise UsageError(f"{cursor.name}: {what} has {count:,} elements; metadata may hold {MAX_ELEMENTS:,} in all.")
    return _strings(cursor, count, what) if code == STRING else _scalars(cursor, code, count, what)


def _scalars(cursor: _Cursor, code: int, count: int, what: str) -> list[Any]:
    if code not in SCALARS:
        raise UsageError(f"{cursor.name}: {what} has value type {code}, which GGUF does not have there.")
    start = cursor.need(count * struct.calcsize("<" + SCALARS[code]), what)
    if code == 7 and any(cursor.data[at] > 1 for at in range(start, cursor.at)):
        raise UsageError(f"{cursor.name}: {what} holds a byte other than 0 and 1 where true or false must be.")
    return list(struct.unpack_from(f"<{count}{SCALARS[code]}", cursor.data, start))


def _strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """`count` strings. Vocabularies have hundreds of thousands, so the loop is written flat."""
    data, end, at = cursor.data, cursor.file.size, cursor.at
    length_at = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            (length,) = length_at(data, at)
            start, at = at + 8, at + 8 + length
            if at > end:
                break
            strings.append(data[start:at].decode("utf-8"))
    except struct.error:
        pass  # fewer than 8 bytes are left: reported with the other shortage
    except UnicodeDecodeError as error:
        raise UsageError(f"{cursor.name}: element {len(strings):,} of {what} is not UTF-8 text.") from error
    if len(strings) < count:
        raise UsageError(
            f"{cursor.name} is cut short or damaged: {what} says it has {count:,} strings, and the file ends in number {len(strings):,}.",
            hint="Was the download complete?",
        )
    cursor.at = at
    return strings


def _refuse_split(metadata: Mapping[str, Any], path: Path) -> None:
    fields = Fields(metadata, path.name)
    parts = fields.integer("split.count", 1, low=0)
    if parts > 1:
        raise UsageError(
            f"{path.name} is part {fields.integer('split.no', 0, low=0) + 1} of a model split into {parts} files, which llmx does not read yet.",
            hint="Join the parts with llama.cpp: llama-gguf-split --merge FIRST_PART OUTPUT.",
        )


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = Fields(metadata, cursor.name).integer("general.alignment", 32, low=1, high=2**20)
    if value & (value - 1):
        raise UsageError(f"{cursor.name}: general.alignment must be a power of two, not {value}.")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Region]:
    table: dict[str, tuple[Stored, int]] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        if name in table:
            raise UsageError(f"{cursor.name} names tensor {shown(name)} twice.")
        table[name] = _tensor(cursor, name)
    base = -(-cursor.at // alignment) * alignment
    regions = {}
    for name, (stored, offset) in table.items():
        if offset % alignment:
            raise UsageError(
                f"{cursor.name}: tensor {shown(name)} begins at {offset:,}, not a multiple of the alignment {alignment}."
            )
        if base + offset + stored.nbytes > cursor.file.size:
            raise UsageError(
                f"{cursor.name} is cut short or damaged: tensor {shown(name)} ends at byte {base + offset + stored.nbytes:,} "
                f"and the file has {cursor.file.size:,}.",
                hint="Was the download complete?",
            )
        regions[name] = Region(stored, cursor.file, base + offset)
    check_apart(regions.values(), cursor.name)
    return regions


def _tensor(cursor: _Cursor, name: str) -> tuple[Stored, int]:
    """One entry of the tensor table: what is stored, and its offset into the data section."""
    what = f"tensor {shown(name)}"
    dims = cursor.number("I", f"the dimensions of {what}")
    if dims > MAX_DIMS:
        raise UsageError(f"{cursor.name}: {what} has {dims:,} dimensions; GGUF allows {MAX_DIMS}.")
    shape = tuple(cursor.number("Q", f"the shape of {what}") for _ in range(dims))[::-1]
    code, offset = cursor.number("I", f"the type of {what}"), cursor.number("Q", f"the offset of {what}")
    if code not in TYPES:
        raise UsageError(f"{cursor.name}: {what} has type number {code}, which llmx does not know.")
    kind, block, block_bytes = TYPES[code]
    by = "×".join(map(str, shape))
    if 0 in shape:
        raise UsageError(f"{cursor.name}: {what} has a zero dimension ({by}).")
    if (shape[-1] if shape else 1) % block:
        raise UsageError(f"{cursor.name}: {what} ({by}) is {kind}, whose rows are whole blocks of {block} elements.")
    return Stored(name, kind, shape, prod(shape) // block * block_bytes), offset
