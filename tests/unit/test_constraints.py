"""Masks against an oracle: for each token, whether the text with it can still become one of the language."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from letters import END, SPECIALS, START, Letters

from llmx import grammar as g
from llmx.core import Request, SamplingParams
from llmx.core import Sequence as Text
from llmx.engine.constraints import Constraint, Grammars
from llmx.errors import RequestError
from llmx.kernels import Kernels
from llmx.sampler import Allowed, Points, draw

pytest.importorskip("llguidance", reason="structured output needs llguidance")

TOKENIZER = Letters()
COUNT = TOKENIZER.vocab_size
VOCAB = COUNT + 5  # the model's logits have rows that stand for nothing


@dataclass(frozen=True)
class Language:
    """prefix: whether some text of it begins so. whole: whether this is one. forced: what must come next. All bytes."""

    grammar: str
    prefix: Callable[[bytes], bool]
    whole: Callable[[bytes], bool]
    forced: Callable[[bytes], bytes]

    def check(self, mask: np.ndarray, text: bytes) -> bool:
        """Asserts that the mask is right; whether it is all that the language allows.

        Where there is only one way to go on, one token of it will do.
        """
        found, want = tokens_of(mask), expected(self, text)
        if found == want:
            return True
        assert len(found) == 1, (text, found, want)
        assert TOKENIZER.piece(found[0]), text
        assert self.forced(text).startswith(TOKENIZER.piece(found[0])), (text, found, want)
        return False


def finite(pattern: str, alphabet: str, longest: int, grammar: str | None = None) -> Language:
    """Every text over an alphabet that Python's `re` says belongs to it."""
    texts = {
        "".join(letters).encode()
        for length in range(longest + 1)
        for letters in product(alphabet, repeat=length)
        if re.fullmatch(pattern, "".join(letters))
    }
    return of(texts, grammar or g.regex(pattern))


def listed(*texts: str) -> Language:
    return of({text.encode() for text in texts}, g.choice(list(texts)))


def of(texts: set[bytes], grammar: str) -> Language:
    prefixes = {text[:n] for text in texts for n in range(len(text) + 1)}

    def forced(text: bytes) -> bytes:
        least, most = (choose(whole for whole in texts if whole.startswith(text)) for choose in (min, max))
        same = next(
            (n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most))
        )
        return least[len(text) : same]

    return Language(grammar, prefixes.__contains__, texts.__contains__, forced)


def balanced(text: bytes) -> int | None:
    """How many brackets are open; None where no text begins so: each opens with ( and holds pairs or a's."""
    depth = 0
    for at, byte in enumerate(text):
        if byte not in b"()a" or (depth == 0 and at):
            return None
        if byte == ord("a") and depth == 0:
            return None
        depth += {ord("("): 1, ord(")"): -1}.get(byte, 0)
        if depth < 0:
            return None
    return depth


BRACKETS = 'root ::= "(" (root | "a")* ")"'
LANGUAGES = {
    "choice": listed("abc", "ab", "xyz", "xy 10", "007", "日本", "é🫠"),
    "quoted": listed('{"a": 1}', '"}', "<|end|>", "\n"),
    "class": finite("[abc]{2,5}", "abc", 5),
    "alternatives": finite("(ab|a)(bc|c)?(x|xy)", "abcxy", 6),
    "digits": finite("-?(0|[12][01]{0,3})([.][01])?", "-.012", 7),
    "optional": finite("a?b?c?(xy)?", "abcxy", 5),
    "brackets": Language(
        g.from_gbnf(BRACKETS),
        lambda text: balanced(text) is not None,
        lambda text: bool(text) and balanced(text) == 0,
        lambda text: b"" if text else b"(",
    ),
}


def constraint(grammar: str, grammars: Grammars | None = None, **params: object) -> Constraint:
    request = Request("x", (5,), SamplingParams(grammar=grammar, **params), TOKENIZER.eos_ids)  # type: ignore[arg-type]
    return (grammars or Grammars(lambda: TOKENIZER, VOCAB)).start(request)  # type: ignore[arg-type,return-value]


