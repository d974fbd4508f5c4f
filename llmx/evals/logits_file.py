"""Reference log-probabilities on disk, in llama-perplexity's own format (`--kl-divergence-base`). Without torch.

Little-endian: "_logits_", n_ctx u32, n_vocab i32, n_chunk i32, n_chunk * n_ctx tokens i32 (BOS not put in), and for
each chunk its n_ctx - 1 - n_ctx/2 scored positions: scale f32, least log-probability f32, n_vocab codes u16 (and one
more where n_vocab is odd). A token's log-probability is scale * code + least; what is more than 16 below the likeliest
has code 0. Format and rounding as in llama.cpp's tools/perplexity/perplexity.cpp.
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from llmx.errors import LlmxError, UsageError

MAGIC = b"_logits_"
HEADER = struct.Struct("<8sIii")
MOST_CTX, MOST_VOCAB = 2**24, 2**24


@dataclass(frozen=True)
class Layout:
    """Sizes, and where everything lies."""

    ctx: int
    vocab: int
    chunks: int

    @property
    def rows(self) -> int:
        """Scored positions of a chunk."""
        return self.ctx - 1 - self.ctx // 2

    @property
    def width(self) -> int:
        """u16 values of one position: two f32, then the codes, padded to an even number."""
        return 4 + self.vocab + self.vocab % 2

    @property
    def start(self) -> int:
        """Bytes before the first position."""
        return HEADER.size + 4 * self.chunks * self.ctx

    @property
    def bytes(self) -> int:
        return self.start + self.chunks * self.rows * self.width * 2

    def offset(self, chunk: int, row: int) -> int:
        return self.start + (chunk * self.rows + row) * self.width * 2


class LogitsFile:
    """A file to compare with. UsageError where it is no such file, cut off, or absurd."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                header = file.read(HEADER.size)
                self.layout = _layout(header, size, path)
                tokens = np.frombuffer(file.read(4 * self.layout.chunks * self.layout.ctx), "<i4")
        except OSError as error:
            raise UsageError(f"The logits file {path} can't be read: {error.strerror}.") from error
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.layout.vocab:
            raise UsageError(f"{path} names tokens outside its vocabulary of {self.layout.vocab}.")
        self.tokens: list[int] = tokens.tolist()
        self._words = np.memmap(path, "<u2", "r", self.layout.start, self._shape())

    def _shape(self) -> tuple[int, int, int]:
        return self.layout.chunks, self.layout.rows, self.layout.width

    def windows(self) -> list[tuple[int, ...]]:
        ctx = self.layout.ctx
        return [tuple(self.tokens[i : i + ctx]) for i in range(0, len(self.tokens), ctx)]

    def read(self, chunk: int, row: int, count: int) -> tuple[Any, Any, Any]:
        """codes (count, vocab) u16, scale (count,) f32, least (count,) f32 of `count` positions from `row` on."""
        words = np.array(self._words[chunk, row : row + count])
        scales = words[:, :4].copy().view("<f4")
        return words[:, 4 : 4 + self.layout.vocab], scales[:, 0], scales[:, 1]


def _layout(header: bytes, size: int, path: Path) -> Layout:
    if len(header) < HEADER.size or header[:8] != MAGIC:
        raise UsageError(
            f"{path} is no file of reference logits: it does not begin with {MAGIC.decode()}.",
            hint="make one with --save-logits, or with llama-perplexity --kl-divergence-base",
        )
    _, ctx, vocab, chunks = HEADER.unpack(header)
    if not (4 <= ctx <= MOST_CTX and 1 <= vocab <= MOST_VOCAB and chunks >= 1):
        raise UsageError(f"{path}: a context of {ctx}, a vocabulary of {vocab} and {chunks} chunks can't be.")
    layout = Layout(ctx, vocab, chunks)
    if size != layout.bytes:
        raise UsageError(
            f"{path} has {size} bytes; {chunks} chunks of {ctx} tokens over a vocabulary of {vocab} are "
            f"{layout.bytes}.",
            hint="whoever wrote it was interrupted, or the copy is not whole" if size < layout.bytes else None,
        )
    return layout


class LogitsWriter:
    """Writes a file, its positions in any order. It takes its name when `finish` is called, or is gone.

    UsageError where the disk has no room for it, or the path can't be written.
    """

    def __init__(self, path: Path, layout: Layout, windows: list[tuple[int, ...]]) -> None:
        self.path, self.layout = path, layout
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        free = shutil.disk_usage(path.absolute().parent).free
        if layout.bytes > free:
            raise UsageError(
                f"The reference logits need {layout.bytes / 1e9:.2f} GB at {path.absolute().parent}; "
                f"{free / 1e9:.2f} GB are free.",
                hint=f"lower --chunks to at most {free * layout.chunks // layout.bytes}, or name another place with "
                "--save-logits",
            )
        try:
            self._file: IO[bytes] = open(self._temporary, "wb")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"The logits can't be written to {path}: {error.strerror}.") from error
        self._file.write(HEADER.pack(MAGIC, layout.ctx, layout.vocab, layout.chunks))
        self._file.write(np.asarray(windows, "<i4").tobytes())

    def write(self, chunk: int, row: int, codes: Any, scale: Any, least: Any) -> None:
        """Positions of a chunk from `row` on: codes (count, vocab) u16, scale and least (count,) f32."""
        words = np.zeros((len(codes), self.layout.width), "<u2")
        words[:, :4] = np.stack([scale, least], 1).astype("<f4").view("<u2")
        words[:, 4 : 4 + self.layout.vocab] = codes
        try:
            self._file.seek(self.layout.offset(chunk, row))
            self._file.write(words.tobytes())
        except OSError as error:
            raise LlmxError(f"The reference logits can't be written to {self.path}: {error.strerror}.") from error

    def finish(self) -> LogitsFile:
        """Every position has been written: the file takes its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)
        return LogitsFile(self.path)

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
