"""The tokenizer that everything above sees, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmx.errors import RequestError
from llmx.tokenizer.pieces import Pieces, Spelling, Stream

if TYPE_CHECKING:
    import tokenizers

    from llmx.templates import ChatTemplate


class Tokenizer:
    """Text <-> token ids.

    vocab_size: one more than the highest id (a model's logits may have more, padded, rows). bos_id: the token that
    begins a text, if any; add_bos: whether prompts get it. eos_ids: tokens that end a text. special_ids: control
    tokens, which `decode` leaves out by default. template: the model's chat template, if it has one.

    Encoding may be called from several threads at once.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        """`add_bos=None`: as the backend's post-processor does. The backend is the tokenizer's own from here on."""
        backend.no_truncation()  # a saved limit would silently cut long prompts
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._plain: tokenizers.Tokenizer | None = None  # the same, reading special tokens in a text as plain text
        self._pieces = Pieces(spelling, backend.id_to_token, {i: token.content for i, token in added.items()})
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.template = template
        prefix, self._suffix = self._frame()
        self.add_bos = bos_id is not None and (bos_id in prefix if add_bos is None else add_bos)
        self._prefix = [i for i in prefix if i != bos_id]
        if self.add_bos and bos_id is not None:
            self._prefix.insert(0, bos_id)

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special: put BOS in front (exactly once: not if the text already begins with it) and whatever else the model
        wants around a text. parse_special: control tokens written out in the text (`<|im_end|>`) are read as those
        tokens; without it they are plain text, as for what users type into a prompt that is put together by hand.
        RequestError if the text holds half of a surrogate pair.
        """
        backend = self._backend if parse_special else self._without_special()
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise RequestError(_not_text(text), param="prompt") from None
        if not add_special:
            return ids
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if self._suffix and ids[-len(self._suffix) :] != self._suffix:
            ids = ids + self._suffix
        return ids

    def _without_special(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            plain = type(self._backend).from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of some tokens, from a text's beginning. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream((), skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> Stream:
        """Incremental decoding of what follows a prompt; see `Stream`."""
        return Stream(self._pieces, prompt_ids, self.special_ids if skip_special else frozenset())

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
