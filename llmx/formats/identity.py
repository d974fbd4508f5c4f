"""Which weights a report is about: the sha256 of a model's files, kept in the cache, and the hub's commit."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmx.errors import UsageError
from llmx.formats.hub import cache_dir

CHUNK = 1 << 22
WORTH_KEEPING = 1 << 20  # bytes of a file from which its sum is kept
SETTLED_NS = 2_000_000_000  # a file younger than that can still change without its time changing
DEFINITIONS = {
    "model.sha256": "of the file that holds the weights; of several, the sha256 of theirs, sorted, a line each",
    "model.config_sha256": "of a folder's config.json",
    "model.revision": "the hub's commit, where the files lie in its cache or were downloaded from it",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def identify(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """{"sha256", "weight_files", "revision"}, and of a folder "config_sha256"; see DEFINITIONS.

    path: a .gguf file, or a folder with safetensors. progress(bytes done, bytes in all), of what must be read: a file
    of the same path, size and time as one hashed before is not read again. UsageError where a file can't be read.
    """
    try:
        files = weight_files(path)
        sums = _sums(files, progress)
        found: dict[str, Any] = {"sha256": sums[0] if len(sums) == 1 else of_sums(sums), "weight_files": len(files)}
        if path.is_dir():
            found["config_sha256"] = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
        return found | {"revision": revision(files[0])}
    except OSError as error:
        raise UsageError(f"The model {path} can't be read: {error.strerror or error}.") from error


def weight_files(path: Path) -> tuple[Path, ...]:
    """Those that the weights are read from: the file itself, all parts of a split GGUF, the safetensors of a folder."""
    from llmx.formats.gguf import open_gguf
    from llmx.formats.safetensors import open_safetensors

    return (open_safetensors(path) if path.is_dir() else open_gguf(path)).files()


def of_sums(sums: Sequence[str]) -> str:
    """One sum for several files, whatever their names, as `sha256sum FILES | cut -c-64 | sort | sha256sum` gives it."""
    return hashlib.sha256("".join(f"{one}\n" for one in sorted(sums)).encode()).hexdigest()


def revision(file: Path) -> str | None:
    """The commit by where the hub's cache keeps `file`, or by what `hf download --local-dir` wrote beside it."""
    parts = file.absolute().parts
    for above, name in itertools.pairwise(parts):
        if above == "snapshots" and _COMMIT.fullmatch(name):
            return name
    beside = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        first = beside.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return None
    return first if _COMMIT.fullmatch(first) else None


def _sums(files: Sequence[Path], progress: Callable[[int, int], None]) -> list[str]:
    known = [_known(file) for file in files]
    total = sum(file.stat().st_size for file, sum_of in zip(files, known, strict=True) if sum_of is None)
    done, sums = 0, []
    for file, sum_of in zip(files, known, strict=True):
        if sum_of is None:
            before, digest = _stamp(file), hashlib.sha256()
            with file.open("rb", buffering=0) as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            sum_of = digest.hexdigest()
            settled = before == _stamp(file) and time.time_ns() - before["mtime_ns"] > SETTLED_NS
            if settled and before["bytes"] >= WORTH_KEEPING:
                _keep(file, before | {"sha256": sum_of})
        sums.append(sum_of)
    return sums


def _stamp(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"path": str(file.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _place(file: Path) -> Path:
    return cache_dir() / "hashes" / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def _known(file: Path) -> str | None:
    """The sum from an earlier time, if the file is the same still."""
    try:
        kept = json.loads(_place(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stamp = _stamp(file)
    same = isinstance(kept, dict) and all(kept.get(key) == value for key, value in stamp.items())
    found = kept.get("sha256") if same else None
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{64}", found) else None


def _keep(file: Path, entry: dict[str, Any]) -> None:
    from llmx.report import write_whole

    place = _place(file)
    with contextlib.suppress(OSError):  # it is then read again the next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(entry) + "\n")
