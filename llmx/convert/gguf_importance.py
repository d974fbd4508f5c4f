"""Importance matrices: for each input of a linear the mean square of what came in, as llama.cpp's llama-imatrix writes.

Two formats: a GGUF file with `NAME.in_sum2` and `NAME.counts`, and the older binary one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmx.convert.arrays import Numbers
from llmx.errors import UsageError
from llmx.formats.checkpoint import by
from llmx.formats.fields import Fields
from llmx.formats.gguf import open_gguf
from llmx.formats.gguf_write import Entry, encode, plan, write_parts

if TYPE_CHECKING:
    from torch import Tensor

SUMS, COUNTS = ".in_sum2", ".counts"
MOST_ENTRIES, MOST_NAME, MOST_VALUES = 1 << 16, 1 << 12, 1 << 26


def read_importance(path: Path) -> dict[str, Numbers]:
    """Tensor name -> (matrices, n_in) float32, >= 0 and finite; of experts that saw nothing ones."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    found = _read_gguf(path) if magic == b"GGUF" else _read_old(path)[0]
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise UsageError(f"{path}: the importance of {name} holds numbers that are no mean squares.")
    if not found:
        raise UsageError(f"{path} holds no importance of any tensor.")
    return found


def about_importance(path: Path) -> dict[str, Any]:
    """What the file (a readable one) says it was collected from, and in how many chunks: dataset, chunks_count."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return _read_old(path)[1]
    fields = Fields(open_gguf(path).metadata, path.name)
    texts, chunks = fields.strings("imatrix.datasets", ()), fields.integer("imatrix.chunk_count", 0, low=0)
    return ({"dataset": texts[0]} if texts else {}) | ({"chunks_count": chunks} if chunks else {})


def _read_gguf(path: Path) -> dict[str, Numbers]:
    file = open_gguf(path)
    found = {}
    for name in file.names():
        if not name.endswith(SUMS):
            continue
        owner = name.removesuffix(SUMS)
        if owner + COUNTS not in file:
            raise UsageError(f"{path.name}: {owner}{COUNTS} is missing beside {name}.")
        stored = file.stored(name), file.stored(owner + COUNTS)
        if any(one.kind != "F32" for one in stored) or prod(stored[0].shape) % prod(stored[1].shape):
            said = " and ".join(f"{one.name} ({one.kind} {by(one.shape)})" for one in stored)
            raise UsageError(f"{path.name}: {said} are no sums and counts of importance.")
        counts = np.frombuffer(file.raw(owner + COUNTS), np.float32)
        sums = np.frombuffer(file.raw(name), np.float32).reshape(len(counts), -1)
        found[owner] = np.ones_like(sums)
        np.divide(sums, counts[:, None], out=found[owner], where=counts[:, None] > 0)
    return found


def _read_old(path: Path) -> tuple[dict[str, Numbers], dict[str, Any]]:
    """Per entry: a name, how many calls, and sums of each call's mean. Then, in newer files, see `about_importance`."""
    data = path.read_bytes()
    at, found = 0, {}
    about: dict[str, Any] = {}

    def number() -> int:
        nonlocal at
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        return int(value)

    try:
        count = number()
        if not 0 < count <= MOST_ENTRIES:
            raise ValueError
        for _ in range(count):
            length = number()
            if not 0 < length <= MOST_NAME:
                raise ValueError
            name = data[at : at + length].decode("utf-8")
            at += length
            calls, values = number(), number()
            if not 0 < values <= MOST_VALUES or at + 4 * values > len(data):
                raise ValueError
            sums = np.frombuffer(data, np.float32, values, at).reshape(1, -1)
            at += 4 * values
            found[name] = sums / np.float32(calls) if calls > 0 else sums.copy()
        if at + 8 <= len(data):
            chunks, length = number(), number()
            text = data[at : at + length].decode("utf-8", "replace") if 0 < length <= MOST_NAME else ""
            about = ({"dataset": text} if text else {}) | ({"chunks_count": chunks} if chunks > 0 else {})
    except (struct.error, ValueError, UnicodeDecodeError):
        raise UsageError(f"{path} is no importance matrix: neither GGUF nor llama.cpp's older format.") from None
    return found, about


def chunks_of(sums: Mapping[str, tuple[Tensor, int]], tokens: int) -> int:
    """How many chunks of `tokens` the rows are that most tensors saw, to the nearest, as llama-imatrix counts them."""
    most = max((count for _, count in sums.values()), default=0)
    return max(1, (most + tokens // 2) // tokens)


def write_importance(path: Path, sums: Mapping[str, tuple[Tensor, int]], tokens: int, source: str) -> None:
    """sums: tensor name -> (squares of its inputs added up (n_in,), rows that were). tokens: in a chunk.

    As llama-imatrix writes GGUF; it merges such files by adding up sums and counts.
    """
    pairs = {
        "general.type": encode("imatrix"),
        "imatrix.datasets": encode([source]),
        "imatrix.chunk_count": encode(chunks_of(sums, tokens)),
        "imatrix.chunk_size": encode(tokens),
    }
    values: dict[str, Numbers] = {}
    for name, (total, count) in sorted(sums.items()):
        values[name + SUMS] = total.float().reshape(1, -1).numpy()
        values[name + COUNTS] = np.array([[count]], np.float32)
    entries = [Entry(name, "F32", array.shape) for name, array in values.items()]
    write_parts([path], plan(pairs, entries), lambda entry: iter([values[entry.name].data.cast("B")]))
