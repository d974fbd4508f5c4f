"""The folder that a run fills, shard by shard, beside its final name; renamed when all is there and checked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from llmx.convert.folder import check_taken, put_in_place
from llmx.convert.texts import write_texts
from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import MappedCheckpoint
from llmx.formats.safetensors import open_shard, write_shard
from llmx.report import write_whole

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
REPLACED = ("config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
STATE = ".unfinished"
COPY_LIMIT = 256 * 2**20  # bytes of a file beside the weights


class Output:
    """`path` is the final name, `folder` where files are until `finish`. `blocks`: shards, and one more for the rest.

    UsageError if something is there already and `force` is not set, or if what an earlier run left can't be resumed.
    """

    def __init__(self, path: Path, blocks: int, fingerprint: Mapping[str, Any], *, resume: bool, force: bool) -> None:
        self.path, self.blocks = path, blocks
        self.folder = path.with_name(path.name + ".partial")
        self._aside = path.with_name(f".{path.name}.unfinished")  # where `finish` puts STATE
        self._force = force
        check_free(path, resume=resume, force=force)
        state, text = self.folder / STATE / "run.json", json.dumps(fingerprint, indent=1, sort_keys=True)
        if self.folder.exists():
            if self._aside.exists() and not (self.folder / STATE).exists():  # cut off between two renamings
                self._aside.rename(self.folder / STATE)
            if resume and state.is_file() and state.read_text() == text:
                return
            if resume and state.is_file():
                raise UsageError(
                    f"{self.folder} was begun with other files or options: {_differing(state, fingerprint)}.",
                    hint="give the same ones, or leave --resume out and add --force to begin anew",
                )
            shutil.rmtree(self.folder)
        try:
            (self.folder / STATE).mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"{self.folder} can't be made: {error.strerror}.") from error
        write_whole(state, text)

    @property
    def scratch(self) -> Path:
        """The folder for what is gone when the run ends."""
        return self.folder / STATE

    def shard(self, index: int) -> Path:
        """Of block `index`; of the rest at `blocks`."""
        return self.folder / f"model-{index + 1:05d}-of-{self.blocks + 1:05d}.safetensors"

    def is_done(self, index: int) -> bool:
        """A block is done when its note is there, which is written behind its shard."""
        return self._note(index).is_file() and self.shard(index).is_file()

    def write(self, index: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        with self.writing():
            write_shard(self.shard(index), tensors)
            write_whole(self._note(index), json.dumps(note))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """LlmxError where the disk does not take what is written."""
        try:
            yield
        except OSError as error:
            raise LlmxError(
                f"{self.folder} can't be written: {error.strerror}.",
                hint="what is finished stays there; --resume goes on with it",
            ) from error

    def open(self, index: int) -> MappedCheckpoint:
        return open_shard(self.shard(index))

    def note(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._note(index).read_text())
        return found

    def _note(self, index: int) -> Path:
        return self.folder / STATE / f"{index:05d}.json"

    def write_index(self) -> int:
        """model.safetensors.index.json; returns the bytes of all tensors."""
        placed, total = {}, 0
        for index in range(self.blocks + 1):
            shard = self.open(index)
            for name in shard.names():
                placed[name] = self.shard(index).name
                total += shard.stored(name).nbytes
        whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        write_whole(self.folder / "model.safetensors.index.json", json.dumps(whole, indent=2) + "\n")
        return total

    def write_config(self, source: Path | Mapping[str, str], quantization: Mapping[str, Any]) -> None:
        """Every file of the source folder but weights, byte for byte, or texts by name; config.json with
        `quantization_config`, in place of the one that a quantized source has."""
        if isinstance(source, Path):
            for path in sorted(source.iterdir()):
                named = path.name.endswith(".index.json") or path.name in REPLACED or path.name.startswith(".")
                if path.is_file() and not named and path.suffix not in WEIGHTS and path.stat().st_size <= COPY_LIMIT:
                    _copy(path, self.folder / path.name)
            data = json.loads((source / "config.json").read_text(encoding="utf-8"))
        else:
            write_texts({name: text for name, text in source.items() if name != "config.json"}, self.folder)
            data = json.loads(source["config.json"])
        data.pop("compression_config", None)  # the first name of compressed-tensors' quantization_config
        data["quantization_config"] = dict(quantization)
        write_whole(self.folder / "config.json", json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        if quantization["quant_method"] == "gptq":  # what older loaders read
            write_whole(self.folder / "quantize_config.json", json.dumps(dict(quantization), indent=2) + "\n")

    def finish(self) -> None:
        """Under its final name, in place of what was there."""
        check_taken(self.path, self._force)
        shutil.rmtree(self._aside, ignore_errors=True)
        (self.folder / STATE).rename(self._aside)  # at once, and out of the folder: what is renamed next is whole
        put_in_place(self.folder, self.path, self._force)
        shutil.rmtree(self._aside, ignore_errors=True)


def check_name(path: Path, source: Path) -> None:
    """UsageError for a name that no new folder can have, or that would take the place of the source."""
    if path.name in ("", ".."):
        raise UsageError(f"-o {path} names no folder that can be made.", hint=f"-o {path / 'NAME'}")
    whole, mine = path.resolve(), source.resolve()
    for parent in whole.parents:
        if parent.exists() and not parent.is_dir():
            raise UsageError(f"-o {path}: {parent} is a file, no folder.", hint="choose another name with -o")
    if whole == mine or whole in mine.parents:
        raise UsageError(
            f"{path} has the model that is to be quantized, which stays.", hint="choose another name with -o"
        )


def check_free(path: Path, *, resume: bool, force: bool) -> None:
    """UsageError if `path` is taken, or an unfinished run for it is there, unless asked to go on or to begin anew."""
    check_taken(path, force)
    folder = path.with_name(path.name + ".partial")
    if folder.exists() and not resume and not force:
        raise UsageError(
            f"{folder} is there: an earlier run did not finish.",
            hint="--resume goes on with it, --force begins anew",
        )


def _differing(state: Path, fingerprint: Mapping[str, Any]) -> str:
    before = json.loads(state.read_text())
    plain = json.loads(json.dumps(fingerprint))
    return ", ".join(sorted(key for key in {*before, *plain} if before.get(key) != plain.get(key)))


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with source.open("rb") as read, temporary.open("wb") as written:
            shutil.copyfileobj(read, written)
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
