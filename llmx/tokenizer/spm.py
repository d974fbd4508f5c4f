"""SentencePiece BPE from a list of tokens with scores, exactly as llama.cpp and SentencePiece merge them.

Not through the tokenizers library: its merges are ranked pairs, of which a vocabulary of 262,144 tokens has 514,847
(many seconds to make at each start), and pairs that give equally good tokens can't share a rank there.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import tokenizers
from tokenizers import models

SPACE = "\u2581"  # what a space is inside tokens
_LONG = 48  # characters from which on a word is cut further, and not kept


class SpmBackend:
    """Greedy merging of neighbours: the pair that makes the token with the highest score, the leftmost of equals.

    prefix: a space is put before each stretch of text, as SentencePiece's add_dummy_prefix does. A character that is no
    token becomes its bytes' tokens `<0xNN>`, or `unknown` if the vocabulary lacks one of them. tokens, scores,
    added_tokens, prefix, unknown: as they were given.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        added: Sequence[tuple[int, tokenizers.AddedToken]],
        *,
        prefix: bool,
        unknown: int,
    ) -> None:
        self.tokens = tokens
        self.scores = scores
        self.prefix, self._prefix = prefix, SPACE if prefix else ""
        self.added_tokens = tuple(added)
        self.unknown = unknown
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._bytes = [self._ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._splitter = _splitter(len(tokens), added)
        self._plain_splitter = _splitter(len(tokens), [pair for pair in added if not pair[1].special])
        self._words = _words(tokens)
        self._known = lru_cache(maxsize=1 << 16)(self._merge)
        self.vocab_size = len(tokens)
        self.added: Mapping[int, str] = {i: token.content for i, token in added}
        self.special_ids = frozenset(i for i, token in added if token.special)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        found = (self._splitter if parse_special else self._plain_splitter).encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token_id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if token_id < self.vocab_size:
                ids.append(token_id)
                continue
            for word in self._words.findall(self._prefix + text[start:stop].replace(" ", SPACE)):
                if len(word) < _LONG:
                    ids += self._known(word)
                else:
                    for part in self._cut(word):
                        ids += self._known(part) if len(part) < _LONG else self._merge(part)
        return ids

    def token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def frame(self) -> tuple[list[int], list[int]]:
        return [], []

    @cached_property
    def _neighbours(self) -> frozenset[str]:
        """Every two characters that stand next to each other in some token."""
        return frozenset(token[n : n + 2] for token in self.tokens for n in range(len(token) - 1))

    def _cut(self, word: str) -> Iterator[str]:
        """A long word in parts over whose borders no merge can reach."""
        start, neighbours = 0, self._neighbours
        for n in range(1, len(word)):
            if word[n - 1 : n + 1] not in neighbours:
                yield word[start:n]
                start = n
        yield word[start:]

    def _merge(self, word: str) -> tuple[int, ...]:
        count = len(word)
        ends = list(range(1, count + 1))  # a symbol is word[start:ends[start]]; the next one starts where it ends
        before = list(range(-1, count))  # where the symbol before it starts; -1: none, or merged away
        queue: list[tuple[float, int, int, int]] = []
        ids, scores = self._ids, self.scores

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < count and (token := ids.get(word[left : ends[right]])) is not None:
                heapq.heappush(queue, (-scores[token], left, right, ends[right]))

        for n in range(1, count):
            offer(n - 1, n)
        while queue:
            _, left, right, end = heapq.heappop(queue)
            if before[right] != left or ends[right] != end:
                continue  # one of the two has grown, or is gone
            before[right], ends[left] = -1, end
            before[end] = left
            offer(before[left], left)
            offer(left, end)
        return tuple(self._symbols(word, ends))

    def _symbols(self, word: str, ends: Sequence[int]) -> Iterator[int]:
        start = 0
        while start < len(word):
            symbol = word[start : ends[start]]
            start = ends[start]
            if (token := self._ids.get(symbol)) is not None:
                yield token
                continue
            spelled = [self._bytes[byte] for byte in symbol.encode()]
            yield from [i for i in spelled if i is not None] if None not in spelled else [self.unknown]


def _words(tokens: Sequence[str]) -> re.Pattern[str]:
    """Cuts a text before its spaces; not where a token has a space after such a character, as Gemma's `>▁</`."""
    inside = set(re.findall(f"[^{SPACE}](?={SPACE})", "\0".join(tokens)))
    glued = "".join(map(re.escape, sorted(inside | {"\0"})))
    return re.compile(f"{SPACE}+(?:[^{SPACE}]+|(?<=[{glued}]){SPACE}+)*|(?:[^{SPACE}]+|(?<=[{glued}]){SPACE}+)+")


def _splitter(vocab_size: int, added: Sequence[tuple[int, tokenizers.AddedToken]]) -> tokenizers.Tokenizer:
    """Finds added tokens, the leftmost and longest; every stretch between them gets the id `vocab_size`."""
    vocab = {token.content: i for i, token in added}
    between = "text"
    while between in vocab:
        between += "_"
    splitter = tokenizers.Tokenizer(models.WordLevel(vocab=vocab | {between: vocab_size}, unk_token=between))
    splitter.add_special_tokens([token for _, token in added if token.special])
    splitter.add_tokens([token for _, token in added if not token.special])
    return splitter
