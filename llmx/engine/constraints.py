"""Grammars in the engine: which tokens may come next in each text, and whether it is complete.

States advance where tokens land, so what `decide` sees is true history, however steps overlap. llguidance is imported,
and its copy of the vocabulary built, at the first request that has a grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmx.batch import Drafts
from llmx.core import Request, Row
from llmx.errors import RequestError
from llmx.grammar.limits import limits
from llmx.sampler import Allowed, Points

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

Mask = NDArray[np.bool_]  # (vocab,)
CACHE_BYTES = 64 * 2**20
STUCK = "no token of this model can follow"
COMPILED_BYTES, PER_CHARACTER = 2**20, 32  # of a compiled grammar in use, about: the library doesn't say


class Vocabulary:
    """The tokenizer as llguidance knows it, with one more token at the end, which says that the text may end.

    Where a grammar leaves only one way to go on, llguidance allows the very token that the tokenizer would take.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.count = min(tokenizer.vocab_size, vocab)  # rows of the logits past it stand for nothing
        self.end = self.count
        special = sorted(token for token in tokenizer.special_ids if token < self.count)
        pieces = [tokenizer.piece(token) for token in range(self.count)]
        for token in special:
            pieces[token] = tokenizer.token(token).encode()

        class Wrapped:
            eos_token_id = self.end
            bos_token_id = None
            tokens = [*pieces, b"<end>"]  # noqa: RUF012
            special_token_ids = [*special, self.end]  # noqa: RUF012

            def __call__(self, text: bytes | str) -> list[int]:
                data = text if isinstance(text, bytes) else text.encode()
                ids = tokenizer.encode(data.decode(errors="replace"), add_special=False, parse_special=False)
                # Some tokenizers put a space in front of a text, or change it.
                faithful = all(i < len(pieces) for i in ids) and b"".join(pieces[i] for i in ids) == data
                return ids if faithful else longest_first(data, ids_of)

        ids_of = {piece: token for token, piece in reversed(list(enumerate(pieces))) if token not in special}
        self.library = LLTokenizer(TokenizerWrapper(Wrapped()))


def longest_first(data: bytes, ids_of: Mapping[bytes, int]) -> list[int]:
    """Tokens that spell `data`, each the longest that fits, up to where none does."""
    longest, found, at = max(map(len, ids_of)), [], 0
    while at < len(data):
        sizes = range(min(longest, len(data) - at), 0, -1)
        size = next((size for size in sizes if data[at : at + size] in ids_of), None)
        if size is None:
            break
        found.append(ids_of[data[at : at + size]])
        at += size
    return found


class Constraint:
    """Where one text is in its grammar."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, vocab: int, ends: Sequence[int] = ()) -> None:
        """ends: the tokens that may end a complete text."""
        self._matcher, self._vocabulary, self._vocab, self._ends = matcher, vocabulary, vocab, list(ends)
        self._now: Mask | None = None  # the next token's mask, while the text goes on
        self.broken: str | None = None
        self._looked = False

    def copy(self, ends: Sequence[int] | None = None) -> Constraint:
        """The beginning of another text; only of one that no token was pushed to."""
        return Constraint(
            self._matcher.deep_copy(), self._vocabulary, self._vocab, self._ends if ends is None else ends
        )

    def push(self, token: int) -> str | None:
        """The text's next token. "stop" if it is complete and nothing may follow, "abort" if it is `broken`."""
        self._now, self._looked = None, True
        if not self._matcher.consume_token(token):
            self.broken = self._why() or f"token {token} is not allowed"
            return "abort"
        if self._matcher.is_stopped() and self._matcher.is_accepting():
            return "stop"
        return self.look()

    def look(self) -> str | None:
        """As `push`, at the beginning of a text."""
        self._now, self._looked = None, True
        bits = self._bits(self._matcher)
        if bits is None:
            self.broken = self._why() or "it is too complex"
        elif bits[: self._vocabulary.count].any():
            self._now = self._mask(bits)
            return None
        elif bits[self._vocabulary.end]:
            return "stop"
        else:
            self.broken = STUCK
        return "abort"

    def after(self, paths: Sequence[Sequence[int]]) -> list[Mask | None]:
        """For each path of drafts the tokens that may follow it; None behind one that the grammar forbids, or ends."""
        if not self._looked:
            self.look()
        return [self._after(path) if path else self._now for path in paths]

    def _after(self, path: Sequence[int]) -> Mask | None:
        """On a copy, which costs microseconds: llguidance 1.9's masks can lack tokens after its `rollback`."""
        if self._now is None or any(token >= self._vocabulary.count for token in path):
            return None
        ahead = self._matcher.deep_copy()
        if ahead.try_consume_tokens(list(path)) < len(path) or ahead.is_stopped():
            return None
        bits = self._bits(ahead)
        return self._mask(bits) if bits is not None and bits[: self._vocabulary.count].any() else None

    def _bits(self, matcher: Any) -> Mask | None:
        """(tokens and the end,), or None: an error."""
        packed = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: self._vocabulary.end + 1].view(bool)

    def _mask(self, bits: Mask) -> Mask:
        mask = np.zeros(self._vocab, bool)
        mask[: self._vocabulary.count] = bits[: self._vocabulary.count]
        if bits[self._vocabulary.end]:
            mask[self._ends] = True
        return mask

    def _why(self) -> str:
        said = str(self._matcher.get_error()).partition("\n")[0][:200].rstrip(". ")
        return STUCK if said == "NoExtensionBias" else said


