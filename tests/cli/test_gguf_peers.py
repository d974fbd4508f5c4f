"""The comparison with llama-quantize: what is equal, what differs, and which of two files is worse."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
QUANTISED = "blk.0.ffn_down.weight"


def write(path: Path, types: dict[str, str], **more: str) -> Path:
    """Tensors of the same numbers, each in its type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, text in more.items():
        writer.add_string(f"general.{key}", text)
    for i, (name, kind) in enumerate(types.items()):
        numbers = np.random.default_rng(i).standard_normal((8, 64), dtype=np.float32)
        packed = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(numbers, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("ours", "theirs", "differ", "worse"),
    [
        ("Q4_0", "Q4_0", False, False),
        ("Q4_0", "Q8_0", True, True),  # less exact
        ("Q8_0", "Q4_0", True, True),  # larger
        ("Q4_1", "Q5_0", True, True),
        ("F16", "BF16", True, False),
        ("BF16", "F16", True, True),
    ],
)
def test_two_files_are_compared_by_bytes_then_by_errors_and_size(
    ours: str, theirs: str, differ: bool, worse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gguf_peers

    names = ("output_norm.weight", QUANTISED)
    source = write(tmp_path / "source.gguf", dict.fromkeys(names, "F32"), name="a")
    pair = tuple(
        write(tmp_path / f"{i}.gguf", {names[0]: "F32", QUANTISED: kind}, name=name)
        for i, (kind, name) in enumerate(((ours, "a"), (theirs, "b")))
    )
    found = gguf_peers.differences(argparse.Namespace(imatrix=None, tolerance=1e-3), source, pair)
    assert (found["tensors"], found["identical"]) == (2, 1 if differ else 2)
    assert found["worse"] == ([QUANTISED] if worse else [])
    assert found["metadata"] == {"general.name": ["a", "b"]}
    for one in found["differing"]:
        assert (one["name"], one["types"]) == (QUANTISED, [ours, theirs])
        assert one["rms_error"] == [error(kind) for kind in (ours, theirs)]


def error(kind: str) -> float:
    numbers = np.random.default_rng(1).standard_normal((8, 64), dtype=np.float32)
    packed = gguf.GGMLQuantizationType[kind]
    made = gguf.dequantize(gguf.quantize(numbers, packed), packed)
    return pytest.approx(float(np.sqrt(((made - numbers).astype(np.float64) ** 2).mean())))


def test_logits_files_are_compared_by_their_mean_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gguf_matrix

    from llmx.evals.logits_file import Layout, LogitsWriter

    rng, layout = np.random.default_rng(0), Layout(8, 5, 2)
    chances = rng.dirichlet(np.ones(5), (2, layout.chunks, layout.rows))
    for name, stored in zip("pq", np.log(chances), strict=True):
        file = LogitsWriter(tmp_path / name, layout, [tuple(range(4)) * 2] * 2)
        for chunk, rows in enumerate(stored):
            least = rows.min(1)
            scale = (rows.max(1) - least) / 65535
            file.write(chunk, 0, np.rint((rows - least[:, None]) / scale[:, None]).astype("<u2"), scale, least)
        file.finish()
    p, q = chances
    wanted = (p * np.log(p / q)).sum(-1).mean()
    assert gguf_matrix.between(tmp_path / "p", tmp_path / "q") == pytest.approx(wanted, rel=1e-3)
