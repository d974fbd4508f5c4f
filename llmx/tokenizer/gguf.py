"""Byte-level BPE from a GGUF file's metadata, split into words as llama.cpp does (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llmx.errors import UsageError
from llmx.formats.fields import Fields, shown
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
_KEY, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
# A file names one end token; a model may have more of them, which only their texts tell.
_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys describe; UsageError names `where` and the key that is wrong."""
    fields = Fields(metadata, where)
    if (model := fields.text(_KEY + "model")) != "gpt2":
        raise UsageError(f"{where}: tokenizer model {model!r} is not built; built is 'gpt2' (byte-level BPE).")
    if (pre := fields.text(_KEY + "pre", "default")) not in SPLITS:
        raise UsageError(f"{where}: pre-tokenizer {pre!r} is not built; built are {', '.join(SPLITS)}.")
    tokens = fields.strings(_KEY + "tokens")
    kinds = fields.integers(_KEY + "token_type", (_NORMAL,) * len(tokens))
    if len(kinds) != len(tokens) or not tokens:
        raise UsageError(f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens.")
    backend = _build(tokens, fields.strings(_KEY + "merges"), pre, where)
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([_added(token, True) for token, kind in pairs if kind in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([_added(token, False) for token, kind in pairs if kind == _USER_DEFINED])
    ids = {name: fields.integer(f"{_KEY}{name}_token_id", None, low=0, high=len(tokens) - 1) for name in _IDS}
    ends = {ids["eos"], ids["eot"], ids["eom"]}
    ends |= {i for i, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _ENDS}
    specials = {name: tokens[i] for name, key in _SPECIALS.items() if (i := ids[key]) is not None}
    return Tokenizer(
        backend,
        Spelling(byte_level=True),
        bos_id=ids["bos"],
        eos_ids=[i for i in ends if i is not None],
        add_bos=fields.boolean(_KEY + "add_bos_token", pre == "llama-bpe"),
        template=_template(fields, specials),
    )


def _added(text: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def _build(tokens: Sequence[str], merges: Sequence[str], pre: str, where: str) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise UsageError(f"{where}: tokenizer.ggml.tokens has {shown(twice)} twice.")
    pairs = [_pair(line, where) for line in merges]
    try:
        # Llama 3 takes a word that is in the vocabulary as it is, whatever the merges would make of it.
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise UsageError(f"{where}: tokenizer.ggml.merges don't fit the tokens: {str(error)[:200]}.") from None
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(line: str, where: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise UsageError(f"{where}: tokenizer.ggml.merges has {shown(line)}, which is not two tokens.")
    return left, right


def _template(fields: Fields, specials: Mapping[str, str]) -> ChatTemplate | None:
    source = fields.text(_TEMPLATE, None)
    if source is None:
        return None
    prefix = _TEMPLATE + "."
    named = {key.removeprefix(prefix): fields.text(key) for key in fields.keys() if key.startswith(prefix)}  # noqa: SIM118
    return ChatTemplate(source, specials, named=named)
