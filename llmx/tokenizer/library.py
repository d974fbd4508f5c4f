"""A tokenizer as the tokenizers library has it, which is what a tokenizer.json holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from llmx.tokenizer.backends import LibraryBackend
from llmx.tokenizer.spm import SPACE, SpmBackend
from llmx.tokenizer.tokenizer import Tokenizer


def to_library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A new one that gives the same ids, what stands around a text too (which it puts there always, not once)."""
    backend = tokenizer.backend
    if isinstance(backend, SpmBackend):
        made = _sentencepiece(backend)
    else:
        assert isinstance(backend, LibraryBackend)
        made = tokenizers.Tokenizer.from_str(backend.inner.to_str())
    prefix, suffix = tokenizer.frame
    if prefix or suffix:
        around = {tokenizers_id: made.id_to_token(tokenizers_id) for tokenizers_id in (*prefix, *suffix)}
        before, after = ([around[i] for i in ids] for ids in (prefix, suffix))
        made.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, i) for i, token in around.items()],
        )
    return made


def _sentencepiece(backend: SpmBackend) -> tokenizers.Tokenizer:
    """Merges of pairs, ranked by the score of what they make; of one token's, the one with the longer left half first,
    as transformers' converter does."""
    tokens = backend.tokens
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(
        vocab=vocab, merges=_merges(tokens, backend.scores, vocab), unk_token=tokens[backend.unknown], fuse_unk=False,
        byte_fallback=True,
    )  # fmt: skip
    made = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if backend.prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if backend.prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens([token for _, token in backend.added_tokens if token.special])
    made.add_tokens([token for _, token in backend.added_tokens if not token.special])
    return made


def _merges(tokens: Sequence[str], scores: Sequence[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    def pairs() -> Iterator[tuple[float, int, int, str, str]]:
        for i, token in enumerate(tokens):
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    yield -scores[i], -cut, i, left, right

    return [(left, right) for *_, left, right in sorted(pairs())]
