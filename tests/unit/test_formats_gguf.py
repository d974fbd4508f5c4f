"""The GGUF reader: against the `gguf` package on good files, and one sentence for each kind of bad one."""

from __future__ import annotations

import base64
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weight_files as wf
from weight_files import Tensor

from llmx.errors import UsageError
from llmx.formats.gguf import TYPES, forget_metadata, open_gguf


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture
def oracle_file(tmp_path: Path) -> Path:
    """A file by the `gguf` package: metadata of every type, tensors of several."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

    generator = np.random.default_rng(1)
    path = tmp_path / "oracle.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("x.u8", 200)
    writer.add_int8("x.i8", -100)
    writer.add_uint16("x.u16", 60_000)
    writer.add_int16("x.i16", -30_000)
    writer.add_uint32("x.u32", 4_000_000_000)
    writer.add_int32("x.i32", -2_000_000_000)
    writer.add_uint64("x.u64", 2**64 - 1)
    writer.add_int64("x.i64", -(2**63))
    writer.add_float32("x.f32", 0.1)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "Ġ🐈 naïve")
    writer.add_array("x.strings", ["", "a", "ġ", "🐈‍⬛"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1.25])
    writer.add_key_value("x.bytes", [1, 2, 255], GGUFValueType.ARRAY, GGUFValueType.UINT8)
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"):
        code = GGMLQuantizationType[kind]
        values = generator.standard_normal((6, 64)).astype(np.float32)
        stored = values if kind == "F32" else quants.quantize(values, code)
        writer.add_tensor(f"w.{kind}", stored, raw_dtype=code)
    writer.add_tensor("experts", generator.standard_normal((3, 4, 5)).astype(np.float32))
    writer.add_tensor("i32", np.arange(7, dtype=np.int32))
    writer.add_custom_alignment(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equals_oracle(path: Path) -> None:
    """Every key and every tensor as the `gguf` package reads them."""
    from gguf import GGUFReader

    reader, ours = GGUFReader(path), open_gguf(path)
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        assert ours.metadata[key] == reader.fields[key].contents(), key
    assert list(ours.names()) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        stored, read = ours.stored(tensor.name), ours.read(tensor.name)
        assert stored.kind == tensor.tensor_type.name
        assert stored.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert stored.nbytes == tensor.n_bytes
        assert read.contiguous().view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()
    assert ours.bytes_read == sum(tensor.n_bytes for tensor in reader.tensors)


def test_reads_what_the_gguf_package_writes(oracle_file: Path) -> None:
    assert_equals_oracle(oracle_file)


def test_reads_the_demo_model_as_the_gguf_package_does(demo: Path) -> None:
    assert_equals_oracle(demo)


def test_the_table_of_types_is_the_packages() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    ours = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
    theirs = {kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items() if kind.name in ours}
    (
        ours.pop("Q8_1"),
        theirs.pop("Q8_1"),
    )  # the package counts two floats; ggml's block_q8_1 has two halfs, and no file it
    assert ours == theirs
    assert {kind.value: kind.name for kind in GGML_QUANT_SIZES if kind.value in TYPES} == {
        code: name for code, (name, _, _) in TYPES.items()
    }


def test_plain_kinds_give_their_dtype_and_block_kinds_give_bytes(oracle_file: Path) -> None:
    ours = open_gguf(oracle_file)
    assert ours.read("w.F32").dtype == torch.float32
    assert ours.read("w.BF16").dtype == torch.bfloat16
    assert ours.read("i32").dtype == torch.int32
    assert ours.read("w.Q4_1").dtype == torch.uint8
    assert ours.stored("w.Q4_1").shape == (6, 64)
    assert tuple(ours.read("w.Q4_1").shape) == (6, 64 // 32 * 20)


def test_a_slice_reads_and_counts_only_its_bytes(oracle_file: Path) -> None:
    ours = open_gguf(oracle_file)
    whole = ours.read("w.Q8_0")
    before = ours.bytes_read
    rows = ours.read("w.Q8_0", {0: (2, 5)})
    assert torch.equal(rows, whole[2:5])
    assert rows.data_ptr() == whole.data_ptr() + 2 * 68  # a view of the mapping
    assert ours.bytes_read - before == 3 * 68
    columns = ours.read("w.Q8_0", {1: (34, 68)})
    assert torch.equal(columns, whole[:, 34:])
    assert ours.bytes_read - before == 3 * 68 + 6 * 34
    expert = ours.read("experts", {0: (1, 2), 2: (1, 4)})
    assert torch.equal(expert, ours.read("experts")[1:2, :, 1:4])


def test_writing_to_what_was_read_leaves_the_file_alone(oracle_file: Path) -> None:
    before = oracle_file.read_bytes()
    open_gguf(oracle_file).read("w.F32").zero_()
    assert oracle_file.read_bytes() == before


def test_version_2_and_an_alignment_of_8_are_read(tmp_path: Path) -> None:
    data = np.arange(3, dtype=np.float32).tobytes()
    tensors = [Tensor("a", (3,), offset=0), Tensor("b", (3,), offset=16)]
    raw = wf.gguf([wf.u32("general.alignment", 8)], tensors, data + bytes(4) + data, version=2, alignment=8)
    ours = open_gguf(write(tmp_path, raw))
    assert ours.read("b").tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_that_no_element_boundary_holds_is_read(tmp_path: Path) -> None:
    raw = wf.gguf([wf.u32("general.alignment", 1)], [Tensor("a", (3,))], struct.pack("<3f", 1, 2, 3), alignment=1)
    assert open_gguf(write(tmp_path, raw)).read("a").tolist() == [1.0, 2.0, 3.0]


def floats(count: int) -> bytes:
    return bytes(4 * count)


ONE = [Tensor()]
HUGE = 2**63
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "bad magic": (wf.gguf(magic=b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "three bytes": (b"GGU", "is not a GGUF file"),
    "only the magic": (b"GGUF", "the version takes 4 bytes"),
    "version 0": (wf.gguf(version=0), "GGUF version 0"),
    "version 4": (wf.gguf(version=4), "GGUF version 4"),
    "version 1": (wf.gguf(version=1), "GGUF version 1"),
    "big-endian": (wf.gguf(version=0x03000000), "big-endian"),
    "header cut": (wf.gguf()[:20], "the metadata count takes 8 bytes"),
    "absurd tensor count": (wf.gguf(counts=(HUGE, None)), "it says that it holds 9,223,372,036,854,775,808 tensors"),
    "absurd pair count": (
        wf.gguf(counts=(None, 2**64 - 1)),
        "it says that it holds 18,446,744,073,709,551,615 metadata",
    ),
    "one pair too many": (wf.gguf([wf.u32("a", 1)], counts=(None, 2)), "metadata key 1 is empty"),
    "many tensors": (wf.gguf([], [], bytes(24 * 65537), counts=(65537, None)), "llmx reads at most 65,536"),
    "many pairs": (wf.gguf([], [], bytes(13 * 65537), counts=(None, 65537)), "llmx reads at most 65,536"),
    "empty key": (wf.gguf([wf.u32("", 1)]), "metadata key 0 is empty"),
    "long key": (wf.gguf([wf.u32("k" * 65537, 1)]), "metadata key 0 has 65,537 bytes"),
    "key past the end": (wf.gguf([wf.text("key", 60_000) + bytes(16)]), "metadata key 0 takes 60,000 bytes"),
    "absurd key length": (
        wf.gguf([wf.text("key", 2**64 - 1) + bytes(16)]),
        "metadata key 0 has 18,446,744,073,709,551,615",
    ),
    "key not UTF-8": (wf.gguf([wf.pair(b"\xff", 4, bytes(4))]), "is not UTF-8"),
    "key twice": (wf.gguf([wf.u32("a", 1), wf.u32("a", 1)]), "metadata key 'a' appears twice"),
    "unknown value type": (wf.gguf([wf.pair("a", 13, bytes(8))]), "metadata 'a' has value type 13"),
    "array of arrays": (wf.gguf([wf.array("a", wf.ARRAY, [bytes(12)])]), "metadata 'a' has value type 9"),
    "neither true nor false": (wf.gguf([wf.pair("a", wf.BOOL, b"\x02")]), "a byte other than 0 and 1"),
    "string past the end": (wf.gguf([wf.pair("a", wf.STRING, wf.text("x", 1000))]), "metadata 'a' takes 1,000 bytes"),
    "absurd string": (
        wf.gguf([wf.pair("a", wf.STRING, wf.text("x", HUGE))]),
        "metadata 'a' has 9,223,372,036,854,775,808",
    ),
    "string not UTF-8": (wf.gguf([wf.string("a", b"\xc3\x28")]), "metadata 'a' is not UTF-8"),
    "absurd array": (wf.gguf([wf.array("a", wf.UINT8, [], HUGE)]), "metadata may hold 4,194,304"),
    "array past the end": (wf.gguf([wf.array("a", wf.UINT32, [], 4_000_000)]), "metadata 'a' takes 16,000,000 bytes"),
    "strings past the end": (wf.gguf([wf.array("a", wf.STRING, [wf.text("x")], 4_000_000)]), "4,000,000 strings"),
    "one string past the end": (wf.gguf([wf.array("a", wf.STRING, [wf.text("x", HUGE)])]), "ends in number 0"),
    "one string not UTF-8": (
        wf.gguf([wf.array("a", wf.STRING, [wf.text(b"\xff")])]),
        "string 0 of metadata 'a' is not",
    ),
    "alignment 0": (wf.gguf([wf.u32("general.alignment", 0)]), "general.alignment must be a whole number between"),
    "alignment 24": (wf.gguf([wf.u32("general.alignment", 24)]), "general.alignment must be a power of two"),
    "alignment a string": (wf.gguf([wf.string("general.alignment", "32")]), "general.alignment must be a whole number"),
    "split": (wf.gguf([wf.u32("split.count", 3)]), "one of the 3 parts of a split model, and its name"),
    "long tensor name": (wf.gguf([], [Tensor("n" * 65537)], floats(32)), "the name of tensor 0 has 65,537 bytes"),
    "tensor twice": (wf.gguf([], [Tensor("t"), Tensor("t", offset=128)], floats(64)), "tensor 't' appears twice"),
    "five dimensions": (wf.gguf([], [Tensor(dims=(1, 1, 1, 1, 1))], floats(32)), "has 5 dimensions"),
    "absurd dimensions": (wf.gguf([], [Tensor(n_dims=2**32 - 1)], floats(32)), "has 4,294,967,295 dimensions"),
    "table cut": (wf.gguf([], [Tensor(n_dims=4)], b""), "cut short"),
    "zero dimension": (wf.gguf([], [Tensor(dims=(0, 1))]), r"has a zero dimension \(1×0\)"),
    "absurd dimension": (wf.gguf([], [Tensor(dims=(HUGE,))], floats(32)), "would end at byte"),
    "product beyond 64 bits": (wf.gguf([], [Tensor(dims=(2**33, 2**33))], floats(32)), "would end at byte"),
    "unknown type": (wf.gguf([], [Tensor(kind=99)], floats(32)), "type number 99"),
    "removed type": (wf.gguf([], [Tensor(kind=4)], floats(32)), "type number 4,"),
    "row of half a block": (wf.gguf([], [Tensor(dims=(48, 2), kind=wf.Q4_1)], bytes(80)), "whole blocks of 32"),
    "scalar of a block type": (wf.gguf([], [Tensor(dims=(), kind=wf.Q4_1)], bytes(80)), "whole blocks of 32"),
    "crooked offset": (wf.gguf([], [Tensor(offset=4)], floats(64)), "no multiple of the alignment 32"),
    "offset past the end": (wf.gguf([], [Tensor(offset=2**40)], floats(32)), "would end at byte"),
    "offset that wraps": (wf.gguf([], [Tensor(offset=2**64 - 32)], floats(32)), "would end at byte"),
    "size that wraps": (wf.gguf([], [Tensor(dims=(2**62 - 1,))], floats(32)), "would end at byte"),
    "sizes whose sum wraps": (
        wf.gguf([], [Tensor("a", dims=(2**61,)), Tensor("b", dims=(2**61,), offset=2**63)], floats(32)),
        "would end at byte",
    ),
    "another alignment than it says": (
        wf.gguf([wf.u32("general.alignment", 64)], [Tensor("a"), Tensor("b", offset=32)], floats(64)),
        "no multiple of the alignment 64",
    ),
    "alignment below 0": (
        wf.gguf([wf.pair("general.alignment", 5, b"\xe0\xff\xff\xff")]),
        "general.alignment must be a whole number between",
    ),
    "data cut": (wf.gguf([], ONE, floats(31)), "would end at byte"),
    "no data": (wf.gguf([], ONE), "would end at byte"),
    "same place": (wf.gguf([], [Tensor("a"), Tensor("b")], floats(32)), "tensors 'a' and 'b' overlap"),
    "overlap": (wf.gguf([], [Tensor("b", offset=96), Tensor("a")], floats(64)), "tensors 'a' and 'b' overlap"),
    "a zero dimension in 65 bytes": (
        base64.b64decode("R0dVRgMAAAABAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAB0AgAAAAEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
        "tensor 't' has a zero dimension",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence_and_costs_little_memory(tmp_path: Path, name: str) -> None:
    raw, problem = BAD[name]
    path = write(tmp_path, raw)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=problem) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 4 * len(raw)
    assert "model.gguf" in caught.value.message
    assert caught.value.message.count("\n") == 0
    assert len(caught.value.message) < 400


def test_memory_stays_bounded_by_the_file_for_metadata_that_unpacks_badly(tmp_path: Path) -> None:
    words = [wf.text("ab")] * 20_000  # ten bytes each, and Python's string of two has fifty-one
    raw = wf.gguf([wf.array("words", wf.STRING, words), wf.array("small", wf.UINT8, [b"\x07"] * 50_000)])
    path = write(tmp_path, raw)
    tracemalloc.start()
    try:
        open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(raw)
    finally:
        tracemalloc.stop()


def test_every_truncation_of_a_good_file_is_refused(oracle_file: Path, tmp_path: Path) -> None:
    raw = oracle_file.read_bytes()
    # The last tensor's padding may be missing: that is 28 bytes of its 7 whole numbers, up to 64.
    last = len(raw) - 36 - 1
    for length in [*range(0, 1200, 7), *range(1200, last, 97), last]:
        with pytest.raises(UsageError):
            open_gguf(write(tmp_path, raw[:length]))


def test_a_damaged_file_is_refused_or_read_and_never_anything_else(oracle_file: Path, tmp_path: Path) -> None:
    raw = oracle_file.read_bytes()
    head = min(len(raw), 1800)  # header, metadata and tensor table
    generator = np.random.default_rng(2)
    refused = 0
    for _ in range(600):
        damaged = bytearray(raw)
        for _ in range(generator.integers(1, 4)):
            width = int(generator.choice([1, 4, 8]))
            at = int(generator.integers(0, head - width))
            value: Any = generator.choice([0, 1, 255, 2**31 - 1, 2**32 - 1])
            damaged[at : at + width] = int(value).to_bytes(8, "little")[:width]
        try:
            ours = open_gguf(write(tmp_path, bytes(damaged)))
        except UsageError:
            refused += 1
        else:
            for name in ours.names():
                assert ours.read(name).nbytes == ours.stored(name).nbytes
    assert 100 < refused < 600


def test_a_vocabulary_is_read_once_while_its_bytes_stay_the_same(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    def made(name: str, tokens: list[str], size: int = 7) -> list[str]:
        writer = GGUFWriter(tmp_path / name, "llama")
        writer.add_uint32("x.size", size)
        writer.add_token_list(tokens)
        writer.add_tensor("t", np.zeros(32, np.float32))
        for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write_part()
        writer.close()
        metadata = open_gguf(tmp_path / name).metadata
        assert metadata["x.size"] == size
        found: list[str] = metadata["tokenizer.ggml.tokens"]
        assert found == tokens
        return found

    forget_metadata()
    tokens = [f"t\u00f6ken {i}" for i in range(2000)]
    first = made("a.gguf", tokens)
    assert made("b.gguf", tokens, size=8) is first
    assert made("c.gguf", [*tokens[:-1], "other"]) is not first
    assert made("a.gguf", tokens) is first
    for i in range(8):  # so many are not kept
        made("d.gguf", [*tokens, str(i)])
    assert made("a.gguf", tokens) is not first
    forget_metadata()
    assert made("a.gguf", tokens) == first
