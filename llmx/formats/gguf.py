"""GGUF files, versions 2 and 3, little-endian: checked metadata and tensor table, then mapped bytes.

Every count, length and offset is compared with the file's size before anything is allocated for it. A model split into
several files (name-00001-of-00003.gguf...) is opened by the name of any of them.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from mmap import mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmx.errors import UsageError
from llmx.formats.checkpoint import MappedCheckpoint, MappedFile, Region, Stored, by
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
BOOL, STRING, ARRAY = 7, 8, 9
TENSOR_BYTES, PAIR_BYTES = 24, 13  # the least that an entry of each table takes
MAX_ELEMENTS = 2**22  # of all metadata arrays together: the largest vocabularies need about a third
MAX_TENSORS = MAX_PAIRS = 2**16
MAX_DIMS = 4
MAX_NAME, MAX_TEXT = 2**16, 2**24  # bytes


class Gguf(MappedCheckpoint):
    """An open GGUF file: a Checkpoint with its `metadata`: whole numbers, floats, bools, strings, and lists of them.

    Of a split model: the tensors of all parts, and path and metadata of the first, which has all but the tensors.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], regions: Mapping[str, Region]) -> None:
        super().__init__("gguf", regions)
        self.path = path
        self.metadata = metadata


def open_gguf(path: Path) -> Gguf:
    """Opens and checks `path`, and the other parts of its model; anything wrong is a UsageError of one sentence."""
    part = open_part(path)
    count = Fields(part.metadata, path.name).integer("split.count", 1, low=0)
    return part if count < 2 else _join(part, count)


def open_part(path: Path) -> Gguf:
    """One file by itself, though it may be a part of a split model."""
    cursor = _Cursor(MappedFile(path))
    tensors, pairs = _read_header(cursor)
    metadata, _ = _read_metadata(cursor, pairs)
    return Gguf(path, metadata, _read_tensors(cursor, tensors, _alignment(Fields(metadata, cursor.name))))


# Long lists of texts that were read last, by their length, their bytes and a hash of these. A command opens its file
# for the checks, the model and the tokenizer, and what convert-gguf writes has the vocabulary of its source: to read
# one takes forty times as long as to hash it.
_texts: dict[tuple[int, int, bytes], list[str]] = {}
LONG, KEPT = 1024, 4  # texts; lists: the vocabularies and merges of two files


def _digest(data: mmap, start: int, end: int) -> bytes:
    with memoryview(data) as view, view[start:end] as part:
        return hashlib.blake2b(part).digest()


