"""The safetensors reader: against the `safetensors` package on good files; one sentence for each kind of bad one."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weight_files as wf

from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN
from llmx.formats.safetensors import open_safetensors

DTYPES = [
    getattr(torch, name)
    for _, name in PLAIN.values()
    if hasattr(torch, name) and "fnuz" not in name  # which the package does not write
]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    raw = {dtype: torch.randint(0, 2, (6, 8), generator=generator).to(dtype) for dtype in DTYPES}
    found = {f"t.{str(dtype).removeprefix('torch.')}": tensor for dtype, tensor in raw.items()}
    return found | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}


def save(path: Path, what: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(what, path, metadata={"format": "pt"})


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bytes_of(ours) == bytes_of(theirs)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def write(folder: Path, raw: bytes) -> None:
    (folder / "model.safetensors").write_bytes(raw)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.safetensors"])
def test_reads_what_the_safetensors_package_writes(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, tensors())
    ours = open_safetensors(tmp_path)
    assert sorted(ours.names()) == sorted(tensors())
    for key, tensor in tensors().items():
        assert same(ours.read(key), tensor), key
        assert ours.stored(key).shape == tuple(tensor.shape)
        assert ours.stored(key).nbytes == tensor.nbytes
    assert ours.bytes_read == sum(tensor.nbytes for tensor in tensors().values())


def test_data_at_an_odd_address_is_read(tmp_path: Path) -> None:
    header = json.dumps({"a": entry()}).encode()
    values = struct.pack("<6f", *range(6))
    for padding in range(8):
        write(tmp_path, wf.safetensors(header + b" " * padding, values))
        found = open_safetensors(tmp_path)
        assert found.read("a").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert found.read("a", {0: (1, 2)}).tolist() == [[3.0, 4.0, 5.0]]
        assert found.read("a", {0: (0, 2), 1: (1, 3)}).tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert found.bytes_read == 4 * (6 + 3 + 4)


def test_a_slice_reads_and_counts_only_its_bytes(tmp_path: Path) -> None:
    weight = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    save(tmp_path / "model.safetensors", {"w": weight})
    ours = open_safetensors(tmp_path)
    rows = ours.read("w", {0: (1, 3)})
    assert torch.equal(rows, weight[1:3])
    assert ours.bytes_read == 2 * 8 * 2
    columns = ours.read("w", {1: (2, 5)})
    assert torch.equal(columns, weight[:, 2:5])
    assert columns.is_contiguous()
    assert ours.bytes_read == 2 * 8 * 2 + 6 * 3 * 2
    assert rows.data_ptr() == ours.read("w").data_ptr() + 16  # a view of the mapping, not a copy


def test_what_is_released_leaves_memory_and_is_read_again(tmp_path: Path) -> None:
    weight = torch.arange(2**21, dtype=torch.int64)
    save(tmp_path / "model.safetensors", {"w": weight, "x": torch.ones(3)})

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile", "RssShmem")))

    ours = open_safetensors(tmp_path)
    before = mapped()
    assert torch.equal(ours.read("w"), weight)
    assert mapped() > before + weight.nbytes // 2
    ours.release("w")
    assert mapped() < before + weight.nbytes // 2
    assert torch.equal(ours.read("w"), weight)
    assert ours.read("x").tolist() == [1, 1, 1]


def test_a_file_larger_than_memory_is_mapped_and_a_slice_of_it_read(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 3 * memory // 4096
    head = wf.safetensors({"w": entry("U8", [rows, 4096], [0, rows * 4096])})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(head)
        try:
            file.truncate(len(head) + rows * 4096)
        except OSError as error:
            pytest.skip(f"no sparse file of {rows * 4096:,} bytes here: {error.strerror}")
        file.seek(len(head) + (rows - 1) * 4096)
        file.write(b"\x07" * 4096)
    ours = open_safetensors(tmp_path)
    assert ours.read("w", {0: (rows - 1, rows)}).unique().tolist() == [7]
    assert ours.bytes_read == 4096


def shards(folder: Path, **changed: Any) -> None:
    save(folder / "model-1.safetensors", {"a": torch.ones(2), "b": torch.zeros(3)})
    save(folder / "model-2.safetensors", {"c": torch.full((4,), 2.0)})
    placed: dict[str, Any] = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index = {"metadata": {"total_size": 36}, "weight_map": placed | changed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path)
    ours = open_safetensors(tmp_path)
    assert sorted(ours.names()) == ["a", "b", "c"]
    assert ours.read("c").tolist() == [2.0] * 4
    assert "c" in ours
    assert "d" not in ours


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"d": "model-3.safetensors"}, "lacks model-3.safetensors, which model.safetensors.index.json names"),
        ({"d": "model-2.safetensors"}, "model-2.safetensors lacks 'd'"),
        ({"a": "model-2.safetensors"}, "model-2.safetensors lacks 'a'"),
        ({"d": "../model-2.safetensors"}, r"names the file '\.\./model-2.safetensors'"),
        ({"d": "/etc/passwd"}, "names the file '/etc/passwd'"),
        ({"d": "model-2.bin"}, "only safetensors files beside it"),
        ({"d": 3}, "weight_map.d must be a string, not 3"),
    ],
)
def test_an_index_that_does_not_match_its_shards_is_one_sentence(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    shards(tmp_path, **changed)
    with pytest.raises(UsageError, match=problem):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    save(tmp_path / "model-2.safetensors", {"c": torch.ones(4), "a": torch.ones(2)})
    with pytest.raises(UsageError, match=r"'a' is stored twice: in model-1\.safetensors and in model-2\.safetensors"):
        open_safetensors(tmp_path)


def test_pickled_weights_are_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UsageError, match=r"holds its weights as pytorch_model\.bin, a pickle"):
        open_safetensors(tmp_path)


def test_a_folder_without_weights_or_with_several_loose_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no safetensors file"):
        open_safetensors(tmp_path)
    save(tmp_path / "one.safetensors", {"a": torch.ones(1)})
    save(tmp_path / "two.safetensors", {"b": torch.ones(1)})
    with pytest.raises(UsageError, match="holds 2 safetensors files and no model"):
        open_safetensors(tmp_path)


DATA = bytes(24)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "too short": (b"1234567", "has 7 bytes, too few"),
    "absurd header": (wf.safetensors({}, length=2**64 - 1), "says its header has 18,446,744,073,709,551,615 bytes"),
    "header cut": (wf.safetensors({}, length=100), "is cut short: its header should have 100 bytes"),
    "not JSON": (wf.safetensors(b"hello"), "header is not valid JSON"),
    "not UTF-8": (wf.safetensors(b'{"\xff": 1}'), "header is not UTF-8"),
    "a list": (wf.safetensors([]), "must hold a JSON object"),
    "nested": (wf.safetensors(b'{"a":' * 100_000), "nested too deep"),
    "name twice": (wf.safetensors(b'{"a":{},"a":{}}'), "names 'a' twice"),
    "entry no table": (wf.safetensors({"a": 1}), "a must be a table, not 1"),
    "no dtype": (wf.safetensors({"a": {}}), "a.dtype is missing"),
    "unknown dtype": (wf.safetensors({"a": entry("F4")}, DATA), "has dtype 'F4', which llmx does not read"),
    "shape no list": (wf.safetensors({"a": entry(shape="x")}, DATA), "a.shape must be"),
    "negative shape": (wf.safetensors({"a": entry(shape=[-2, -3])}, DATA), "a.shape must be"),
    "real shape": (wf.safetensors({"a": entry(shape=[2.0, 3])}, DATA), "a.shape must be"),
    "true shape": (wf.safetensors({"a": entry(shape=[True, 6])}, DATA), "a.shape must be"),
    "nine dimensions": (wf.safetensors({"a": entry(shape=[1] * 9)}, DATA), "absurd shape of 9"),
    "product beyond 64 bits": (wf.safetensors({"a": entry(shape=[2**33, 2**33])}, DATA), "absurd shape"),
    "nothing times much": (wf.safetensors({"a": entry(shape=[0, 2**62, 9], offsets=[0, 0])}), "absurd shape"),
    "three offsets": (wf.safetensors({"a": entry(offsets=[0, 1, 2])}, DATA), "must be a beginning and an end"),
    "backward offsets": (wf.safetensors({"a": entry(offsets=[24, 0])}, DATA), "must be a beginning and an end"),
    "offsets of another size": (wf.safetensors({"a": entry(offsets=[0, 20])}, DATA), "2×3: 24 bytes, but holds 20"),
    "offsets past the end": (wf.safetensors({"a": entry()}, DATA[:-1]), "ends at byte"),
    "absurd offsets": (wf.safetensors({"a": entry("U8", [2**61], [2**61, 2**62])}, DATA), "ends at byte"),
    "gap": (wf.safetensors({"a": entry(), "b": entry(offsets=[32, 56])}, bytes(56)), "'b' follows a gap of 8 bytes"),
    "gap at the front": (wf.safetensors({"a": entry(offsets=[8, 32])}, bytes(32)), "'a' follows a gap of 8 bytes"),
    "overlap": (wf.safetensors({"a": entry(), "b": entry(offsets=[20, 44])}, bytes(44)), "'b' overlaps"),
    "same place": (wf.safetensors({"a": entry(), "b": entry()}, DATA), "overlaps"),
    "bytes of no tensor": (wf.safetensors({"a": entry()}, bytes(25)), "its header accounts for"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence_and_costs_little_memory(tmp_path: Path, name: str) -> None:
    raw, problem = BAD[name]
    write(tmp_path, raw)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=problem) as caught:
            open_safetensors(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 4 * len(raw)
    assert "model.safetensors" in caught.value.message
    assert len(caught.value.message) < 400


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", tensors())
    raw = (tmp_path / "model.safetensors").read_bytes()
    for length in [*range(0, len(raw), 13), len(raw) - 1]:
        write(tmp_path, raw[:length])
        with pytest.raises(UsageError):
            open_safetensors(tmp_path)


def test_a_damaged_file_is_refused_or_read_and_never_anything_else(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", tensors())
    raw = (tmp_path / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    generator = np.random.default_rng(3)
    refused = 0
    for _ in range(600):
        damaged = bytearray(raw)
        for at in generator.integers(0, head, size=generator.integers(1, 4)):
            damaged[at] = int(generator.choice(list(b'0129-eE.,:"[]{}nt\\\x00\xff')))
        write(tmp_path, bytes(damaged))
        try:
            ours = open_safetensors(tmp_path)
        except UsageError:
            refused += 1
        else:
            for name in ours.names():
                assert ours.read(name).nbytes == ours.stored(name).nbytes
    assert 100 < refused < 600
