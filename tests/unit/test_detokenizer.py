"""What may be shown of a text while it is being made, against a search that looks at it character by character."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizer_samples as samples
import tokenizers
from tokenizers import models

from llmx.core import SamplingParams
from llmx.detokenizer import Detokenizer
from llmx.tokenizer import Tokenizer
from llmx.tokenizer.pieces import Spelling

WORDS = ["", "a", "b", "c", "ab", "ba", "aab", "abc", "cab", "bbbb", "caab", "abababc"]
END = len(WORDS)  # a control token that ends the text
HALF = END + 1  # an ordinary token that only some requests stop at


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """Tokens that are short texts over three letters: stop strings overlap, cross tokens and repeat."""
    vocab = {word: i for i, word in enumerate(WORDS)} | {"c!": HALF}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<end>": END}, merges=[]))
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, Spelling(), eos_ids=[END])


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(samples.byte_level(), Spelling(byte_level=True), bos_id=0, eos_ids=[1])


def run(tokenizer: Tokenizer, ids: list[int], **params: Any) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(max_tokens=None, **params))
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()], detokenizer


def expected(words: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """(text, stop string, tokens used), by trying every end of the text in turn."""
    text = ""
    for used, word in enumerate(words, start=1):
        for character in word:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and used > min_tokens:
                longest = max(ending, key=len)
                return (text if include else text[: -len(longest)]), longest, used
    return text, None, len(words)


def safe(text: str, stops: list[str]) -> str:
    """The text without the longest end that begins a stop string."""
    held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_the_first_complete_stop_string_cuts_the_text_wherever_tokens_end(letters, include, min_tokens) -> None:
    rng = random.Random(f"{include} {min_tokens}")
    stopped = 0
    for _ in range(1500):
        ids = [rng.randrange(len(WORDS)) for _ in range(rng.randrange(12))]
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        text, stop, used = expected([WORDS[i] for i in ids], stops, include, min_tokens)
        shown, detokenizer = run(
            letters, ids, stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens
        )
        assert ("".join(shown), detokenizer.stopped, detokenizer.used) == (text, stop, used)
        assert detokenizer.text == text
        assert detokenizer.completed == used
        stopped += stop is not None
    assert stopped > 300


@pytest.mark.parametrize("min_tokens", [0, 8])
def test_no_beginning_of_a_stop_string_is_shown_and_nothing_else_is_held_back(letters, min_tokens) -> None:
    rng = random.Random(5)
    for _ in range(500):
        ids = [rng.randrange(len(WORDS)) for _ in range(10)]
        stops = ["".join(rng.choices("abc", k=rng.randrange(2, 9))) for _ in range(3)]
        detokenizer = Detokenizer(letters, (), SamplingParams(stop=tuple(stops), min_tokens=min_tokens))
        text = ""
        for token_id in ids:
            detokenizer.push(token_id)
            text += WORDS[token_id]
            if detokenizer.stopped is None:
                assert detokenizer.text == safe(text, stops)


def test_tokens_count_as_completed_once_all_their_text_is_shown(letters) -> None:
    detokenizer = Detokenizer(letters, (), SamplingParams(stop=("abcc",)))
    counts = []
    for word in ("b", "a", "b", "c", "", "a", "a"):
        detokenizer.push(WORDS.index(word))
        counts.append((detokenizer.text, detokenizer.completed))
    assert counts == [("b", 1), ("b", 1), ("b", 1), ("b", 1), ("b", 1), ("babc", 5), ("babca", 6)]
    assert detokenizer.finish() == "a"
    assert (detokenizer.completed, detokenizer.used) == (7, 7)


def test_a_token_inside_a_character_is_not_completed(byte_level) -> None:
    ids = byte_level.encode("hi🫠x", add_special=False)
    detokenizer = Detokenizer(byte_level, (), SamplingParams())
    seen = {(detokenizer.push(i), detokenizer.completed) for i in ids}
    assert all(done in (len(ids) - 5, len(ids) - 1, len(ids)) or done < 3 for _, done in seen)
    assert ("🫠", len(ids) - 1) in seen
    assert detokenizer.completed == len(ids)


def test_without_stop_strings_all_whole_characters_are_shown_at_once(byte_level) -> None:
    ids = byte_level.encode("hi🫠", add_special=False)
    shown, detokenizer = run(byte_level, ids)
    assert "".join(shown) == "hi🫠"
    assert "".join(shown[: len(ids) - 4]) == "hi"
    assert set(shown) <= {"h", "i", "hi", "", "🫠"}
    assert (detokenizer.stopped, detokenizer.ended) == (None, True)


def test_every_piece_of_a_text_works_as_a_stop_string(byte_level) -> None:
    text = "Žluťoučký 🫠客单价, and so it goes: beta gamma."
    ids = byte_level.encode(text, add_special=False)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 13, len(text) + 1)):
            stop = text[start:end]
            shown, detokenizer = run(byte_level, ids, stop=(stop,))
            assert "".join(shown) == text[: text.find(stop)]
            assert detokenizer.stopped == stop
            assert text.find(stop) + len(stop) <= len(byte_level.decode(ids[: detokenizer.used]))


def test_a_text_cut_inside_a_character_shows_one_replacement_at_its_end(byte_level) -> None:
    ids = byte_level.encode("hi🫠", add_special=False)
    for cut in (1, 2, 3):
        shown, detokenizer = run(byte_level, ids[:-cut])
        assert "".join(shown) == "hi\ufffd"
        assert shown[-1] == "\ufffd"
        assert detokenizer.used == len(ids) - cut


def test_an_end_token_adds_no_text_and_counts(letters) -> None:
    for skip in (True, False):
        shown, detokenizer = run(letters, [1, 2, END, 3], skip_special_tokens=skip)
        assert "".join(shown) == "ab"
        assert (detokenizer.used, detokenizer.ended, detokenizer.stopped) == (3, True, None)


def test_text_held_back_is_shown_when_an_end_token_comes(letters) -> None:
    shown, detokenizer = run(letters, [1, 2, END], stop=("abc",))
    assert shown == ["", "", "", "ab"]
    assert detokenizer.stopped is None


def test_ignored_end_tokens_are_ordinary_ones(letters) -> None:
    shown, detokenizer = run(letters, [1, END, 2], ignore_eos=True, skip_special_tokens=False)
    assert "".join(shown) == "a<end>b"
    assert detokenizer.used == 3
    assert "".join(run(letters, [1, END, 2], ignore_eos=True)[0]) == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ac!")])
def test_a_stop_token_of_the_request_is_shown_only_if_asked(letters, include, text) -> None:
    shown, detokenizer = run(letters, [1, HALF, 2], stop_token_ids=(HALF,), include_stop_str_in_output=include)
    assert "".join(shown) == text
    assert (detokenizer.used, detokenizer.ended, detokenizer.stopped) == (2, True, None)


def test_the_models_own_end_token_is_never_included(letters) -> None:
    shown, _ = run(letters, [1, END], include_stop_str_in_output=True, skip_special_tokens=False)
    assert "".join(shown) == "a"


def test_an_end_token_within_min_tokens_does_not_end_the_text(letters) -> None:
    shown, detokenizer = run(letters, [1, END, 2, 3, END, 1], min_tokens=4)
    assert "".join(shown) == "abc"
    assert detokenizer.used == 5


def test_what_comes_after_the_end_is_dropped(letters) -> None:
    detokenizer = Detokenizer(letters, (), SamplingParams(stop=("b",)))
    assert [detokenizer.push(i) for i in (1, 4, 3, 3)] == ["a", "a", "", ""]
    assert (detokenizer.used, detokenizer.finish(), detokenizer.text) == (2, "", "aa")


def test_text_continues_the_prompt() -> None:
    backend = samples.llama2()
    spelling = Spelling(replace=(("▁", " "),), byte_fallback=True, strip=" ", strip_most=1)
    tokenizer = Tokenizer(backend, spelling, bos_id=1, eos_ids=[2])
    prompt, after = tokenizer.encode("Hello"), tokenizer.encode("world", add_special=False)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(stop=(" w",)))
    for token_id in after:
        detokenizer.push(token_id)
    assert (detokenizer.stopped, detokenizer.text) == (" w", "")


def test_the_work_per_token_does_not_grow_with_the_text(letters) -> None:
    """A stop string that the text nearly matches for ever: what is held back stays as it is, and so does the state."""
    stop = "a" * 400 + "b"
    detokenizer = Detokenizer(letters, (), SamplingParams(stop=(stop,)))
    for _ in range(5000):
        detokenizer.push(1)
    assert len(detokenizer.text) == 4600
    detokenizer.push(2)
    assert (detokenizer.stopped, len(detokenizer.text), detokenizer.used) == (stop, 4600, 5001)
