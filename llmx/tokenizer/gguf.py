"""Tokenizers from a GGUF file's metadata: byte-level BPE, and SentencePiece BPE (as llama.cpp's llama-vocab.cpp)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llmx.errors import UsageError
from llmx.formats.fields import Fields, shown
from llmx.templates import ChatTemplate
from llmx.tokenizer.backends import Backend
from llmx.tokenizer.pieces import Spelling
from llmx.tokenizer.splits import SPLITS, Split
from llmx.tokenizer.spm import SPACE, SpmBackend
from llmx.tokenizer.tokenizer import Tokenizer

_KEY, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
# A file names one end token; a model may have more of them, which only their texts tell.
ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
}
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # what a SentencePiece vocabulary has if its file doesn't say


def from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys describe; UsageError names `where` and the key that is wrong."""
    fields = Fields(metadata, where)
    if (model := fields.text(_KEY + "model")) not in ("gpt2", "llama"):
        built = "built are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
        raise UsageError(f"{where}: tokenizer model {model!r} is not built; {built}.")
    spm = model == "llama"
    split = None if spm else _split(fields, where)
    tokens = fields.strings(_KEY + "tokens")
    kinds = fields.integers(_KEY + "token_type", (_NORMAL,) * len(tokens))
    if len(kinds) != len(tokens) or not tokens:
        raise UsageError(f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens.")
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise UsageError(f"{where}: tokenizer.ggml.tokens has {shown(twice)} twice.")
    ids = _ids(fields, len(tokens), spm)
    added = _added(tokens, kinds, fields.text("general.name", ""))
    prefix = spm and fields.boolean(_KEY + "add_space_prefix", True)
    backend: Backend | tokenizers.Tokenizer
    if split is None:
        scores = _scores(fields, len(tokens), where)
        backend = SpmBackend(tokens, scores, added, prefix=prefix, unknown=ids["unknown"] or 0)
        strip = (" ", 1) if prefix else ("", 0)
        spelling = Spelling(replace=((SPACE, " "),), byte_fallback=True, strip=strip[0], strip_most=strip[1])
    else:
        backend = _byte_level(tokens, fields.strings(_KEY + "merges"), split, added, where)
        spelling = Spelling(byte_level=True)
    ends = {ids["eos"], ids["eot"], ids["eom"]}
    ends |= {i for i, token in added if token.special and token.content in ENDS}
    specials = {name: tokens[i] for name, key in _SPECIALS.items() if (i := ids[key]) is not None}
    eos_id = ids["eos"] if fields.boolean(_KEY + "add_eos_token", False) else None
    return Tokenizer(
        backend,
        spelling,
        bos_id=ids["bos"],
        eos_ids=[i for i in ends if i is not None],
        add_bos=fields.boolean(_KEY + "add_bos_token", split is None or split.add_bos),
        suffix=[] if eos_id is None else [eos_id],
        template=_template(fields, specials),
        specials=specials,
    )


def _split(fields: Fields, where: str) -> Split:
    if (pre := fields.text(_KEY + "pre", "default")) not in SPLITS:
        raise UsageError(f"{where}: pre-tokenizer {pre!r} is not built; built are {', '.join(SPLITS)}.")
    return SPLITS[pre]


def _ids(fields: Fields, count: int, spm: bool) -> dict[str, int | None]:
    ids = {name: fields.integer(f"{_KEY}{name}_token_id", None, low=0, high=count - 1) for name in _IDS}
    if spm:
        ids |= {name: i for name, i in _SPM_IDS.items() if ids[name] is None and i < count}
    return ids


def _scores(fields: Fields, count: int, where: str) -> tuple[float, ...]:
    scores = fields.numbers(_KEY + "scores")
    if len(scores) != count:
        raise UsageError(f"{where}: tokenizer.ggml.scores has {len(scores)} entries for {count} tokens.")
    return scores


def _added(tokens: Sequence[str], kinds: Sequence[int], name: str) -> list[tuple[int, tokenizers.AddedToken]]:
    """The tokens that are found in a text as they are written: control and unknown ones, and user-defined ones."""
    # A file doesn't say that Phi-3's tokens swallow the spaces after them; llama.cpp knows it by the model's name too.
    phi3 = any(part in name.lower() for part in ("phi-3", "phi3"))
    added = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            strips = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            special = kind != _USER_DEFINED
            added.append((i, tokenizers.AddedToken(token, special=special, normalized=False, rstrip=strips)))
    return added


def _byte_level(
    tokens: Sequence[str],
    merges: Sequence[str],
    split: Split,
    added: Sequence[tuple[int, tokenizers.AddedToken]],
    where: str,
) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(line, where) for line in merges]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words)
    except Exception as error:
        raise UsageError(f"{where}: tokenizer.ggml.merges don't fit the tokens: {str(error)[:200]}.") from None
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in split.regexes]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for _, token in added if token.special])
    backend.add_tokens([token for _, token in added if not token.special])
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
