"""Folders with SentencePiece's tokenizer.model alone, against the sentencepiece package and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizer_samples as samples
from tokenizer_samples import TORTURE

from llmx.convert.gguf_vocab import vocabulary
from llmx.errors import UsageError
from llmx.tokenizer import load_tokenizer
from llmx.tokenizer.gguf import from_gguf


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with tokenizer.model alone, trained here."""
    trainer = pytest.importorskip("sentencepiece", reason="sentencepiece makes the file that is read here")
    pytest.importorskip("google.protobuf", reason="transformers reads the file with protobuf")
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = [line for text in samples.CORPUS for line in text.replace("\0", "").split("\n") if line.strip()]
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=430,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": "{{ bos_token }}x"}
    for name, content in {"config": {"model_type": "mistral"}, "tokenizer_config": config}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.slow  # transformers' conversion takes its time
def test_a_sentencepiece_model_reads_as_sentencepiece_and_transformers_read_it(sentencepiece_folder) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    ours = load_tokenizer(sentencepiece_folder)
    oracle = sentencepiece.SentencePieceProcessor(str(sentencepiece_folder / "tokenizer.model"))
    theirs = AutoTokenizer.from_pretrained(sentencepiece_folder)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, oracle.vocab_size())
    for name, text in TORTURE.items():
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = oracle.encode(text)
        if name != "specials inside":  # SentencePiece never reads control tokens in a text
            assert ours.encode(text, add_special=False) == ids
        assert ours.decode(ids) == oracle.decode(ids)
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == oracle.decode(ids)
    assert ours.template is not None


@pytest.mark.slow  # transformers' conversion takes its time
def test_it_becomes_a_gguf_tokenizer_with_its_own_scores(sentencepiece_folder: Path) -> None:
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(str(sentencepiece_folder / "tokenizer.model"))
    made = vocabulary(sentencepiece_folder, 432)
    scores = made.pairs["tokenizer.ggml.scores"]
    assert isinstance(scores, list)
    assert scores[3:430] == [oracle.get_score(i) for i in range(3, 430)]
    ours = from_gguf(made.pairs, "made")
    for name, text in TORTURE.items():
        if name != "specials inside":
            assert ours.encode(text, add_special=False) == oracle.encode(text)


@pytest.mark.parametrize("package", ["transformers", "sentencepiece", "protobuf"])
def test_a_package_that_the_conversion_needs_and_lacks_is_named(tmp_path, monkeypatch, package) -> None:
    from llmx.tokenizer import sentencepiece

    module = {"protobuf": "google.protobuf"}.get(package, package)
    monkeypatch.setattr(sentencepiece, "find_spec", lambda name: None if name == module else object())
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        UsageError, match=rf"no tokenizer\.json, .*tokenizer\.model {package} must be installed"
    ) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint == f"Run: pip install {package}"


@pytest.mark.slow  # transformers' import takes its time
def test_a_broken_sentencepiece_model_is_one_sentence(sentencepiece_folder, tmp_path) -> None:
    whole = (sentencepiece_folder / "tokenizer.model").read_bytes()
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    for content in (b"x", b"", whole[:-7]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(UsageError, match=r"tokenizer\.model can't be converted") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in caught.value.message
