"""Tokenizers of GGUF files: ids that llama.cpp gives, and a plain reading of SentencePiece's rule."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import tokenizer_samples as samples
import vocabularies
from tokenizer_samples import TORTURE

from llmx.errors import RequestError, UsageError
from llmx.tokenizer import Tokenizer, load_tokenizer
from llmx.tokenizer.splits import SPLITS
from llmx.tokenizer.spm import SPACE, SpmBackend


def load(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer("model.gguf", metadata)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


# ---- words of byte-level BPE ------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", SPLITS)
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(pre) -> None:
    first = next(name for name, split in SPLITS.items() if split == SPLITS[pre])
    tokenizer = load(vocabularies.byte_level(pre))
    for text, expected in zip(vocabularies.TEXTS, vocabularies.SPLIT_IDS[first], strict=True):
        assert tokenizer.encode(text, add_special=False) == numbers(expected)
        assert tokenizer.decode(numbers(expected), skip_special=False) == text


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_case_is_that_of_all_alphabets_where_the_model_itself_says_so(pre) -> None:
    tokenizer = load(vocabularies.byte_level(pre))
    words = [word for word, _ in tokenizer.backend.inner.pre_tokenizer.pre_tokenize_str("приветМИР éaÀB")]
    decoded = [bytes(vocabularies.BYTE_ALPHABET[c] for c in word).decode() for word in words]
    assert decoded == ["привет", "МИР", " éa", "ÀB"]


def test_a_whole_word_in_the_vocabulary_is_taken_only_where_the_model_does_so() -> None:
    for pre, split in SPLITS.items():
        metadata = vocabularies.byte_level(pre)
        metadata["tokenizer.ggml.tokens"].insert(-1, "qqq")  # no merge makes it
        metadata["tokenizer.ggml.token_type"].append(3)
        metadata["tokenizer.ggml.token_type"][-2] = 1
        ids = load(metadata).encode("qqq", add_special=False)
        assert (len(ids) == 1) == split.whole_words


def test_add_eos_token_in_a_file_puts_eos_after_a_text_once() -> None:
    for make in (vocabularies.byte_level, lambda _: vocabularies.spm()):
        metadata = make("gpt-2") | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": False}
        tokenizer = load(metadata)
        eos = metadata["tokenizer.ggml.eos_token_id"]
        assert tokenizer.encode("ab")[-1] == eos
        assert tokenizer.encode("ab") == [*tokenizer.encode("ab", add_special=False), eos]
        assert tokenizer.encode("ab" + tokenizer.token(eos)).count(eos) == 1
        assert load(metadata | {"tokenizer.ggml.add_eos_token": False}).encode("ab")[-1] != eos


# ---- SentencePiece ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "parse"), vocabularies.SPM_IDS)
def test_sentencepiece_gives_the_ids_of_llama_cpp(prefix, parse) -> None:
    tokenizer = load(vocabularies.spm(prefix))
    for text, expected in zip(vocabularies.SPM_TEXTS, vocabularies.SPM_IDS[prefix, parse], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=parse) == numbers(expected)


def merged_plainly(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """Again and again the neighbours that make the token with the highest score, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [symbols[n] + symbols[n + 1] for n in range(len(symbols) - 1)]
        found = [(-scores[ids[pair]], n) for n, pair in enumerate(pairs) if pair in ids]
        if not found:
            return symbols
        _, at = min(found)
        symbols[at : at + 2] = [pairs[at]]


def test_merging_is_the_plain_rule_on_random_vocabularies_and_texts() -> None:
    rng = random.Random(3)
    for _ in range(60):
        alphabet = f"ab{SPACE}{SPACE}"
        tokens = sorted({"".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(40)} | set(alphabet))
        scores = [float(rng.randint(-6, 0)) for _ in tokens]  # many are equal
        ids = {token: n for n, token in enumerate(tokens)}
        backend = SpmBackend(tokens, scores, [], prefix=False, unknown=0)
        for length in (0, 1, 5, 20, 60, 200):  # longer than what is kept, too
            text = "".join(rng.choices(f"ab {SPACE}", k=length))
            expected = [ids[symbol] for symbol in merged_plainly(text.replace(" ", SPACE), ids, scores)]
            assert backend.encode(text, True) == expected