def forget_metadata() -> None:
    """Frees what is remembered of files that were read: once a model is loaded nobody opens it again."""
    _texts.clear()


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

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self.name}: {problem}.")

    def short(self, problem: str) -> UsageError:
        """The error for a file that ends before something that it says it has."""
        return UsageError(
            f"{self.name} is cut short or damaged: {problem}; the file has {self.file.size:,} bytes.",
            hint="Was the download complete?",
        )

    def need(self, nbytes: int, what: str) -> int:
        """Moves over `nbytes` and returns where they begin."""
        if nbytes > self.left:
            raise self.short(f"{what} takes {nbytes:,} bytes from byte {self.at:,} on")
        start = self.at
        self.at += nbytes
        return start

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code), what))
        return value

    def text(self, what: str, limit: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise self.error(f"{what} has {length:,} bytes; at most {limit:,} are allowed")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text (byte {start + error.start:,})") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, metadata pairs), both possible in a file of this size."""
    if cursor.data[:4] != b"GGUF":
        raise UsageError(f"{cursor.file.path} is not a GGUF file: it begins with {cursor.data[:4]!r}.")
    cursor.at = 4
    version = cursor.number("I", "the version")
    if version in (0x02000000, 0x03000000):
        raise cursor.error("this is a big-endian GGUF file, and llmx reads little-endian ones")
    if version not in (2, 3):
        raise cursor.error(f"this is GGUF version {version}, and llmx reads versions 2 and 3")
    tensors, pairs = cursor.number("Q", "the tensor count"), cursor.number("Q", "the metadata count")
    for count, what, least, most in (
        (tensors, "tensors", TENSOR_BYTES, MAX_TENSORS),
        (pairs, "metadata pairs", PAIR_BYTES, MAX_PAIRS),
    ):
        if count * least > cursor.left:
            raise cursor.short(f"it says that it holds {count:,} {what}")
        if count > most:
            raise cursor.error(f"it holds {count:,} {what}, and llmx reads at most {most:,}")
    return tensors, pairs


Spans = Mapping[str, tuple[int, int]]  # where each value lies, its type first


def _read_metadata(cursor: _Cursor, pairs: int) -> tuple[Mapping[str, Any], Spans]:
    """Leaves the cursor behind it."""
    metadata: dict[str, Any] = {}
    spans = {}
    for index in range(pairs):
        key = cursor.text(f"metadata key {index}", MAX_NAME)
        if not key:
            raise cursor.error(f"metadata key {index} is empty")
        if key in metadata:
            raise cursor.error(f"metadata key {shown(key)} appears twice")
        what, start = f"metadata {shown(key)}", cursor.at
        metadata[key] = _read_value(cursor, cursor.number("I", f"the type of {what}"), what)
        spans[key] = start, cursor.at
    return MappingProxyType(metadata), spans


def stored_pairs(path: Path) -> dict[str, bytes]:
    """The metadata of one file as it is stored: key -> the value's type and bytes. UsageError as in `open_gguf`."""
    cursor = _Cursor(MappedFile(path))
    _, count = _read_header(cursor)
    _, spans = _read_metadata(cursor, count)
    return {key: bytes(cursor.data[start:end]) for key, (start, end) in spans.items()}


def _read_value(cursor: _Cursor, code: int, what: str) -> Any:
    if code == STRING:
        return cursor.text(what, MAX_TEXT)
    if code != ARRAY:
        return _scalars(cursor, code, 1, what)[0]
    code, count = cursor.number("I", f"the type of {what}"), cursor.number("Q", f"the length of {what}")
    cursor.elements += count
    if cursor.elements > MAX_ELEMENTS:
        raise cursor.error(f"{what} has {count:,} elements, and metadata may hold {MAX_ELEMENTS:,} in all")
    return _strings(cursor, count, what) if code == STRING else _scalars(cursor, code, count, what)


def _scalars(cursor: _Cursor, code: int, count: int, what: str) -> list[Any]:
    if code not in SCALARS:
        raise cursor.error(f"{what} has value type {code}, which GGUF does not have there")
    start = cursor.need(count * struct.calcsize("<" + SCALARS[code]), what)
    if code == BOOL and max(cursor.data[start : cursor.at], default=0) > 1:
        raise cursor.error(f"{what} holds a byte other than 0 and 1 where true or false must be")
    return list(struct.unpack_from(f"<{count}{SCALARS[code]}", cursor.data, start))


def _strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """`count` strings, remembered if they are many."""
    if count < LONG:
        return _read_strings(cursor, count, what)
    start = cursor.at
    for (known, nbytes, digest), found in tuple(_texts.items()):
        if known == count and nbytes <= cursor.left and _digest(cursor.data, start, start + nbytes) == digest:
            cursor.at += nbytes
            return found
    made = _read_strings(cursor, count, what)
    while len(_texts) >= KEPT:
        _texts.pop(next(iter(_texts)), None)
    _texts[count, cursor.at - start, _digest(cursor.data, start, cursor.at)] = made
    return made


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """Vocabularies have hundreds of thousands, so the loops are flat."""
    data, end, at = cursor.data, cursor.file.size, cursor.at
    length_at = struct.Struct("<Q").unpack_from
    parts: list[bytes] = []
    while len(parts) < count and at + 8 <= end:
        start = at + 8
        at = start + length_at(data, at)[0]
        if at > end:
            break
        parts.append(data[start:at])
    strings: list[str] = []
    try:
        strings.extend(map(bytes.decode, parts))
    except UnicodeDecodeError as error:
        raise cursor.error(f"string {len(strings):,} of {what} is not UTF-8 text") from error
    if len(parts) < count:
        raise cursor.short(f"it says that {what} has {count:,} strings, and ends in number {len(parts):,}")
    cursor.at = at
    return strings


def _join(part: Gguf, count: int) -> Gguf:
    """The whole model that `part` is one of `count` parts of."""
    paths = _part_paths(part.path, count)
    parts = [part if path == part.path else open_part(path) for path in paths]
    regions: dict[str, Region] = {}
    for index, other in enumerate(parts):
        fields = Fields(other.metadata, other.path.name)
        says = (fields.integer("split.no", low=0) + 1, fields.integer("split.count", low=0))
        if says != (index + 1, count):
            raise UsageError(
                f"{other.path.name} says that it is part {says[0]} of {says[1]}, not part {index + 1} of {count}.",
                hint="Fetch all parts of one model again, and keep their names.",
            )
        for name in other.names():
            if name in regions:
                first = regions[name].file.path.name
                raise UsageError(f"Tensor {shown(name)} is stored twice: in {first} and in {other.path.name}.")
            regions[name] = other.region(name)
    for other in parts:
        total = Fields(other.metadata, other.path.name).integer("split.tensors.count", len(regions))
        if total != len(regions):
            raise UsageError(
                f"{other.path.name} says that all parts hold {total:,} tensors, but they hold {len(regions):,}.",
                hint="Are the parts all of one model?",
            )
    return Gguf(paths[0], parts[0].metadata, regions)


def _part_paths(path: Path, count: int) -> list[Path]:
    """Paths of all parts, `path` among them, all there."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name, re.DOTALL | re.IGNORECASE)
    if match is None or int(match[3]) != count or not 1 <= int(match[2]) <= count:
        raise UsageError(
            f"{path.name} is one of the {count} parts of a split model, and its name doesn't say which.",
            hint=f"The parts' names must end in -00001-of-{count:05}.gguf and so on, as they were made.",
        )
    paths = [path.with_name(f"{match[1]}-{index:05}-of-{count:05}{match[4]}") for index in range(1, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{path.name} is one of {count} parts of a split model, and {missing[0]}{more} is not beside it.",
            hint="Fetch all parts into one folder.",
        )
    return paths


def _alignment(fields: Fields) -> int:
    value = fields.integer("general.alignment", 32, low=1, high=2**20)
    if value & (value - 1):
        raise UsageError(f"{fields.where}: general.alignment must be a power of two, not {value}.")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Region]:
    table: dict[str, tuple[Stored, int]] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        if name in table:
            raise cursor.error(f"tensor {shown(name)} appears twice")
        table[name] = _read_tensor(cursor, name)
    base = -(-cursor.at // alignment) * alignment
    regions = {}
    for name, (stored, offset) in table.items():
        if offset % alignment:
            raise cursor.error(f"tensor {shown(name)} begins at {offset:,}, no multiple of the alignment {alignment}")
        if (end := base + offset + stored.nbytes) > cursor.file.size:
            raise cursor.short(f"tensor {shown(name)} would end at byte {end:,}")
        regions[name] = Region(stored, cursor.file, base + offset)
    _check_apart(cursor, list(regions.values()))
    return regions


def _read_tensor(cursor: _Cursor, name: str) -> tuple[Stored, int]:
    """One entry of the tensor table: what is stored, and its offset into the data section."""
    what = f"tensor {shown(name)}"
    dims = cursor.number("I", f"the number of dimensions of {what}")
    if dims > MAX_DIMS:
        raise cursor.error(f"{what} has {dims:,} dimensions, and GGUF allows {MAX_DIMS}")
    shape = tuple(cursor.number("Q", f"the shape of {what}") for _ in range(dims))[::-1]
    code, offset = cursor.number("I", f"the type of {what}"), cursor.number("Q", f"the offset of {what}")
    if code not in TYPES:
        raise cursor.error(f"{what} has type number {code}, which llmx does not know")
    kind, block, block_bytes = TYPES[code]
    if 0 in shape:
        raise cursor.error(f"{what} has a zero dimension ({by(shape)})")
    if (shape[-1] if shape else 1) % block:
        raise cursor.error(f"{what} ({by(shape)}) is {kind}, whose rows are whole blocks of {block} elements")
    return Stored(name, kind, shape, prod(shape) // block * block_bytes), offset


def _check_apart(cursor: _Cursor, regions: list[Region]) -> None:
    regions.sort(key=lambda region: region.offset)
    for one, next_one in pairwise(regions):
        if next_one.offset < one.offset + one.stored.nbytes:
            raise cursor.error(f"tensors {shown(one.stored.name)} and {shown(next_one.stored.name)} overlap")
