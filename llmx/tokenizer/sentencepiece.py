"""A directory that has only SentencePiece's tokenizer.model, converted by transformers where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import tokenizers

from llmx.errors import UsageError

_NEEDED = {"transformers": "transformers", "sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


def from_sentencepiece(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The converted tokenizer, with BOS and EOS around texts as the directory wants it, and its named special tokens.

    UsageError if a package that the conversion needs is missing, or if transformers can't convert the file.
    """
    file = folder / "tokenizer.model"
    if missing := [package for module, package in _NEEDED.items() if not _installed(module)]:
        raise UsageError(
            f"{folder} has no tokenizer.json, and to convert its tokenizer.model {' and '.join(missing)} must be"
            " installed.",
            hint=f"Run: pip install {' '.join(missing)}",
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = converted.backend_tokenizer
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200].rstrip(".") or type(error).__name__
        raise UsageError(f"{file} can't be converted by transformers: {reason}.") from None
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UsageError(f"{file} can't be converted: transformers has no fast tokenizer for it.")
    named = {key: str(token) for key, token in converted.special_tokens_map.items() if isinstance(token, str)}
    return backend, named


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False
