"""What is scored: tokens of a file, of a data set, of a logits file, or of the reference's own making."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.config import EngineConfig
from llmx.errors import UsageError
from llmx.formats.hub import Located, cache_dir
from llmx.report import write_whole

if TYPE_CHECKING:
    from llmx.evals.scoring import Say, Scorer
    from llmx.tokenizer import Tokenizer

GENERATED_WINDOWS = 8  # unless --chunks says otherwise


@dataclass(frozen=True)
class Text:
    """tokens: all of them. about: what the report says of it."""

    tokens: Sequence[int]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A text that somebody wrote, not yet tokens. `source`: "file" or "dataset"."""

    source: str
    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_file(path: Path) -> Written:
    """UsageError for a file that is absent, empty or not UTF-8. Line ends stay as they are."""
    try:
        return Written("file", str(path), decode(path.read_bytes(), str(path)))
    except OSError as error:
        raise UsageError(f"The text {path} can't be read: {error.strerror}.") from error


def decode(data: bytes, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: byte {error.start} can't be read.") from error
    if not text.strip():
        raise UsageError(f"{name} holds no text.")
    return text


def sha256_of(tokens: Sequence[int]) -> str:
    """Of a text that is known by its tokens alone: of their ids in decimal, with commas between."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


def bos_of(tokenizer: Tokenizer | None) -> int | None:
    """The token that the model wants in front of a text, if any."""
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def tokenise(written: Written, tokenizer: Tokenizer | None, protocol: str, name: str) -> Text:
    """As llama-perplexity does: control tokens in the text are plain text, BOS in front if the model adds it, and by
    its protocol one newline at the end is dropped."""
    if tokenizer is None:
        raise UsageError(f"{name} has no tokenizer.", hint="leave --text out: it then scores tokens of its own making")
    content = written.content.removesuffix("\n") if protocol == "llama.cpp" else written.content
    bos = bos_of(tokenizer)
    ids = tokenizer.encode(content, add_special=False, parse_special=False)
    tokens = ids if bos is None else [bos, *ids]
    size = len(written.content.encode())
    about = {"source": written.source, "name": written.name, "sha256": written.sha256, "bytes": size}
    return Text(tokens, about)


def generate(
    scorer: Scorer, config: EngineConfig, located: Located | None, tokenizer: Tokenizer | None, windows: int, seed: int,
    say: Say | None,
) -> Text:  # fmt: skip
    """`windows` windows of texts by the model itself (`Scorer.write`), kept in the cache: the same call finds them."""
    eos = frozenset() if tokenizer is None else tokenizer.eos_ids
    start = 0 if tokenizer is None else tokenizer.bos_id if tokenizer.bos_id is not None else min(eos, default=0)
    total = windows * scorer.protocol.ctx
    path = cache_dir() / "evals" / f"{_key(config, located, scorer, total, seed, start)}.json"
    tokens = _kept(path, total)
    if cached := tokens is not None:
        assert tokens is not None
    else:
        tokens = scorer.write(start, eos, total, seed, say)
        with contextlib.suppress(OSError):  # nobody needs it to be kept
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(tokens))
    about = {
        "source": "generated",
        "name": f"tokens drawn by {config.model} at temperature 1, from token {start} on",
        "sha256": sha256_of(tokens),
        "seed": seed,
        "cached": cached,
    }
    return Text(tokens, about)


def _key(config: EngineConfig, located: Located | None, scorer: Scorer, total: int, seed: int, start: int) -> str:
    """Of all that the tokens depend on."""
    info = scorer.info
    files: list[Path] = []
    if located is not None:
        files = sorted(p for p in located.path.iterdir() if p.is_file()) if located.path.is_dir() else [located.path]
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    what = [config.model, str(info.path), stamps, info.dtype, info.kv_cache_dtype, info.device.split(":")[0], total]
    what += [info.activations, seed, start, config.seed, scorer.protocol.ctx, dict(info.kernels)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _kept(path: Path, total: int) -> list[int] | None:
    try:
        tokens = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(tokens, list) and len(tokens) == total and all(type(t) is int and t >= 0 for t in tokens)
    return tokens if whole else None
