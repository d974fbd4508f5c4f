"""A tokenizer of a few dozen tokens, whose every text can be checked by hand: characters, words, parts, nothing."""

from __future__ import annotations

from llmx.engine.constraints import longest_first

END, START = 0, 1
SPECIALS = {END: "<|end|>", START: "<|start|>"}
PIECES = [
    *'abcdenxyzflrstu0123456789 .,:{}[]()"-+\n_<|>',
    *(
        "ab",
        "abc",
        "bc",
        "ca",
        "xy",
        "10",
        "12",
        "007",
        '{"',
        '":',
        '", "',
        '"}',
        "}}",
        "[]",
        "()",
        "))",
        "true",
        "null",
    ),
    *("true}", '": ', ": 1", "a,b", "  ", ", ", "é", "日本", "<|end|>"),
]
PARTS = [b"\xf0", b"\x9f\xab", b"\xa0", b"\xc3", b"\xa9", b"\xff"]
BYTES = [b"", *(piece.encode() for piece in PIECES), *PARTS, b""]


class Letters:
    """As much of `llmx.tokenizer.Tokenizer` as a grammar needs. Ids: the special ones, then `BYTES`."""

    vocab_size = len(SPECIALS) + len(BYTES)
    special_ids = frozenset(SPECIALS)
    eos_ids = frozenset({END})

    def piece(self, token_id: int) -> bytes:
        if token_id in SPECIALS:
            return SPECIALS[token_id].encode()
        return BYTES[token_id - len(SPECIALS)] if token_id < self.vocab_size else b""

    def token(self, token_id: int) -> str:
        return self.piece(token_id).decode(errors="replace")

    def text(self, ids: list[int] | tuple[int, ...]) -> bytes:
        return b"".join(self.piece(token) for token in ids if token not in SPECIALS)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The longest piece first; nothing for a text that has none."""
        assert not add_special
        assert not parse_special
        return longest_first(text.encode(), {self.piece(t): t for t in range(len(SPECIALS), self.vocab_size)})
