"""Mistral's tekken.json, against transformers' own conversion of it; and as a GGUF file's tokenizer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_samples import TORTURE, byte_level, merges

from llmx.convert.gguf_vocab import vocabulary
from llmx.errors import UsageError
from llmx.tokenizer import load_tokenizer
from llmx.tokenizer.gguf import from_gguf
from llmx.tokenizer.pieces import BYTE_ALPHABET

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")


def tekken(folder: Path, beyond: int = 40) -> dict[str, Any]:
    """A vocabulary in the order of its merges; the last `beyond` tokens are none of the model's."""
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in merges(byte_level()):
        made = bytes(BYTE_ALPHABET[character] for character in left + right)
        if made not in tokens:
            tokens.append(made)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_num_special_tokens": 10, "version": "v7"}
    config["default_vocab_size"] = 10 + len(tokens) - beyond
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL)]
    made = {"config": config, "vocab": vocab, "special_tokens": special, "type": "Tekken"}
    (folder / "tekken.json").write_text(json.dumps(made))
    return made


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    converter = pytest.importorskip("transformers.integrations.mistral.tokenizer", reason="from transformers 5.20 on")
    made = tekken(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), converter.MistralConverter(str(tmp_path / "tekken.json")).converted()
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, made["config"]["default_vocab_size"])
    for text in (*TORTURE.values(), "[INST] Hi [/INST]<s>x</s>"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.encode(text) == ([1, *ids] if ids[:1] != [1] else ids)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.token(7) == "<SPECIAL_7>"


def test_it_becomes_a_gguf_tokenizer_called_tekken(tmp_path: Path) -> None:
    size = tekken(tmp_path)["config"]["default_vocab_size"]
    made = vocabulary(tmp_path, size)
    assert (made.pairs["tokenizer.ggml.pre"], made.found_by) == ("tekken", "definition")
    kinds = made.pairs["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    assert kinds == [3] * 10 + [1] * (size - 10)
    ours, wanted = from_gguf(made.pairs, "made"), load_tokenizer(tmp_path)
    for text in TORTURE.values():
        assert ours.encode(text) == wanted.encode(text), text


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no special tokens": (lambda t: t.pop("special_tokens"), "lists no special tokens"),
    "a rank twice": (lambda t: t["special_tokens"][1].update(rank=0), "must have the ranks 0 to 5, each once"),
    "a rank too high": (lambda t: t["special_tokens"][1].update(rank=9), "must have the ranks 0 to 5, each once"),
    "no vocabulary": (lambda t: t.update(vocab={}), "vocab must be a list"),
    "no base 64": (lambda t: t["vocab"][3].update(token_bytes="?"), r"vocab\[3\] has no token_bytes in base 64"),
    "a token twice": (lambda t: t["vocab"][300].update(token_bytes="YQ=="), r"vocab\[300\] is a token that was"),
    "a byte missing": (lambda t: t["vocab"][97].update(token_bytes="YWFhYQ=="), "has no token for the byte 97"),
    "a pattern that is none": (lambda t: t["config"].update(pattern="("), "is no regular expression"),
    "more special tokens than room": (lambda t: t["config"].update(default_num_special_tokens=3), "default_num_spec"),
    "no config": (lambda t: t.pop("config"), "config"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    made = tekken(tmp_path)
    change, sentence = BROKEN[name]
    change(made)
    (tmp_path / "tekken.json").write_text(json.dumps(made))
    with pytest.raises(UsageError, match=sentence):
        load_tokenizer(tmp_path)
