"""What turns text into ids under `Tokenizer`: the protocol, and the one that the tokenizers library runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers


class Backend(Protocol):
    """vocab_size: one more than the highest id. added: the tokens that are found in a text before anything else, as
    they are written. special_ids: those of them that `parse_special=False` reads as plain text."""

    vocab_size: int
    added: Mapping[int, str]
    special_ids: frozenset[int]

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids, nothing put around them. TypeError if the text is no Unicode text."""

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None, or OverflowError, if there is none."""

    def frame(self) -> tuple[list[int], list[int]]:
        """What the backend itself would put before and after a text."""


class LibraryBackend:
    """A `tokenizers.Tokenizer`, which is the backend's own from here on."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # a saved limit would silently cut long prompts
        inner.no_padding()
        added = inner.get_added_tokens_decoder()
        self.inner = inner
        self._plain: tokenizers.Tokenizer | None = None  # the same, reading special tokens in a text as plain text
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.added: Mapping[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        inner = self.inner if parse_special else self._without_special()
        ids: list[int] = inner.encode(text, add_special_tokens=False).ids
        return ids

    def token(self, token_id: int) -> str | None:
        token: str | None = self.inner.id_to_token(token_id)
        return token

    def frame(self) -> tuple[list[int], list[int]]:
        """As the post-processor does."""
        bare = self.inner.encode("a", add_special_tokens=False).ids
        whole = self.inner.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    def _without_special(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            plain = type(self.inner).from_str(self.inner.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain
