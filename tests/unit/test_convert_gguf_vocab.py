"""Tokenizers of folders as GGUF metadata: they read texts alike, are named rightly, or are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llmx.convert.gguf_hashes import NAMES
from llmx.convert.gguf_pre import by_definition, candidates
from llmx.convert.gguf_spm import read_model, scores_of_merges
from llmx.convert.gguf_vocab import Vocabulary, vocabulary
from llmx.errors import UsageError
from llmx.formats.gguf_write import parse_size
from llmx.tokenizer import load_tokenizer
from llmx.tokenizer.gguf import from_gguf
from llmx.tokenizer.splits import SPLITS
from tests.tokenizer_samples import TORTURE, byte_level, llama2, metaspace, save

ENDS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
# The regular expressions as models' own tokenizer.json have them -> what llama.cpp calls them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")


def cut_by(*steps: Any, whole: bool = False) -> tokenizers.Tokenizer:
    backend = byte_level()
    made = json.loads(backend.to_str())
    made["model"]["ignore_merges"] = whole
    backend = tokenizers.Tokenizer.from_str(json.dumps(made))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return backend


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WITH_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (cut_by(split(LLAMA3), BYTES, whole=True), "llama-bpe"),
        (cut_by(split(LLAMA3), BYTES), "dbrx"),
        (cut_by(split(LLAMA3.replace("{1,3}", "")), BYTES), "qwen2"),
        (cut_by(split(GPT4O), BYTES), "gpt-4o"),
        (cut_by(pre_tokenizers.Digits(individual_digits=True), WITH_REGEX), "smollm"),
        (cut_by(WITH_REGEX), "gpt-2"),
    ],
    ids=["llama-bpe", "dbrx", "qwen2", "gpt-4o", "smollm", "gpt-2"],
)
def test_a_byte_level_tokenizer_is_named_by_its_definition(
    backend: tokenizers.Tokenizer, name: str, tmp_path: Path
) -> None:
    made = vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 421)
    assert (made.pairs["tokenizer.ggml.pre"], made.found_by) == (name, "definition")
    same_ids(tmp_path, made)


def same_ids(folder: Path, made: Vocabulary) -> None:
    ours, wanted = from_gguf(made.pairs, "made"), load_tokenizer(folder)
    backend = json.loads((folder / "tokenizer.json").read_text())
    doubled = (backend["pre_tokenizer"] or {}).get("type") == "Metaspace"  # a space in front that is there already
    for text in TORTURE.values():
        if not doubled or not (text.startswith(" ") or "<s>" in text):
            assert ours.encode(text) == wanted.encode(text), text
    assert (ours.bos_id, ours.add_bos) == (wanted.bos_id, wanted.add_bos)
    assert ours.eos_ids >= wanted.eos_ids


def test_every_definition_names_itself() -> None:
    for name, rule in SPLITS.items():
        steps = [
            {"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in rule.regexes
        ]
        written = {"type": "Sequence", "pretokenizers": steps}
        found, _ = by_definition({"model": {"ignore_merges": rule.whole_words}, "pre_tokenizer": written})
        assert name in found


def test_what_has_no_name_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    backend = cut_by(split(r"\w\w"), BYTES)
    folder = save(backend, tmp_path, tokenizer_config=ENDS)
    with pytest.raises(UsageError, match="No pre-tokenizer that GGUF files name cuts texts as this tokenizer does"):
        vocabulary(folder, 421)
    made = vocabulary(folder, 421, "gpt-2")
    assert made.pairs["tokenizer.ggml.pre"] == "gpt-2"
    assert "it would read" in made.notes[0]


def test_a_name_by_hash_is_checked_by_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = cut_by(split(r"\w\w"), BYTES)
    monkeypatch.setattr("llmx.convert.gguf_pre.fingerprint", lambda _: next(iter(NAMES)))
    assert candidates(backend, False) == ([NAMES[next(iter(NAMES))]], "hash")
    with pytest.raises(UsageError, match="it would read"):
        vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 421)


@pytest.mark.parametrize("build", [llama2, metaspace])
def test_sentencepiece_keeps_its_order_of_merges(build: Any, tmp_path: Path) -> None:
    backend = build()
    rows = backend.get_vocab_size() + 3
    folder = save(backend, tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    made = vocabulary(folder, rows)
    assert made.pairs["tokenizer.ggml.model"] == "llama"
    kinds = made.pairs["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    assert (kinds[0], kinds[1], kinds[3], kinds[258], kinds[-1]) == (2, 3, 6, 6, 5)
    same_ids(folder, made)


def proto(text: str, score: bytes) -> bytes:
    """A piece of sentencepiece_model.proto."""
    inner = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + score + b"\x18\x01"
    return b"\x0a" + bytes([len(inner)]) + inner


def test_scores_come_from_sentencepieces_own_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(proto("▁a", b"\0\0\0\xc0") + proto("b", b"\0\0\x80\xbf") + b"\x12\x00")
    assert read_model(tmp_path / "tokenizer.model").scores(["b", "▁a", "?"]) == [-1.0, -2.0, 0.0]
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(UsageError, match="is no SentencePiece model: it is damaged"):
        read_model(tmp_path / "tokenizer.model")
    assert scores_of_merges(["a b", "b c", ["ab", "c"]], ["abc", "ab", "x"], {"ab", "abc"}) == [-1.0, 0.0, -2.0]


def test_rows_and_tokens_need_not_be_as_many(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, tokenizer_config=ENDS)
    made = vocabulary(folder, 430)
    assert made.pairs["tokenizer.ggml.tokens"][-1] == "[PAD429]"
    assert made.pairs["tokenizer.ggml.token_type"][-10:] == [4] + [5] * 9
    assert "9 rows of the embedding have no token" in made.notes[0]
    fewer = vocabulary(folder, 420)  # the last is an added token
    assert "1 tokens from 420 on have no row" in fewer.notes[0]
    with pytest.raises(UsageError, match="the tokenizer has 421 tokens, the embedding 400 rows"):
        vocabulary(folder, 400)


def test_a_padding_name_that_is_a_token_is_not_given_twice(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["[PAD422]"])
    made = vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 424)
    assert made.pairs["tokenizer.ggml.tokens"][420:] == ["<think>é", "[PAD422]", "[PAD422]_", "[PAD423]"]


def test_templates_and_ends_are_written(tmp_path: Path) -> None:
    config = ENDS | {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    folder = save(byte_level(), tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [1, 5, 7]})
    pairs = vocabulary(folder, 421).pairs
    assert pairs["tokenizer.chat_template"] == "A"
    assert pairs["tokenizer.chat_template.tool_use"] == "B"
    assert pairs["tokenizer.chat_templates"] == ["tool_use"]
    keys = ("bos", "eos", "eot", "eom")
    assert [pairs[f"tokenizer.ggml.{key}_token_id"] for key in keys] == [0, 1, 5, 7]
    (tmp_path / "chat_template.jinja").write_text("C")
    assert vocabulary(folder, 421).pairs["tokenizer.chat_template"] == "C"


def test_a_model_is_called_phi_3_only_with_the_tokens_that_llama_cpp_then_looks_for(tmp_path: Path) -> None:
    backend, config = llama2(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = save(backend, tmp_path / "without", tokenizer_config=config)
    for name, fitting in {"My-Phi3-tune": "My-Phi 3-tune", "phi-3 mini": "phi 3 mini", "phi-4": "phi-4"}.items():
        made = vocabulary(folder, 600, None, name)
        assert made.name == fitting
        assert any("<|endoftext|>" in note for note in made.notes) == (name != fitting)
    backend.add_special_tokens(["<|endoftext|>"])
    folder = save(backend, tmp_path / "with", tokenizer_config=config)
    assert vocabulary(folder, 600, None, "My-Phi3-tune").name == "My-Phi3-tune"


def test_sentencepiece_that_merges_in_another_order_is_refused(tmp_path: Path) -> None:
    backend = llama2()
    made = json.loads(backend.to_str())
    made["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(proto(token, struct.pack("<f", -float(i))) for token, i in backend.get_vocab().items())
    )
    with pytest.raises(UsageError, match="it would read"):
        vocabulary(tmp_path, backend.get_vocab_size())


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("2G", "500M", "7kb", "12")] == [2 * 10**9, 500 * 10**6, 7000, 12]
    for wrong in ("0", "two", "-1G", "1.5G"):
        with pytest.raises(UsageError, match="A size must be"):
            parse_size(wrong)


def test_what_gguf_has_no_place_for_is_a_note_where_models_have_it(tmp_path: Path) -> None:
    """Qwen composes accents; Phi-4's special tokens swallow the spaces beside them."""
    backend = cut_by(split(LLAMA3.replace("{1,3}", "")), BYTES)
    backend.normalizer = normalizers.NFC()
    made = vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 421)
    assert made.pairs["tokenizer.ggml.pre"] == "qwen2"
    assert made.notes == ["Accents are composed with their letters (NFC) by this tokenizer, and not by GGUF's."]
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(UsageError, match="it would read"):
        vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 421)
    backend.normalizer = None
    backend.add_special_tokens([tokenizers.AddedToken("<|im_end|>", lstrip=True, rstrip=True, normalized=False)])
    made = vocabulary(save(backend, tmp_path, tokenizer_config=ENDS), 422)
    assert "it would read" in made.notes[0]
    assert "<|im_end|>" in made.notes[0] or "<s>" in made.notes[0]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False), "a Unigram tokenizer is not built for GGUF"),
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), "a WordPiece tokenizer is not built for GGUF"),
        (models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), "a WordLevel tokenizer is not built for GGUF"),
    ],
    ids=["Unigram", "WordPiece", "WordLevel"],
)
def test_kinds_that_no_family_has_are_refused_by_name(model: Any, said: str, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Metaspace()
    with pytest.raises(UsageError, match=said):
        vocabulary(save(backend, tmp_path), 2)