def expected(language: Language, text: bytes) -> list[int]:
    tokens = [
        token
        for token in range(COUNT)
        if token not in SPECIALS and TOKENIZER.piece(token) and language.prefix(text + TOKENIZER.piece(token))
    ]
    return [END, *tokens] if language.whole(text) else tokens


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_token_is_allowed_iff_the_text_can_still_become_one_of_the_language(name: str) -> None:
    language, luck, grammars = LANGUAGES[name], random.Random(0), Grammars(lambda: TOKENIZER, VOCAB)  # type: ignore[arg-type,return-value]
    exact, ended = 0, 0
    for _ in range(40):
        state, said = constraint(language.grammar, grammars), []
        for _ in range(12):
            text = TOKENIZER.text(said)
            exact += language.check(state.after([()])[0], text)
            token = luck.choice([token for token in expected(language, text) if token != END])
            said.append(token)
            text = TOKENIZER.text(said)
            more = [token for token in expected(language, text) if token != END]
            assert state.push(token) == (None if more else "stop"), text
            if not more:
                assert language.whole(text)
                assert state.after([()]) == [None]
                ended += 1
                break
    assert exact > 40
    assert ended > 3


@pytest.mark.parametrize("name", LANGUAGES)
def test_behind_drafts_the_mask_is_that_of_a_text_that_holds_them(name: str) -> None:
    language, luck, grammars = LANGUAGES[name], random.Random(1), Grammars(lambda: TOKENIZER, VOCAB)  # type: ignore[arg-type,return-value]
    exact, forbidden = 0, 0
    for _ in range(30):
        state, said = constraint(language.grammar, grammars), list[int]()
        for _ in range(luck.randrange(4)):
            more = [token for token in expected(language, TOKENIZER.text(said)) if token != END]
            token = luck.choice(more)
            if state.push(token) is not None:
                break
            said.append(token)
        if state.after([()])[0] is None:
            continue
        paths = [()] + [tuple(_path(language, said, luck)) for _ in range(8)]
        for path, mask in zip(paths, state.after(paths), strict=True):
            text = TOKENIZER.text(said)
            legal = all(_legal(language, text, path[: n + 1]) for n in range(len(path)))
            want = expected(language, text + TOKENIZER.text(path)) if legal else []
            if not [token for token in want if token != END]:
                forbidden += 1
                assert mask is None, (text, path)
            else:
                assert mask is not None, (text, path)
                exact += language.check(mask, text + TOKENIZER.text(path))
        language.check(state.after([()])[0], TOKENIZER.text(said))  # drafts leave no trace
    assert exact > 20
    assert forbidden > 20


def _path(language: Language, said: Sequence[int], luck: random.Random) -> list[int]:
    """Mostly right drafts, and now and then any token there is, also one that no grammar knows."""
    path: list[int] = []
    for _ in range(luck.randrange(1, 5)):
        right = expected(language, TOKENIZER.text([*said, *path]))
        path.append(luck.choice(right) if right and luck.random() < 0.8 else luck.randrange(VOCAB))
    return path


def _legal(language: Language, text: bytes, path: Sequence[int]) -> bool:
    *before, token = path
    if token in SPECIALS or not TOKENIZER.piece(token):
        return False
    return language.prefix(text + TOKENIZER.text(before) + TOKENIZER.piece(token))


def test_the_tokens_that_end_a_text_are_the_requests_own() -> None:
    optional = g.regex("a?b?")
    assert END in tokens_of(constraint(optional).after([()])[0])
    assert END not in tokens_of(constraint(optional, ignore_eos=True).after([()])[0])
    chosen = constraint(optional, ignore_eos=True, stop_token_ids=(START,))
    assert START in tokens_of(chosen.after([()])[0])
    assert START not in tokens_of(constraint(g.regex("ab"), stop_token_ids=(START,)).after([()])[0])


def test_a_special_token_is_allowed_where_the_grammar_names_it_and_its_text_is_not_it() -> None:
    named = constraint(g.from_lark('start: "a" <|start|> "b"'))
    assert named.push(TOKENIZER_ID["a"]) is None
    assert tokens_of(named.after([()])[0]) == [START]
    assert named.push(START) is None
    assert named.push(TOKENIZER_ID["b"]) == "stop"
    spelled = constraint(g.choice(["<|start|>"]))
    assert START not in tokens_of(spelled.after([()])[0])