def test_characters_that_are_no_token_are_bytes_or_else_the_unknown_token() -> None:
    metadata = vocabularies.spm(prefix=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert load(metadata).encode("龜", add_special=False) == [tokens.index(f"<0x{b:02X}>") for b in "龜".encode()]
    tokens[tokens.index("<0xE9>")] = "no byte"
    assert load(metadata).encode("龜a龜", add_special=False) == [0, tokens.index("a"), 0]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", TORTURE.values(), ids=TORTURE)
def test_sentencepiece_text_survives_the_round_trip_and_streams(prefix, text) -> None:
    tokenizer = load(vocabularies.spm(prefix))
    text = text.replace(SPACE, "")  # which is a space once it is encoded
    ids = tokenizer.encode(text, parse_special=False)
    if prefix:  # what follows a user-defined token gets its own space, which is not taken away again
        text = re.sub(r"\n(?=[^\n])", "\n ", text)
    stream = tokenizer.stream()
    assert tokenizer.decode(ids) == text
    assert "".join([*map(stream.push, ids), stream.flush()]) == text
    for cut in range(1, len(ids)):
        if not tokenizer.stream(ids[:cut]).pending:
            after = tokenizer.stream(ids[:cut])
            assert tokenizer.decode(ids[:cut]) + "".join(map(after.push, ids[cut:])) + after.flush() == text


def test_the_beginning_and_end_of_a_sentencepiece_text() -> None:
    metadata = vocabularies.spm()
    tokenizer = load(metadata)  # nothing said: BOS is added
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_ids) == (True, 1, {2})
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special=False)]
    assert tokenizer.encode("<s>a").count(1) == 1
    assert tokenizer.special_ids == {0, 1, 2}  # user-defined tokens are text
    for key in ("bos", "eos"):
        del metadata[f"tokenizer.ggml.{key}_token_id"]
    assert (load(metadata).bos_id, load(metadata).eos_ids) == (1, {2})


def test_spaces_after_the_tokens_of_phi_3_are_swallowed() -> None:
    for name, lost in (("Phi-3 mini", True), ("Other", False)):
        tokenizer = load(vocabularies.spm(prefix=False) | {"general.name": name})
        assert (tokenizer.encode("<x>  a") == tokenizer.encode("<x>a")) == lost
        assert tokenizer.encode("<s>  a") != tokenizer.encode("<s>a")


def test_half_a_surrogate_pair_is_refused_by_sentencepiece_too() -> None:
    with pytest.raises(RequestError, match="surrogate pair"):
        load(vocabularies.spm()).encode("a\ud800")


def test_work_on_a_long_text_without_spaces_does_not_grow_faster_than_the_text(monkeypatch) -> None:
    import heapq

    counted = []
    push = heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda queue, item: (counted.append(1), push(queue, item))[1])
    tokenizer = load(vocabularies.spm())
    work = []
    for length in (2000, 4000):
        counted.clear()
        assert len(tokenizer.encode("a" * length)) < length
        work.append(len(counted))
    assert work[1] <= 2.1 * work[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.scores": [1.0]}, "scores has 1 entries for 288 tokens"),
        ({"tokenizer.ggml.scores": ["x"] * 288}, "tokenizer.ggml.scores must be"),
        ({"tokenizer.ggml.add_space_prefix": 3}, "add_space_prefix"),
        ({"tokenizer.ggml.tokens": ["a"] * 288}, "has 'a' twice"),
        ({"tokenizer.ggml.bos_token_id": 288}, "bos_token_id"),
    ],
)
def test_a_wrong_sentencepiece_vocabulary_is_one_sentence(change, message) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(vocabularies.spm() | change)
    assert caught.value.message.startswith("model.gguf: ")


def test_a_sentencepiece_folder_and_a_gguf_of_the_same_vocabulary_agree() -> None:
    """The library's BPE behind Llama 2's tokenizer.json is an independent reading of the same rule."""
    oracle = samples.llama2()
    vocab = oracle.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [left + right for left, right in samples.merges(oracle)]
    ranks = {token: rank for rank, token in reversed(list(enumerate(merges)))}
    metadata = vocabularies.spm() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 0)) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
    }
    ours = load(metadata)
    for text in TORTURE.values():
        assert ours.encode(text) == oracle.encode(text).ids
        assert ours.decode(oracle.encode(text).ids) == oracle.decode(oracle.encode(text).ids)
