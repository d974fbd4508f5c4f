"""The bytes that each token stands for, and decoding token by token without ever breaking a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmx.errors import UsageError


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that Latin-1 prints stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """How token strings spell text: the decoder of a `tokenizer.json`, as data.

    byte_level: each character is a byte of `BYTE_ALPHABET`. replace: (what stands in the token, what it means), in
    order. byte_fallback: `<0xE2>` is that byte. strip, strip_most: a character, and how many of it the whole text loses
    at its beginning. first_loses: a character that the first token loses wherever it is (the `Metaspace` decoder).
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_most: int = 0
    first_loses: str = ""

    def piece(self, token: str) -> bytes:
        """The bytes of an ordinary token."""
        if self.byte_level:
            spelled = [BYTE_ALPHABET.get(character, -1) for character in token]
            return token.encode() if -1 in spelled else bytes(spelled)
        for written, meant in self.replace:
            token = token.replace(written, meant)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # something like <0xZZ>: plain text
        return token.encode()


def read_spelling(decoder: Any, where: str) -> Spelling:
    """The `decoder` entry of a tokenizer.json; UsageError for one that is not built."""
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = str(steps[0].get("replacement", "▁"))
        scheme = steps[0].get("prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never")
        return Spelling(replace=((mark, " "),), first_loses="" if scheme == "never" else mark)
    known = bool(kinds) and all(kind in order for kind in kinds)
    if not known or sorted(kinds, key=order.index) != kinds or ("Strip" in kinds and "Fuse" not in kinds):
        raise UsageError(f"{where}: the decoder {' + '.join(kinds) or 'null'} is not built.", hint=_BUILT)
    replace = tuple(_replacement(step, where) for step in steps if step["type"] == "Replace")
    strips = [step for step in steps if step["type"] == "Strip"]
    if len(strips) > 1 or any(step.get("stop") for step in strips):
        raise UsageError(f"{where}: a decoder that strips the end of a text is not built.", hint=_BUILT)
    strip, most = (str(strips[0].get("content", " ")), int(strips[0].get("start", 0))) if strips else ("", 0)
    return Spelling(replace=replace, byte_fallback="ByteFallback" in kinds, strip=strip, strip_most=most)


_BUILT = "Built are ByteLevel, Metaspace, and Replace + ByteFallback + Fuse + Strip as Llama 2 has it."


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [inner for step in decoder.get("decoders", []) for inner in _steps(step)]


def _replacement(step: Mapping[str, Any], where: str) -> tuple[str, str]:
    pattern, content = step.get("pattern"), step.get("content")
    written = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(written, str) or not written or not isinstance(content, str):
        raise UsageError(f"{where}: a decoder that replaces by a regular expression is not built.", hint=_BUILT)
    return written, content


class Pieces:
    """Token id -> bytes, looked up once per id. An id that the vocabulary lacks (a padded row) stands for nothing."""

    def __init__(self, spelling: Spelling, token_of: Callable[[int], str | None], added: Mapping[int, str]) -> None:
        self.spelling = spelling
        self._token_of = token_of
        self._added = added
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and self.spelling.byte_level:
            return added.encode()  # an added token is literal text, not spelled in the byte alphabet
        try:
            token = self._token_of(token_id)
        except OverflowError:  # negative, or beyond 32 bits
            token = None
        return b"" if token is None else self.spelling.piece(token)

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text, before `Spelling.strip`."""
        lost = self.spelling.first_loses
        token = self._token_of(token_id) if lost and self[token_id] else None
        return self[token_id] if token is None else self.spelling.piece(token.replace(lost, ""))


class Stream:
    """Decoding token by token: what is pushed, then flushed, is together the decoding of all tokens at once.

    Text is given out as soon as its characters are complete; bytes that no later token can complete become U+FFFD, one
    for each maximal part of a sequence (as Unicode recommends and Python does). With `prompt_ids` the text continues
    theirs: a space that only the beginning of a text loses is kept, and a character that they begin is completed. The
    work per token does not grow with the text.
    """

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int] = (), skip: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = bool(pieces.spelling.first_loses)
        self._strip = pieces.spelling.strip_most
        self._continue(prompt_ids)

    @property
    def pending(self) -> bool:
        """Whether the last tokens end inside a character."""
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        return "" if token_id in self._skip else self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an incomplete character. The stream may not be pushed to afterwards."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if not self._first and not self._strip:
            return self._pieces[token_id]
        piece = self._pieces.first(token_id) if self._first else self._pieces[token_id]
        self._first = False
        while self._strip and piece:
            shorter = piece.removeprefix(self._pieces.spelling.strip.encode())
            self._strip = 0 if shorter == piece else self._strip - 1
            piece = shorter
        return piece

    def _continue(self, prompt_ids: Sequence[int]) -> None:
        """Reads of a prompt only its first tokens (up to a text's beginning) and its last ones (up to 3 bytes)."""
        for token_id in prompt_ids:
            if not self._first and not self._strip:
                break
            if token_id not in self._skip:
                self._bytes(token_id)
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # an incomplete character has at most 3 bytes
                break
            if token_id not in self._skip:
                tail = self._pieces[token_id] + tail
        self._utf8.decode(tail)