class Grammars:
    """The grammars of an engine's requests, compiled once each and kept while there is room.

    tokenizer: reads the model's; None where there is none. vocab: of the model's logits.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer] | None, vocab: int) -> None:
        self._load, self._vocab = tokenizer, vocab
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        if self._load is None:
            raise RequestError("This model has no tokenizer, so its text can't be constrained.", param="grammar")
        try:
            return Vocabulary(self._load(), self._vocab)
        except ImportError:
            raise RequestError(
                "Structured output needs the package llguidance, which is not installed.", param="grammar"
            ) from None

    def start(self, request: Request) -> Constraint:
        """The state of a text that begins. RequestError where the grammar can't be used with this model."""
        grammar = request.params.grammar
        assert grammar is not None, "only for requests with a grammar"
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
        self._compiled[grammar] = found
        self._compiled.move_to_end(grammar)
        self._forget()
        return found.copy([token for token in sorted(request.stops) if token < self._vocab])

    def _compile(self, grammar: str) -> Constraint:
        from llguidance import LLMatcher

        vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary.library, grammar, log_level=0, limits=limits())
        made = Constraint(matcher, vocabulary, self._vocab)
        begun = made.copy()
        if begun.look() is not None:
            reason = begun.broken or "it allows no text but the empty one"
            raise RequestError(f"The grammar can't be used with this model: {reason}.", param="grammar")
        return made

    def _forget(self) -> None:
        """Those that were used least lately; what runs keeps its own."""
        total = 0
        for grammar in reversed(list(self._compiled)):
            total += COMPILED_BYTES + PER_CHARACTER * len(grammar)
            if total > CACHE_BYTES and len(self._compiled) > 1:
                del self._compiled[grammar]

    def allowed(self, rows: list[Row], drafts: Drafts, points: Points) -> Allowed | None:
        """What may be drawn at each point of a text with a grammar; None if there is no such text in the step."""
        if all(row.sequence.constraint is None for row in rows):
            return None
        if any(drafts.sizes):
            owners, paths = points.index.tolist(), points.path.tolist()  # on a GPU this waits for the drafts
        else:
            owners = [r for r, row in enumerate(rows) if row.draws]
            paths = [[] for _ in owners]
        mine: dict[int, list[int]] = {}
        for point, owner in enumerate(owners):
            mine.setdefault(owner, []).append(point)
        places: list[int] = []
        masks: list[Mask] = []
        for owner, at in mine.items():
            sequence = rows[owner].sequence
            # Of a text that ended in the step before, when this one was launched, nothing that is drawn matters.
            if sequence.constraint is None or sequence.finish is not None:
                continue
            found = sequence.constraint.after([[token for token in paths[point] if token >= 0] for point in at])
            places += [point for point, mask in zip(at, found, strict=True) if mask is not None]
            masks += [mask for mask in found if mask is not None]
        if not places:
            return None
        device = points.index.device
        return Allowed(torch.tensor(places, device=device), torch.from_numpy(np.stack(masks)).to(device))
