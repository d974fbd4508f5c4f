"""200 texts by every kind of tokenizer that GGUF files have, against llama.cpp (data/make_torture_ids.py)."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from torture import TEXTS

from llmx.tokenizer import load_tokenizer
from tests.data.make_torture_ids import cases, digest

STORED = json.loads((Path(__file__).parents[1] / "data" / "torture_ids.json").read_text())
CASES = cases()


def has_marks_or_case(text: str) -> bool:
    return any(unicodedata.category(c) in ("Mn", "Mc", "Me", "Lu", "Ll", "Lt") for c in text if not c.isascii())


def has_wide_spaces(text: str) -> bool:
    return any(c.isspace() and not c.isascii() for c in text)


# llama.cpp's expressions know no marks and no case beyond ASCII, or no such spaces; the models' own do, and so do ours.
COARSE = {
    "tekken": has_marks_or_case,
    "gpt-4o": has_marks_or_case,
    "deepseek-coder": has_wide_spaces,
    "deepseek-llm": has_wide_spaces,
}


def test_there_are_200_texts_and_each_kind_is_stored() -> None:
    assert len(set(TEXTS)) == len(TEXTS) == 200
    assert STORED.keys() == CASES.keys()


@pytest.mark.parametrize("name", STORED)
def test_the_ids_are_those_of_llama_cpp(name) -> None:
    tokenizer = load_tokenizer("model.gguf", CASES[name])
    ids = [tokenizer.encode(text, add_special=False) for text in TEXTS]
    pairs = zip(TEXTS, ids, STORED[name].split(), strict=True)
    differing = [text for text, found, stored in pairs if digest(found) != stored]
    assert [text for text in differing if name not in COARSE or not COARSE[name](text)] == []
    assert len(differing) < 25
    if not name.startswith("spm"):
        assert [tokenizer.decode(found, skip_special=False) for found in ids] == list(TEXTS)
