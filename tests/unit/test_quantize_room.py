"""Hidden states of calibration text on the disk: the same result, nothing left behind, and room for it asked first."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantizing import LLAMA, TINIES, begin, tree, whole
from tiny_models import make

from llmx import device
from llmx.errors import UsageError
from llmx.quantize import output, room
from llmx.quantize.options import choose
from llmx.quantize.states import mapped


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(TINIES[LLAMA], tmp_path_factory.mktemp("tiny") / "source").folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
def test_states_on_the_disk_give_the_same_bytes_and_leave_none(method: str, source: Path, tmp_path: Path) -> None:
    options, group = choose(method, head=True), 32 if method != "int8" else None
    whole(source, tmp_path / "ram", options, group=group)
    run = begin(source, tmp_path / "disk", options, group=group, on_disk=True)
    run.quantize()
    assert not [name for name in files(tmp_path) if "states" in name]
    run.finish()
    assert tree(tmp_path / "disk") == tree(tmp_path / "ram")


def test_the_states_are_in_the_file_and_not_in_memory(tmp_path: Path) -> None:
    first, second = mapped(tmp_path, [(3, 5), (1000, 7)])
    first.fill_(1.0)
    second.copy_(torch.arange(7000.0).view(1000, 7))
    assert first.shape == (3, 5)
    assert second.data_ptr() % 4096 == first.data_ptr() % 4096 == 0
    regions = Path("/proc/self/maps").read_text().splitlines()
    (region,) = [line for line in regions if int(line.split("-")[0], 16) <= first.data_ptr() < _end(line)]
    assert "rw-s" in region
    assert str(tmp_path / "states.f32") in region
    assert torch.equal(second.flatten(), torch.arange(7000.0))
    assert list(tmp_path.iterdir()) == []


def _end(line: str) -> int:
    return int(line.split()[0].split("-")[1], 16)


class Cut(Exception):
    """The process is gone."""


def test_a_run_with_states_on_the_disk_is_resumed_with_or_without_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out = choose("gptq"), tmp_path / "out"
    whole(source, tmp_path / "wanted", options)

    def cut(path: Path, *more: Any, real: Any = output.write_shard) -> None:
        if "00002" in path.name:
            raise Cut
        real(path, *more)

    for on_disk in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(output, "write_shard", cut)
            with pytest.raises(Cut):
                whole(source, out, options, on_disk=True)
        again = whole(source, out, options, resume=True, on_disk=on_disk)
        assert again.resumed == 1
        assert tree(out) == tree(tmp_path / "wanted")
        shutil.rmtree(out)
    assert [path.name for path in tmp_path.iterdir()] == ["wanted"]


def test_a_disk_without_room_for_states_and_result_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=5 * 10**9))
    out = tmp_path / "not" / "made" / "out"
    on_disk, in_memory = room.States("disk", 4 * 10**9), room.States("ram", 4 * 10**9)
    room.check_disk(out, 10**9, on_disk)
    room.check_disk(out, 4 * 10**9, in_memory)
    with pytest.raises(
        UsageError, match=r"out needs 2\.0 GB and its hidden states 4\.0 GB until .* has 5\.0 GB free"
    ) as caught:
        room.check_disk(out, 2 * 10**9, on_disk)
    assert "--states ram" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"out needs 6\.0 GB; .* has 5\.0 GB free") as caught:
        room.check_disk(out, 6 * 10**9, in_memory)
    assert "--states ram" not in str(caught.value.hint)
    assert str(tmp_path) in caught.value.message


def test_finished_shards_of_an_unfinished_run_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=900))
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(UsageError, match="needs"):
        room.check_disk(tmp_path / "out", 1000, room.States("ram", 1))
    (tmp_path / "out.partial" / "model-00001-of-00004.safetensors").write_bytes(bytes(100))
    room.check_disk(tmp_path / "out", 1000, room.States("ram", 1))


def test_a_disk_that_fills_up_later_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"can't be kept in .*, 4\.1 MB: No space left on device"):
        mapped(tmp_path, [(1024, 1000)])
    assert list(tmp_path.iterdir()) == []


def test_states_go_to_the_disk_where_they_would_take_over_a_quarter_of_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "available_memory", lambda _: 4 * 12_800)
    assert room.place("auto", 100, 32) == room.States("ram", 12_800)
    assert room.place("auto", 101, 32) == room.States("disk", 12_928)
    assert room.place("disk", 1, 8) == room.States("disk", 32)
    assert room.place("ram", 10**6, 4096).in_memory == 4 * 4096 * 10**6
    assert room.place("disk", 0, 8) == room.States(None, 0)
    room.check_place("disk")
    with pytest.raises(UsageError, match="--states must be auto, ram or disk, not 'floppy'"):
        room.check_place("floppy")
