"""What `llmx convert-gguf` and `convert-hf` find when they read back what they wrote: nothing faulty gets its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
from tiny_models import every_tiny, make

from llmx.convert import hf
from llmx.convert.gguf_check import HALVES, holds_numbers
from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_source import FileSource, Rows
from llmx.convert.gguf_types import MIXTURES, Asked
from llmx.errors import LlmxError
from llmx.formats import gguf_write
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from tests.unit.test_convert_gguf import with_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16."""
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    made = make(tiny, tmp_path_factory.mktemp("tiny") / "model").folder
    stored = safetensors.torch.load_file(made / "model.safetensors")
    safetensors.torch.save_file({name: t.bfloat16() for name, t in stored.items()}, made / "model.safetensors")
    return with_tokenizer(made)


def changed(folder: Path, out: Path, value: float) -> Path:
    shutil.copytree(folder, out)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    stored[UP][3, 5] = value
    safetensors.torch.save_file(stored, out / "model.safetensors")
    return out


def written(source: Path, out: Path, kind: str) -> None:
    located = Located("gguf" if source.is_file() else "hf", source, source.name)
    convert(located, Wanted(Asked(kind), out), lambda done, total: None, lambda line: None)


@pytest.mark.parametrize("kind", ["bf16", "copy", "q8_0"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_not_written_even_where_it_is_copied(
    kind: str, value: float, folder: Path, tmp_path: Path
) -> None:
    source = changed(folder, tmp_path / "model", value)
    with pytest.raises(LlmxError, match=r"blk\.1\.ffn_up\.weight holds infinities or what is no number"):
        written(source, tmp_path / "m.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind not in ("f32", "f16", "bf16")])
def test_numbers_that_no_scale_holds_are_said(kind: str, folder: Path, tmp_path: Path) -> None:
    source = changed(folder, tmp_path / "model", 1e30)
    with pytest.raises(LlmxError, match=r"blk\.1\.ffn_up\.weight has numbers too large for \w+, whose scales"):
        written(source, tmp_path / "m.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", HALVES)
def test_every_scale_of_a_block_is_looked_at(kind: str) -> None:
    """Where float16 stand in the gguf package's reading: one that is infinite makes weights that are."""
    quant = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[quant][1]
    blocks = np.full((4, size), 1, np.uint8)
    assert holds_numbers(kind, blocks)
    for at in range(0, size, 2):
        other = blocks.copy()
        other[2, at : at + 2] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)
        with np.errstate(all="ignore"):
            wanted = bool(np.isfinite(gguf.dequantize(other, quant)).all())
        assert holds_numbers(kind, other) == wanted, at


def test_a_damaged_block_is_not_copied_nor_made_a_folder(folder: Path, tmp_path: Path) -> None:
    written(folder, tmp_path / "m.gguf", "q8_0")
    region = open_gguf(tmp_path / "m.gguf").region("blk.1.ffn_up.weight")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[region.offset + 34 : region.offset + 36] = np.float16("inf").tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(LlmxError, match=r"blk\.1\.ffn_up\.weight holds infinities"):
        written(tmp_path / "m.gguf", tmp_path / "copy.gguf", "copy")
    with pytest.raises(LlmxError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds infinities"):
        hf.convert(Located("gguf", tmp_path / "m.gguf", "m.gguf"), tmp_path / "folder", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def damaged(data: bytes) -> bytes:
    return b"XXXX" + data[4:]


def renamed(data: bytes) -> bytes:
    return data.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged, "out.gguf does not read back as it was written"),
        (
            renamed,
            r"it has blk\.7\.ffn_up\.weight \(BF16 96×64\) where blk\.1\.ffn_up\.weight \(BF16 96×64\) should be",
        ),
        (lambda data: data[:-40], "out.gguf does not read back as it was written"),
    ],
    ids=["damaged", "renamed", "cut"],
)
def test_a_disk_that_keeps_something_else_is_noticed(
    change: Callable[[bytes], bytes], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses(descriptor: int) -> None:
        (path,) = tmp_path.glob(".*.tmp")
        data = change(path.read_bytes())
        os.ftruncate(descriptor, len(data))
        os.pwrite(descriptor, data, 0)

    monkeypatch.setattr("llmx.formats.gguf_write.os.fsync", loses)
    with pytest.raises(LlmxError, match=said):
        written(folder, tmp_path / "out.gguf", "bf16")
    assert not list(tmp_path.iterdir())


def test_tensors_by_which_a_split_model_is_checked_are_those_of_each_part(folder: Path, tmp_path: Path) -> None:
    wanted = Wanted(Asked("q4_0"), tmp_path / "m.gguf", most=30_000)
    results = convert(Located("hf", folder, "model"), wanted, lambda done, total: None, lambda line: None)
    assert len(results["paths"]) > 2
    assert len(open_gguf(Path(results["paths"][0])).names()) == len(results["tensors"])


def test_the_disk_is_told_to_begin_with_each_part_of_a_file_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, tmp_path / "a.gguf", "q8_0")
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(gguf_write, "AHEAD", 10_000)
    monkeypatch.setattr(gguf_write, "begin_writing", lambda file, start, count: told.append((start, start + count)))
    written(folder, tmp_path / "b.gguf", "q8_0")
    assert [start for start, _ in told] == [0, *(end for _, end in told[:-1])]
    assert 0 <= (tmp_path / "b.gguf").stat().st_size - told[-1][1] < 10_000 + 32
    monkeypatch.undo()
    monkeypatch.setattr(gguf_write, "AHEAD", 10_000)
    for call in (gguf_write._sync_file_range, lambda: None, lambda: lambda *numbers: -1):
        monkeypatch.setattr(gguf_write, "_sync_file_range", call)
        written(folder, tmp_path / "c.gguf", "q8_0")
        assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
        (tmp_path / "c.gguf").unlink()


def test_the_next_tensors_are_begun_before_one_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else threads wait at each tensor's end, and most tensors are made in one piece."""
    written(folder, tmp_path / "a.gguf", "bf16")
    begun: list[str] = []
    numbers = FileSource.numbers

    def watched(self: FileSource, name: str) -> Iterator[Rows]:
        begun.append(name)
        return numbers(self, name)

    monkeypatch.setattr(FileSource, "numbers", watched)
    at_first: list[str] = []
    wanted = Wanted(Asked("q8_0"), tmp_path / "b.gguf", threads=3)
    source = Located("gguf", tmp_path / "a.gguf", "a")
    convert(source, wanted, lambda done, total: at_first or at_first.extend(begun), lambda line: None)
    assert len(at_first) > 1
    assert len(begun) > len(at_first)  # but not all of them at once
    assert len(begun) == len(set(begun))
