"""Files of reference logits: llama-perplexity's format, byte by byte, both ways, and what no such file can be."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from llmx.errors import UsageError
from llmx.evals import logits_file, measures
from llmx.evals.logits_file import Layout, LogitsFile, LogitsWriter

CTX, VOCAB = 6, 5  # 2 scored positions a chunk, one u16 of padding
WINDOWS = [(0, 1, 2, 3, 4, 0), (4, 3, 2, 1, 0, 4)]
CODES = [[65535, 0, 1, 2, 3], [0, 65535, 7, 8, 9], [10, 20, 30, 40, 50], [0, 0, 0, 0, 0]]
SCALES = [2**-12, 2**-13, 0.25, 0.0]
LEAST = [-16.5, -9.0, -3.25, math.log(0.2)]


def by_hand() -> bytes:
    data = b"_logits_" + struct.pack("<Iii", CTX, VOCAB, len(WINDOWS))
    data += b"".join(struct.pack("<6i", *window) for window in WINDOWS)
    for codes, scale, least in zip(CODES, SCALES, LEAST, strict=True):
        data += struct.pack("<ff", scale, least) + struct.pack("<5H", *codes) + bytes(2)
    return data


def test_a_file_made_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(by_hand())
    file = LogitsFile(path)
    assert (file.layout.ctx, file.layout.vocab, file.layout.chunks, file.layout.rows) == (CTX, VOCAB, 2, 2)
    assert file.windows() == WINDOWS
    for row in range(4):
        codes, scale, least = file.read(row // 2, row % 2, 1)
        assert codes.tolist() == [CODES[row]]
        assert scale.tolist() == [SCALES[row]]
        assert least.tolist() == [pytest.approx(LEAST[row])]
        found = measures.decode(codes, scale, least, torch.device("cpu"))
        assert found[0].tolist() == pytest.approx([SCALES[row] * code + LEAST[row] for code in CODES[row]], rel=1e-6)
    codes, _, _ = file.read(1, 0, 2)
    assert codes.tolist() == CODES[2:]


def test_what_is_written_in_any_order_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "it"
    with LogitsWriter(path, Layout(CTX, VOCAB, 2), WINDOWS) as writer:
        for row in (3, 0, 2, 1, 0):
            columns = ([values[row]] for values in (CODES, SCALES, LEAST))
            writer.write(row // 2, row % 2, *(np.array(column) for column in columns))
        assert not path.exists()
        writer.finish()
    assert path.read_bytes() == by_hand()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with LogitsWriter(tmp_path / "it", Layout(CTX, VOCAB, 2), WINDOWS):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def transcribed(logits: list[float]) -> tuple[list[int], float, float]:
    """llama.cpp's coding of one position in plain numbers, rounded to f32 wherever its variables are floats."""
    f = np.float32
    top = max(f(x) for x in logits)
    low = max(min(f(x) for x in logits), f(top - f(16)))
    total = f(math.log(math.fsum(float(np.exp(f(f(x) - top))) for x in logits)))
    least = f(f(low - top) - total)
    scale = f(f(top - low) / f(65535))
    if scale == 0:
        return [0] * len(logits), 0.0, float(least)
    inverse = f(f(1) / scale)
    codes = [int(np.rint(f(inverse * f(f(x) - low)))) if f(x) > low else 0 for x in logits]
    return codes, float(scale), float(least)


@pytest.mark.parametrize("kind", ["near", "wide", "flat"])
def test_logits_are_coded_as_llama_cpp_codes_them(kind: str) -> None:
    logits = torch.randn(20, 33) * {"near": 1.0, "wide": 30.0, "flat": 0.0}[kind]
    codes, scale, least = measures.encode(logits)
    for row in range(20):
        wanted = transcribed(logits[row].tolist())
        assert codes[row].tolist() == wanted[0]
        assert scale[row] == np.float32(wanted[1])
        assert least[row] == pytest.approx(wanted[2], abs=1e-6)
    found = measures.decode(codes, scale, least, torch.device("cpu"))
    truth = logits.double().log_softmax(-1)
    near = truth > truth.amax(-1, keepdim=True) - 16
    assert (found - truth)[near].abs().max() <= scale.max() / 2 + 4e-6


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: b"", "does not begin with _logits_"),
        (lambda d: d[:15], "does not begin with _logits_"),
        (lambda d: b"_LOGITS_" + d[8:], "does not begin with _logits_"),
        (lambda d: d[:-1], "has"),
        (lambda d: d[:40], "has 40 bytes"),
        (lambda d: d + b"\0", "has"),
        (lambda d: d[:8] + struct.pack("<I", 0) + d[12:], "a context of 0"),
        (lambda d: d[:8] + struct.pack("<I", 2**32 - 1) + d[12:], "can't be"),
        (lambda d: d[:12] + struct.pack("<i", -5) + d[16:], "a vocabulary of -5"),
        (lambda d: d[:16] + struct.pack("<i", -1) + d[20:], "-1 chunks"),
        (lambda d: d[:16] + struct.pack("<i", 2**31 - 1) + d[20:], "has"),
        (lambda d: d[:20] + struct.pack("<i", 5) + d[24:], "tokens outside its vocabulary of 5"),
        (lambda d: d[:20] + struct.pack("<i", -1) + d[24:], "tokens outside its vocabulary of 5"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, spoil, says: str) -> None:
    path = tmp_path / "it"
    path.write_bytes(spoil(by_hand()))
    with pytest.raises(UsageError) as error:
        LogitsFile(path)
    assert says in error.value.message
    assert str(path) in error.value.message


def test_an_absent_file_and_a_full_disk_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="can't be read: No such file"):
        LogitsFile(tmp_path / "it")
    usage = type("Usage", (), {"free": 50})
    monkeypatch.setattr(logits_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"need 0\.00 GB") as error:
        LogitsWriter(tmp_path / "it", Layout(CTX, VOCAB, 2), WINDOWS)
    assert error.value.hint
    assert "lower --chunks" in error.value.hint
    assert not list(tmp_path.iterdir())
