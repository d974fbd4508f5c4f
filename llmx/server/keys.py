"""API keys: which there are, what each may reach, and whether a request has one."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmx.errors import RequestError, UsageError

PUBLIC = ("/health", "/ready")  # they say no more than whether the server is up
ALLOWED = re.compile(r"[!-~]{1,512}")  # what fits into a header


@dataclass(frozen=True)
class Key:
    """A key's SHA-256: the key itself is not kept. paths: what it may reach and what lies under that; empty: all."""

    digest: bytes
    paths: tuple[str, ...] = ()

    @property
    def salt(self) -> bytes:
        """In front of the prompts of its requests in the prefix cache: nobody else's can be told from the time that an
        answer takes. Another hash, so that nothing which opens the server goes on to the engine."""
        return hashlib.sha256(b"llmx prefix cache\0" + self.digest).digest()

    def reaches(self, path: str) -> bool:
        return not self.paths or any(f"{path}/".startswith(p.rstrip("/") + "/") for p in self.paths)


def parse(text: str, where: str) -> Key:
    """A key, or a key and the paths that it may reach: `sk-abc /v1/models /metrics`. UsageError."""
    key, *paths = text.split()
    if not ALLOWED.fullmatch(key):
        raise UsageError(f"{where}: a key has 1 to 512 characters of printable ASCII.")
    for path in paths:
        if not path.startswith("/"):
            raise UsageError(f"{where}: behind a key come paths such as /v1/models, not {path!r}.")
    return Key(hashlib.sha256(key.encode()).digest(), tuple(paths))


def read(given: Iterable[str], file: str | os.PathLike[str] | None) -> tuple[Key, ...]:
    """The keys of `--api-key` (or its variable) and those of a file: one a line; empty lines and `# …` are skipped."""
    keys = []
    for text in given:
        if len(text.split()) != 1:
            raise UsageError("--api-key must be one key without spaces.")
        keys.append(parse(text, "--api-key"))
    if file is None:
        return tuple(keys)
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"--api-key-file {os.fspath(file)} can't be read: {reason}.") from None
    wanted = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not wanted:
        raise UsageError(f"--api-key-file {os.fspath(file)} holds no key.")
    return (*keys, *(parse(line, f"{os.fspath(file)}, line {number}") for number, line in wanted))


def check(keys: tuple[Key, ...], path: str, headers: Mapping[str, str]) -> Key | None:
    """The request's key; None where none is needed. RequestError unless it reaches `path`: the ASGI scope's, which no
    header can change.

    Every key is compared, in constant time, so that the time says nothing of how close a guess was.
    """
    if not keys or path in PUBLIC:
        return None
    kind, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
    digest = hashlib.sha256(given.encode("latin-1")).digest()
    same = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    if not same:
        said = "Incorrect API key." if given else "No API key: send the header `Authorization: Bearer KEY`."
        raise RequestError(said, status=401, code="invalid_api_key")
    if not any(key.reaches(path) for key in same):
        raise RequestError("This API key may not use this route.", status=403, code="forbidden")
    return same[0]
