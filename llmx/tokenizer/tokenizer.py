"""The tokenizer that everything above sees, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import tokenizers

from llmx.errors import RequestError
from llmx.tokenizer.backends import Backend, LibraryBackend
from llmx.tokenizer.pieces import Pieces, Spelling, Stream

if TYPE_CHECKING:
    from llmx.templates import ChatTemplate

NOTHING: Mapping[str, str] = MappingProxyType({})


class Tokenizer:
    """Text <-> token ids.

    vocab_size: one more than the highest id (a model's logits may have more, padded, rows). bos_id: the token that
    begins a text, if any; add_bos: whether prompts get it. eos_ids: tokens that end a text. special_ids: control
    tokens, which `decode` leaves out by default. template: the model's chat template, if it has one. specials: tokens
    by transformers' names for them ("bos_token"). backend: what makes ids of a text.

    Encoding may be called from several threads at once.
    """

    def __init__(
        self,
        backend: Backend | tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        suffix: Sequence[int] | None = None,
        template: ChatTemplate | None = None,
        specials: Mapping[str, str] = NOTHING,
    ) -> None:
        """`add_bos=None` and `suffix=None` (what comes after a text): as the backend's `frame` has it.

        A `tokenizers.Tokenizer` is the tokenizer's own from here on.
        """
        self.backend = LibraryBackend(backend) if isinstance(backend, tokenizers.Tokenizer) else backend
        self._pieces = Pieces(spelling, self.backend.token, self.backend.added)
        self.vocab_size = self.backend.vocab_size
        self.special_ids = self.backend.special_ids
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.template = template
        self.specials = dict(specials)
        prefix, after = self.backend.frame()
        self._suffix = after if suffix is None else list(suffix)
        self.add_bos = bos_id is not None and (bos_id in prefix if add_bos is None else add_bos)
        self._prefix = [i for i in prefix if i != bos_id]
        if self.add_bos and bos_id is not None:
            self._prefix.insert(0, bos_id)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """What `encode` puts before and after a text."""
        return list(self._prefix), list(self._suffix)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special: put BOS in front (exactly once: not if the text already begins with it) and whatever else the model
        wants around a text. parse_special: control tokens written out in the text (`<|im_end|>`) are read as those
        tokens; without it they are plain text, as for what users type into a prompt that is put together by hand.
        RequestError if the text holds half of a surrogate pair.
        """
        try:
            ids = self.backend.encode(text, parse_special)
        except TypeError:
            raise RequestError(_not_text(text), param="prompt") from None
        if not add_special:
            return ids
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if self._suffix and ids[-len(self._suffix) :] != self._suffix:
            ids = ids + self._suffix
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of some tokens, from a text's beginning. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream((), skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, prompt_ids: Sequence[int] = (), skip_special: bool = True, visible: Iterable[int] = ()) -> Stream:
        """Incremental decoding of what follows a prompt; see `Stream`. visible: special tokens that aren't skipped."""
        return Stream(self._pieces, prompt_ids, self.special_ids.difference(visible) if skip_special else frozenset())

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text, perhaps part of a character; b"" for an unknown id."""
        return self._pieces[token_id]

    def token(self, token_id: int) -> str:
        """A token in print, as OpenAI's API has it: its text, or `bytes:\\xe2\\x82` for a part of a character."""
        piece = self._pieces[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _not_text(text: object) -> str:
    if not isinstance(text, str):
        return f"A prompt must be a text, not {type(text).__name__}."
    at = next((n for n, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return f"The text has half of a surrogate pair (U+{ord(text[at]):04X}) at character {at}: it is no Unicode text."