TOKENIZER_ID = {TOKENIZER.token(token): token for token in reversed(range(COUNT)) if token not in SPECIALS}


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: <|nothing|>", "unknown special token"),
        ("start: foo", "unknown name"),
        ('start: ""', "no text but the empty one"),
        ('start: "Q"', "no token of this model can follow"),
    ],
)
def test_a_grammar_that_this_model_can_never_follow_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        constraint(grammar)


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        constraint(g.regex("a"), Grammars(None, VOCAB))


def test_a_text_that_runs_into_what_no_token_spells_is_broken() -> None:
    state = constraint(g.regex("aQ|b"))
    assert state.push(TOKENIZER_ID["a"]) == "abort"
    assert state.broken == "no token of this model can follow"
    assert state.after([()]) == [None]


def test_a_token_that_the_grammar_forbids_breaks_the_text() -> None:
    state = constraint(g.regex("ab"))
    assert state.push(TOKENIZER_ID["b"]) == "abort"
    assert state.broken


def test_compiled_grammars_are_kept_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.engine.constraints.CACHE_BYTES", 3 * 2**20)
    grammars, compiled = Grammars(lambda: TOKENIZER, VOCAB), []  # type: ignore[arg-type,return-value]
    inner = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: (compiled.append(grammar), inner(grammar))[1])
    first, second, third = (g.regex(pattern) for pattern in ("a+", "b+", "c+"))
    for grammar in (first, second, first, third, first, second):
        constraint(grammar, grammars)
    assert compiled == [first, second, third, second]


def text(**params: object) -> Text:
    return Text(Request("x", (5,), SamplingParams(seed=3, **params), frozenset({END})), 0, 0, [5, 6])  # type: ignore[arg-type]


def points(texts: list[Text], allowed: dict[int, list[int]] | None) -> Points:
    each = torch.arange(len(texts))
    found = None
    if allowed is not None:
        mask = torch.zeros(len(allowed), VOCAB, dtype=torch.bool)
        for row, tokens in enumerate(allowed.values()):
            mask[row, tokens] = True
        found = Allowed(torch.tensor(list(allowed)), mask)
    return Points(texts, each, torch.full_like(each, 2), torch.full((len(texts), 1), -1), found)


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": ((9, 50.0),), "min_tokens": 4},
]


def test_only_what_is_allowed_is_drawn_and_other_rows_keep_their_draws() -> None:
    kernels, luck = Kernels("cpu", "reference"), random.Random(0)
    texts = [text(**kind, logprobs=2) for kind in KINDS for _ in range(3)]
    for _ in range(30):
        logits = torch.randn(len(texts), VOCAB) * 4
        allowed = {row: sorted(luck.sample(range(COUNT), luck.randrange(1, 6))) for row in range(0, len(texts), 3)}
        free, bound = draw(logits, points(texts, None), kernels), draw(logits, points(texts, allowed), kernels)
        for row in range(len(texts)):
            token = int(bound.tokens[row])
            if row in allowed:
                assert token in allowed[row]
                if int(free.tokens[row]) in allowed[row] and texts[row].request.params.temperature == 0:
                    assert token == int(free.tokens[row])
            else:
                assert token == int(free.tokens[row])
        torch.testing.assert_close(bound.top, free.top, rtol=0, atol=0)  # scores are of the raw logits


def test_what_is_allowed_is_drawn_as_from_the_logits_of_those_alone() -> None:
    """The probabilities are those of the model given that the token is an allowed one."""
    kernels, tokens = Kernels("cpu", "reference"), [4, 9, 17]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    texts = [
        Text(Request("x", (5,), SamplingParams(seed=seed)), 0, 0, [5, 6]) for seed in range(4000)
    ]  # a seed each: draws of one seed are one draw
    made = draw(logits.expand(len(texts), -1), points(texts, dict.fromkeys(range(len(texts)), tokens)), kernels)
    found = torch.bincount(made.tokens, minlength=VOCAB)[tokens] / len(texts)
    assert float((found - logits[tokens].softmax(0)).abs().max()) < 0.03


def test_before_min_tokens_a_stop_is_banned_only_where_something_else_is_allowed() -> None:
    kernels, logits = Kernels("cpu", "reference"), torch.zeros(2, VOCAB)
    logits[:, END] = 9
    texts = [text(temperature=0.0, min_tokens=4), text(temperature=0.0, min_tokens=4)]
    assert draw(logits, points(texts, {0: [END, 8], 1: [END]}), kernels).tokens.tolist() == [8, END]
