"""Models of the Hugging Face Hub in huggingface_hub's cache, and their way there. It is imported only when used.

A reference (`refs/main`) moves to a commit when all its files are there: what an interrupted download leaves is
never used, its finished files are kept for the next one, and until then the commit before stays in use.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.errors import LlmxError, UsageError
from llmx.formats import hub_names
from llmx.formats.hub_names import HubName

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

MODEL, DATA = "model", "data set"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Found:
    """`kind`: "hf" (a snapshot's folder) or "gguf" (a file in it, the first part of a split one)."""

    kind: str
    path: Path


def cached(name: HubName) -> Found | None:
    """The model, if all of it is in the cache. No request is made."""
    commit = _cached_commit(name)
    folder = _storage(name) / "snapshots" / (commit or "none")
    if commit is None or not folder.is_dir():
        return None
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    try:
        if name.what:
            return Found("gguf", folder / hub_names.ggufs(name, files)[0])
        if (
            "config.json" in files
            and hub_names.has_tokenizer(files)
            and files.issuperset(hub_names.weights(name, files, folder))
        ):
            return Found("hf", folder)
    except UsageError:  # the name means none of the files that are here
        return None
    return None


def fetch(name: HubName, progress: Callable[[int, int], None]) -> Found:
    """Fetches what the cache lacks of the newest commit of `name.revision`; `progress(bytes done, bytes in all)`.

    UsageError for a name that the hub does not have; LlmxError if the hub, the network or the disk does not do it.
    """
    with _quiet(), _explained(name):
        info = _ask(name)
        files = {file.rfilename: file for file in info.siblings or ()}
        commit = str(info.sha)
        folder = _storage(name) / "snapshots" / commit
        if name.what:
            wanted = hub_names.ggufs(name, files)
            _download(name, commit, [files[file] for file in wanted], progress)
            found = Found("gguf", folder / wanted[0])
        else:
            hub_names.check_model(name, files)
            small = hub_names.beside(files)
            if hub_names.INDEX in files:  # it says what else is wanted
                _download(name, commit, [files[hub_names.INDEX]], lambda done, total: None)
            weights = hub_names.weights(name, files, folder)
            if missing := [file for file in weights if file not in files]:
                raise UsageError(f"{name} lacks {missing[0]!r}, which its {hub_names.INDEX} names.")
            _download(name, commit, [files[file] for file in (*small, *weights)], progress)
            found = Found("hf", folder)
        _set_commit(name, commit)
    return found


def config_of(name: HubName) -> Path:
    """config.json of the model, from the cache or the hub; nothing else of it is fetched."""
    from huggingface_hub import hf_hub_download

    with _quiet(), _explained(name):
        return Path(hf_hub_download(name.repo, "config.json", revision=name.revision))


def data_file(repo: str, file: str, revision: str) -> Path:
    """One file of a data set, from the cache or the hub. UsageError for a name that the hub does not have; LlmxError if
    the hub, the network or the disk does not do it."""
    from huggingface_hub import hf_hub_download

    name = HubName(repo, revision, file)
    with _quiet(), _explained(name, DATA):
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision, library_name="llmx"))


