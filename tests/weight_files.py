"""Weight files written byte by byte, so that each part of one can be made wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UINT8, INT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length`: the length that it claims."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, UINT32, struct.pack("<I", value))


def string(key: str, value: str | bytes) -> bytes:
    return pair(key, STRING, text(value))


def array(key: str, kind: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    """An array; `count`: the length that it claims."""
    head = struct.pack("<IQ", kind, len(items) if count is None else count)
    return pair(key, ARRAY, head + b"".join(items))


@dataclass(frozen=True)
class Tensor:
    """An entry of the tensor table, `dims` in GGUF's order (fastest first)."""

    name: str | bytes = "t"
    dims: Sequence[int] = (32,)
    kind: int = F32
    offset: int = 0
    n_dims: int | None = None

    def packed(self) -> bytes:
        count = len(self.dims) if self.n_dims is None else self.n_dims
        return (
            text(self.name)
            + struct.pack("<I", count)
            + b"".join(struct.pack("<Q", size) for size in self.dims)
            + struct.pack("<IQ", self.kind, self.offset)
        )


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A GGUF file; `counts`: numbers of tensors and of pairs that its header claims."""
    claimed = [len(real) if count is None else count for count, real in zip(counts, (tensors, pairs), strict=True)]
    head = magic + struct.pack("<IQQ", version, *claimed)
    head += b"".join(pairs) + b"".join(tensor.packed() for tensor in tensors)
    return head + bytes(-len(head) % alignment) + data


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; `header` is dumped as JSON unless it is bytes; `length`: what it claims to be long."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data
