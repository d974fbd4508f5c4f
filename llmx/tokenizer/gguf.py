"""Byte-level BPE from a GGUF file's metadata, split into words as llama.cpp does (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llmx.errors import UsageError
from llmx.templates import ChatTemplate
from llmx.tokenizer.pieces import Spelling
from llmx.tokenizer.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {  # name in the file -> regular expressions, each applied to what the ones before left whole
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3.replace("DIGITS", "{1,3}"),),
    "qwen2": (_LLAMA3.replace("DIGITS", ""),),
}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
# A file names one end token; a model may have more of them, which only their texts tell.
_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys describe; UsageError names `where` and the key that is wrong."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise UsageError(f"{where}: tokenizer model {model!r} is not built; built is 'gpt2' (byte-level BPE).")
    if pre not in SPLITS:
        raise UsageError(f"{where}: pre-tokenizer {pre!r} is not built; built are {', '.join(SPLITS)}.")
    tokens = _texts(metadata, "tokenizer.ggml.tokens", where)
    kinds = _kinds(metadata, len(tokens), where)
    backend = _build(tokens, _merges(metadata, where), pre, where)
    backend.add_special_tokens([_added(t, True) for t, kind in zip(tokens, kinds, strict=True) if kind in (2, 3)])
    backend.add_tokens([_added(t, False) for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED])
    ids = {name: _id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens), where) for name in _IDS}
    ends = {ids[name] for name in ("eos", "eot", "eom")} - {None}
    ends |= {i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL and t in _ENDS}
    specials = {f"{name}_token": tokens[i] for name, key in _SPECIALS.items() if (i := ids[key]) is not None}
    return Tokenizer(
        backend,
        Spelling(byte_level=True),
        bos_id=ids["bos"],
        eos_ids=[i for i in ends if i is not None],
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token", pre == "llama-bpe", where),
        template=_template(metadata, specials, where),
    )


_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _added(text: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def _build(tokens: list[str], merges: list[tuple[str, str]], pre: str, where: str) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise UsageError(f"{where}: tokenizer.ggml.tokens has {twice[:40]!r} twice.")
    try:
        # Llama 3 takes a word that is in the vocabulary as it is, whatever the merges would make of it.
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise UsageError(f"{where}: tokenizer.ggml.merges don't fit the tokens: {str(error)[:200]}.") from None
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _texts(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if value is None or isinstance(value, str | bytes | int | float):
        raise UsageError(f"{where}: {key} is missing or is no list.")
    texts = list(value)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: {key} must be a list of texts that isn't empty.")
    return texts


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = []
    for line in _texts(metadata, "tokenizer.ggml.merges", where):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise UsageError(f"{where}: tokenizer.ggml.merges has {line[:40]!r}, which is not two tokens.")
        merges.append((left, right))
    return merges


def _kinds(metadata: Mapping[str, Any], count: int, where: str) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    kinds = [1] * count if value is None else [int(kind) for kind in value]
    if len(kinds) != count:
        raise UsageError(f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for {count} tokens.")
    return kinds


def _id(metadata: Mapping[str, Any], key: str, count: int, where: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise UsageError(f"{where}: {key} must be below the {count} tokens, not {str(value)[:40]}.")
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {key} must be true or false, not {str(value)[:40]}.")
    return value


def _template(metadata: Mapping[str, Any], specials: Mapping[str, str], where: str) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise UsageError(f"{where}: tokenizer.chat_template must be a text.")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, str)}
    return ChatTemplate(source, specials, named=named)