def is_offline() -> bool:
    """HF_HUB_OFFLINE forbids requests."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _storage(name: HubName) -> Path:
    return _cache() / f"models--{name.repo.replace('/', '--')}"


def _cached_commit(name: HubName) -> str | None:
    if _COMMIT.fullmatch(name.revision):
        return name.revision
    try:
        commit = (_storage(name) / "refs" / name.revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _set_commit(name: HubName, commit: str) -> None:
    if name.revision == commit:
        return
    reference = _storage(name) / "refs" / name.revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".llmx-", dir=_storage(name)) as scratch:
        new = Path(scratch) / "commit"
        new.write_text(commit)
        new.replace(reference)


def _ask(name: HubName) -> ModelInfo:
    """One request: the commit and its files with their sizes."""
    from huggingface_hub import HfApi, constants

    from llmx import __version__

    api = HfApi(library_name="llmx", library_version=__version__)
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    try:
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=timeout)
        if _COMMIT.fullmatch(info.sha or ""):
            return info
    except (json.JSONDecodeError, TypeError, KeyError):
        pass
    raise LlmxError(
        f"{_endpoint()} answers as no hub does to a request for {name}.",
        hint="Check HF_ENDPOINT, and any proxy or login page.",
    )


def _download(name: HubName, commit: str, files: list[RepoSibling], progress: Callable[[int, int], None]) -> None:
    """One file after another: an interrupt ends it at once; hf_xet fetches the pieces of a large file in parallel."""
    from huggingface_hub import hf_hub_download

    from llmx import __version__

    _check_space(name, commit, files)
    total, before = sum(file.size or 0 for file in files), 0
    for file in files:
        tell = partial(_tell, progress, before, file.size or 0, total)
        hf_hub_download(
            name.repo,
            file.rfilename,
            revision=commit,
            library_name="llmx",
            library_version=__version__,
            tqdm_class=_bar(tell),
        )
        before += file.size or 0
        progress(before, total)


def _tell(progress: Callable[[int, int], None], before: int, size: int, total: int, done: int) -> None:
    progress(before + min(done, size), total)


def _bar(tell: Callable[[int], None]) -> type[Any]:
    """What huggingface_hub wants of a tqdm; `tell(bytes of this file)` is called instead of drawing."""

    class Bar:
        total: int | None = None

        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.n = initial

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            tell(self.n)

        def nothing(self, *_: object, **__: object) -> None:
            pass

        # update_transfer: bytes on the wire, which are fewer than the file's; the bar counts the file's
        update_transfer = set_transfer_postfix_str = set_postfix_str = refresh = close = nothing

    return Bar


def _check_space(name: HubName, commit: str, files: list[RepoSibling]) -> None:
    """LlmxError if the disk can't hold what is still to come: better now than after an hour."""
    storage = _storage(name)

    def is_there(file: RepoSibling) -> bool:
        blob = file.lfs.sha256 if file.lfs else file.blob_id
        return (storage / "snapshots" / commit / file.rfilename).is_file() or bool(
            blob and (storage / "blobs" / blob).is_file()
        )

    needed = sum(file.size or 0 for file in files if not is_there(file))
    place = storage
    while not place.is_dir() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LlmxError(
            f"{name} needs {_size(needed)}, and {_cache()} has {_size(free)} free.",
            hint="Make room, or name a folder on a larger disk in HF_HOME.",
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's own messages on retries and tokens: what fails in the end is told in our words."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(name: HubName, kind: str = MODEL) -> Iterator[None]:
    """Turns what huggingface_hub, the network and the disk raise into one sentence and a hint."""
    from huggingface_hub import errors

    # HTTPError is that of the HTTP library under this version of huggingface_hub; no host, no answer, a broken one.
    # RuntimeError is hf_xet's, ValueError an address that is no address.
    expected: tuple[type[Exception], ...]
    expected = (errors.HTTPError, OSError, ValueError, RuntimeError)  # type: ignore[attr-defined]
    try:
        yield
    except LlmxError:
        raise
    except expected as error:
        cause: Exception = error
        while isinstance(cause, errors.LocalEntryNotFoundError) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        if isinstance(cause, errors.HfHubHTTPError):
            raise _refused(name, cause, kind) from error
        if isinstance(cause, errors.OfflineModeIsEnabled):
            raise LlmxError(
                f"{name} is not, or not completely, in the cache {_cache()}, and HF_HUB_OFFLINE forbids to fetch it.",
                hint="Unset HF_HUB_OFFLINE, or fetch it where there is a network and copy that folder.",
            ) from error
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
            why = "the disk is full" if cause.errno == errno.ENOSPC else os.strerror(cause.errno)
            raise LlmxError(
                f"{name} can't be kept in {_cache()}: {why}.", hint="HF_HOME names another folder for the cache."
            ) from error
        raise LlmxError(
            f"{name} can't be fetched from {_endpoint()}: {_first_line(cause)}.",
            hint="Check the network (and HTTPS_PROXY, HF_ENDPOINT); files that are complete are kept for the next try.",
        ) from error


def _refused(name: HubName, error: Any, kind: str) -> LlmxError:
    """What an HTTP status of the hub means. `error`: an HfHubHTTPError."""
    from huggingface_hub import errors

    page, tokens = f"{_endpoint()}/{'datasets/' if kind == DATA else ''}{name.repo}", f"{_endpoint()}/settings/tokens"
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return LlmxError(
            f"{name.repo} is gated: its owners give it to those who accept its terms.",
            hint=f"Accept them at {page}, then set HF_TOKEN to a token from {tokens}"
            if status == 401
            else f"Accept them at {page} with the account of your token, and let the token read gated repositories.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{name.repo} has no revision {name.revision!r}.", hint=f"See {page}/tree/main")
    if isinstance(error, errors.EntryNotFoundError):
        return UsageError(f"{name.repo} has no file {name.what!r}.", hint=f"See {page}/tree/{name.revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        here = "folder" if kind == MODEL else "file"
        return UsageError(
            f"There is no {kind} {name.repo}: no such {here} here, and no such repository on the hub, or a private "
            "one.",
            hint=f"Check the name at {page}; for a private one, set HF_TOKEN to a token from {tokens}",
        )
    if status in (401, 403):
        return LlmxError(
            f"The hub refuses {name.repo} with status {status}: {_first_line(error)}.",
            hint=f"Is HF_TOKEN right? Make a new one at {tokens}, or unset it for public models.",
        )
    return LlmxError(f"{_endpoint()} answers with status {status} to a request for {name}.", hint="Try again later.")


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _first_line(error: BaseException) -> str:
    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)[:200].rstrip(".:")
