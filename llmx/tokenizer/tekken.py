"""A directory that has Mistral's tekken.json: byte-level BPE by the order of its tokens, which tells what merges."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from llmx.errors import UsageError
from llmx.formats.fields import Fields, load_json
from llmx.tokenizer.pieces import BYTE_ALPHABET

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_SPELLED = {byte: character for character, byte in BYTE_ALPHABET.items()}
LIMIT = 1 << 28  # bytes of a file: those of 131,072 tokens have 20 MB


def from_tekken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, with BOS before a text, and its named special tokens.

    Special tokens come first, padded to `default_num_special_tokens`; a token's number is its place after them. What
    merges is what a vocabulary ordered by merging implies: of a token's halves, those that came first. UsageError for a
    file that is broken, or of the first version, which does not list its special tokens.
    """
    said = load_json(file, LIMIT)
    config = said.section("config")
    special = _special(said, config)
    size = config.integer("default_vocab_size", 2**22, low=len(special) + 256) - len(special)
    ranks = _ranks(said, size)
    vocab = {token: i for i, token in enumerate(special)}
    vocab |= {_spelled(token): rank + len(special) for token, rank in ranks.items()}
    if len(vocab) != len(special) + len(ranks):
        raise UsageError(f"{file.name}: a special token and another are the same text.")
    merges = [(_spelled(left), _spelled(right)) for left, right in _merges(ranks)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    try:
        cut = pre_tokenizers.Split(tokenizers.Regex(config.text("pattern")), "isolated")
    except Exception as error:
        raise UsageError(f"{file.name}: config.pattern is no regular expression: {str(error)[:200]}.") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    named = {key: token for key, token in NAMED.items() if token in special}
    if (begin := named.get("bos_token")) is not None:
        pairs = [(begin, special.index(begin))]
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=pairs)
    return backend, named


def _special(said: Fields, config: Fields) -> list[str]:
    listed = said.data.get("special_tokens")
    if not isinstance(listed, list):
        raise UsageError(
            f"{said.where} lists no special tokens, as its first version did not; that isn't read.",
            hint="Put the model's tokenizer.json beside it.",
        )
    found: dict[int, str] = {}
    for i, token in enumerate(listed):
        fields = _fields(token, f"{said.where}: special_tokens[{i}]")
        found[fields.integer("rank", low=0)] = fields.text("token_str")
    count = config.integer("default_num_special_tokens", len(found), low=len(found), high=2**16)
    if len(found) != len(listed) or any(rank >= len(found) for rank in found):
        raise UsageError(f"{said.where}: special_tokens must have the ranks 0 to {len(listed) - 1}, each once.")
    return [found.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _ranks(said: Fields, most: int) -> dict[bytes, int]:
    """The first `most` tokens, in order: the file has more than its models."""
    listed = said.data.get("vocab")
    if not isinstance(listed, list):
        raise UsageError(f"{said.where}: vocab must be a list of tokens.")
    ranks: dict[bytes, int] = {}
    for i, token in enumerate(listed[:most]):
        try:
            ranks.setdefault(base64.b64decode(token["token_bytes"], validate=True), i)
        except (TypeError, KeyError, ValueError, binascii.Error):
            raise UsageError(f"{said.where}: vocab[{i}] has no token_bytes in base 64.") from None
        if len(ranks) != i + 1:
            raise UsageError(f"{said.where}: vocab[{i}] is a token that was there before.")
    if missing := next((byte for byte in range(256) if bytes([byte]) not in ranks), None):
        raise UsageError(f"{said.where}: the vocabulary has no token for the byte {missing}.")
    return ranks


def _fields(value: Any, where: str) -> Fields:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be an object.")
    return Fields(value, where)


def _spelled(token: bytes) -> str:
    return "".join(_SPELLED[byte] for byte in token)


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
