"""Which weights a model is: sums as sha256sum gives them, kept until a file changes, and the hub's commit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import weight_files as wf

from llmx.errors import UsageError
from llmx.formats import identity
from llmx.formats.identity import identify

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONG_AGO = 1_600_000_000


def tensor(name: str, seed: int) -> bytes:
    return wf.safetensors({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, bytes([seed] * 4))


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "WORTH_KEEPING", 1)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one file, old enough that its time tells whether it changed."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(tensor("a", 1))
    os.utime(path / "model.safetensors", (LONG_AGO, LONG_AGO))
    return path


def read_bytes(path: Path) -> int:
    """How many bytes `identify` has to read."""
    seen = [0]
    identify(path, lambda done, total: seen.append(done))
    return max(seen)


def test_the_sum_of_one_file_is_sha256sums(folder: Path) -> None:
    assert identify(folder) == {
        "sha256": sum_of(tensor("a", 1)),
        "weight_files": 1,
        "config_sha256": sum_of(b"{}"),
        "revision": None,
    }


def test_several_files_have_one_sum_whatever_they_are_called(tmp_path: Path) -> None:
    found = []
    for names in (("x", "y"), ("q", "p")):
        folder = tmp_path / names[0]
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        for name, key in zip(names, "ab", strict=True):
            (folder / f"{name}.safetensors").write_bytes(tensor(key, ord(key)))
        index = {"weight_map": {key: f"{name}.safetensors" for name, key in zip(names, "ab", strict=True)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "other.safetensors").write_bytes(b"no part of the model")
        found.append(identify(folder))
    lines = sorted(sum_of(tensor(key, ord(key))) + "\n" for key in "ab")
    assert found[0] == found[1]
    assert found[0]["sha256"] == sum_of("".join(lines).encode())
    assert found[0]["weight_files"] == 2


def test_a_file_is_read_once_and_again_when_it_changed(folder: Path, cache: Path) -> None:
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    assert read_bytes(folder) == size
    assert read_bytes(folder) == 0
    weights.write_bytes(tensor("a", 2))
    os.utime(weights, (LONG_AGO + 1, LONG_AGO + 1))
    assert read_bytes(folder) == size
    assert identify(folder)["sha256"] == sum_of(tensor("a", 2))
    assert len(list((cache / "hashes").iterdir())) == 1  # of a path only the last is kept
    next((cache / "hashes").iterdir()).write_text("[broken")
    assert identify(folder)["sha256"] == sum_of(tensor("a", 2))


def test_a_file_of_this_very_moment_is_not_taken_as_settled(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(tensor("a", 3))  # its time is now: another write could leave the same one
    assert read_bytes(folder) == read_bytes(folder) == weights.stat().st_size


def test_of_a_small_file_nothing_is_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WORTH_KEEPING", 1000)
    identify(folder)
    assert not cache.exists()


def test_without_a_place_for_it_the_sum_is_the_same(folder: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert read_bytes(folder) == read_bytes(folder) > 0
    assert identify(folder)["sha256"] == sum_of(tensor("a", 1))


def test_the_commit_is_that_of_the_hubs_cache_or_of_its_download(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    assert identify(snapshot)["revision"] == COMMIT
    snapshot.rename(folder)
    beside = folder / ".cache" / "huggingface" / "download"
    beside.mkdir(parents=True)
    (beside / "model.safetensors.metadata").write_text(f"{COMMIT}\n{'e' * 64}\n1700000000.0\n")
    assert identify(folder)["revision"] == COMMIT


def test_a_gguf_is_its_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data := wf.gguf(tensors=[wf.Tensor()], data=bytes(128)))
    assert identify(path) == {"sha256": sum_of(data), "weight_files": 1, "revision": None}


def test_what_is_gone_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        identify(tmp_path / "absent.gguf")
