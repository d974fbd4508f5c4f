"""Scores of SentencePiece's tokens: from its own file (a protocol buffer), or from the order of merges made of them."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import UsageError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Pieces:
    """Each piece's score."""

    found: dict[str, float]

    def scores(self, tokens: Sequence[str]) -> list[float]:
        """0 for tokens that are no pieces."""
        return [self.found.get(token, 0.0) for token in tokens]


def read_model(path: Path) -> Pieces:
    """sentencepiece_model.proto: a ModelProto's field 1 is a piece, with its text (1) and its score (2)."""
    found = {}
    try:
        data = path.read_bytes()
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                parts = dict(_fields(value))
                found[bytes(parts[1]).decode("utf-8")] = float(parts.get(2, 0.0))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
        raise UsageError(f"{path} is no SentencePiece model: it is damaged.") from error
    if not found:
        raise UsageError(f"{path} is no SentencePiece model: it has no pieces.")
    return Pieces(found)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value: Any
            value, at = _varint(data, at)
        elif kind == FIXED64:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif kind == FIXED32:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        elif kind == BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("a field ends beyond the file")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"field type {kind}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def scores_of_merges(merges: Sequence[Any], tokens: Sequence[str], made: Container[str]) -> list[float]:
    """-n for the n-th token of `made` that a merge makes, as SentencePiece has it, which merges what scores highest."""
    ranks: dict[str, int] = {}
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left + right in made:
            ranks.setdefault(left + right, len(ranks))
    for token in tokens:  # characters, which nothing makes, come after all
        if token in made:
            ranks.setdefault(token, len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]
