"""Split GGUF files: any part opens all, as the gguf package wrote them; parts that do not fit together are refused."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import weight_files as wf

from llmx.errors import UsageError
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.formats.structure import check

NAMES = ["token_embd.weight", "blk.0.ffn_down.weight", "blk.0.ffn_up.weight", "output_norm.weight", "output.weight"]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((4, 64), dtype=np.float32) for name in NAMES}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts: two tensors in each but the last."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    for name, array in arrays().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if "ffn" in name else None
        writer.add_tensor(name, gguf.quantize(array, kind) if kind else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("model-*-of-00003.gguf"))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_part_opens_all(parts: list[Path], index: int) -> None:
    assert len(parts) == 3
    opened = open_gguf(parts[index])
    assert sorted(opened.names()) == sorted(NAMES)
    assert opened.path == parts[0]
    assert opened.metadata["llama.embedding_length"] == 64, "only the first part holds it"
    for path in parts:
        for tensor in gguf.GGUFReader(path).tensors:
            assert opened.stored(tensor.name).kind == tensor.tensor_type.name
            assert torch.equal(opened.read(tensor.name), torch.from_numpy(tensor.data.copy()))
    assert opened.bytes_read == sum(opened.stored(name).nbytes for name in NAMES)


def test_a_split_model_is_checked_as_one(parts: list[Path]) -> None:
    located = Located("gguf", parts[2], "model")
    with pytest.raises(UsageError, match=r"output_norm.weight 64, but it is stored as 4×64"):
        check(located)


def test_a_first_part_without_tensors_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, tensors=(), total=1)
    write(tmp_path, 2, 2, total=1)
    assert open_gguf(tmp_path / "m-00001-of-00002.gguf").names() == ("t2",)


@pytest.mark.parametrize(("gone", "sentence"), [([1], "model-00002-of-00003.gguf"), ([0, 1], "00001.* and 1 more")])
def test_a_missing_part_is_named(parts: list[Path], gone: list[int], sentence: str) -> None:
    for index in gone:
        parts[index].unlink()
    with pytest.raises(UsageError, match=f"{sentence}.* is not beside it") as caught:
        open_gguf(parts[2])
    assert str(caught.value).startswith("model-00003-of-00003.gguf is one of 3 parts of a split model")
    assert "one folder" in str(caught.value.hint)


def test_a_part_under_another_name_is_refused_with_the_name_it_needs(parts: list[Path], tmp_path: Path) -> None:
    for name in ("model.gguf", "model-00004-of-00003.gguf", "model-00001-of-00004.gguf", "model-00000-of-00003.gguf"):
        shutil.copy(parts[0], tmp_path / name)
        with pytest.raises(UsageError, match="its name doesn't say which") as caught:
            open_gguf(tmp_path / name)
        assert "-00001-of-00003.gguf" in str(caught.value.hint)


def test_parts_that_swapped_names_are_refused(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[2], parts[1])
    for path in parts:
        with pytest.raises(UsageError, match=r"00002-of-00003.gguf says that it is part 3 of 3, not part 2 of 3"):
            open_gguf(path)


def write(folder: Path, number: int, count: int, *, says: int | None = None, total: int = 2, **changes: object) -> None:
    """Part `number` of `count`, with tensor "t" + number unless `tensors` gives others."""
    tensors = changes.get("tensors", (wf.Tensor(f"t{number}"),))
    pairs = [
        wf.pair("split.no", 2, struct.pack("<H", number - 1)),
        wf.pair("split.count", 2, struct.pack("<H", says or count)),
        wf.pair("split.tensors.count", wf.INT32, struct.pack("<i", total)),
    ]
    raw = wf.gguf(pairs, tensors, bytes(128) if tensors else b"")
    (folder / f"m-{number:05}-of-{count:05}.gguf").write_bytes(raw)


def test_what_the_parts_say_of_each_other_must_agree(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    write(tmp_path, 1, 2)
    write(tmp_path, 2, 2)
    assert open_gguf(first).names() == ("t1", "t2")
    write(tmp_path, 2, 2, says=3)
    with pytest.raises(UsageError, match="says that it is part 2 of 3, not part 2 of 2"):
        open_gguf(first)
    write(tmp_path, 2, 2, total=5)
    with pytest.raises(UsageError, match=r"00002-of-00002.gguf says that all parts hold 5 tensors, but they hold 2"):
        open_gguf(first)
    write(tmp_path, 2, 2, tensors=(wf.Tensor("t1"),))
    with pytest.raises(UsageError, match=r"Tensor 't1' is stored twice: in m-00001.*gguf and in m-00002"):
        open_gguf(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"m-00002-of-00002.gguf is cut short"):
        open_gguf(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(wf.gguf([], [wf.Tensor("t2")], bytes(128)))
    with pytest.raises(UsageError, match=r"m-00002-of-00002.gguf.*split.no"):
        open_gguf(first)


def test_widths_that_are_no_whole_blocks_are_one_sentence(tmp_path: Path) -> None:
    for kind, name in ((12, "Q4_K"), (14, "Q6_K"), (23, "IQ4_XS")):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(wf.gguf([], [wf.Tensor(dims=(576, 2), kind=kind)], bytes(1000)))
        with pytest.raises(UsageError, match=rf"tensor 't' \(2×576\) is {name}, whose rows are whole blocks of 256"):
            open_gguf(path)
