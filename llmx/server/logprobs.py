"""Log-probabilities in OpenAI's two shapes: a list of objects for chats, parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llmx.core import Logprob

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON can't say


class TokenTexts:
    """How tokens are shown. A special token that the text leaves out has no bytes: all bytes join to the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special else frozenset()

    def token(self, token: int) -> str:
        return self.tokenizer.token(token)

    def bytes(self, token: int) -> bytes:
        return b"" if token in self.skipped else self.tokenizer.piece(token)

    def entry(self, token: int, value: float) -> dict[str, Any]:
        raw = None if token in self.skipped else list(self.tokenizer.piece(token))
        return {"token": self.token(token), "logprob": finite(value), "bytes": raw}


def finite(value: float) -> float:
    """A logarithm as JSON can carry it."""
    return max(value, LEAST)


def chat_logprobs(logprobs: Iterable[Logprob], texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = []
    for logprob in logprobs:
        top = [texts.entry(token, value) for token, value in logprob.top]
        content.append({**texts.entry(logprob.token, logprob.value), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, piece by piece: `text_offset` goes on where the last piece ended."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.offset = 0  # characters
        self.decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def add(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, Any]:
        """The lists for `tokens`; None is the first token of a prompt, which nothing comes before."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(self.decoder.decode(self.texts.bytes(token)))
        return {
            "tokens": [self.texts.token(token) for token in tokens],
            "token_logprobs": [None if logprob is None else finite(logprob.value) for logprob in logprobs],
            "top_logprobs": [None if logprob is None else self._top(logprob) for logprob in logprobs],
            "text_offset": offsets,
        }

    def _top(self, logprob: Logprob) -> dict[str, float]:
        """By text: where two tokens look the same, the likelier one stays. The chosen token is always there."""
        shown: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token, logprob.value)):
            shown.setdefault(self.texts.token(token), finite(value))
        return shown


def prompt_logprobs(logprobs: Sequence[Logprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token {token id: {logprob, rank, decoded_token}}; rank null: not among the top."""

    def shape(logprob: Logprob) -> dict[str, Any]:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top, 1)]
        shown: dict[str, Any] = {}
        for token, value, rank in (*ranked, (logprob.token, logprob.value, None)):
            shown.setdefault(str(token), {"logprob": finite(value), "rank": rank, "decoded_token": texts.token(token)})
        return shown

    return [None if logprob is None else shape(logprob) for logprob in logprobs]
