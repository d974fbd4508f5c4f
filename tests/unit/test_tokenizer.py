"""Tokenizers against tokenizers' and transformers' own, and streams against whole decodings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizer_samples as samples
import tokenizers
from tokenizer_samples import TORTURE
from tokenizers import decoders, models, pre_tokenizers

from llmx.errors import LlmxError, RequestError, UsageError
from llmx.tokenizer import Tokenizer, load_tokenizer

BUILT = {"byte-level": samples.byte_level, "llama 2": samples.llama2, "metaspace": samples.metaspace}
CONFIG = {"bos_token": "<|begin|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>"}}


@pytest.fixture(scope="module", params=BUILT)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours, read from a folder, and the library's own."""
    folder = samples.save(BUILT[request.param](), tmp_path_factory.mktemp("model"))
    return load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(
        samples.save(samples.byte_level(), tmp_path_factory.mktemp("llama3"), tokenizer_config=CONFIG)
    )


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return load_tokenizer(samples.save(samples.llama2(), tmp_path_factory.mktemp("llama2"), tokenizer_config=config))


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    stream = tokenizer.stream(prompt, skip)
    return [*(stream.push(i) for i in ids), stream.flush()]


# ---- encoding and decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TORTURE.values(), ids=TORTURE)
def test_a_text_becomes_the_ids_and_the_text_of_the_tokenizers_library(pair, text) -> None:
    ours, oracle = pair
    ids = oracle.encode(text, add_special_tokens=True).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids) == oracle.decode(ids)
    assert ours.decode(ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TORTURE.values(), ids=TORTURE)
def test_byte_level_text_survives_the_round_trip(llama3, text) -> None:
    assert llama3.decode(llama3.encode(text, add_special=False), skip_special=False) == text


def test_every_piece_is_what_the_library_decodes_it_to(pair) -> None:
    ours, oracle = pair
    letter = oracle.encode(
        "a", add_special_tokens=False
    ).ids  # in front, so that no rule about a text's beginning applies
    before = oracle.decode(letter)
    for token_id in range(ours.vocab_size):
        piece = ours.piece(token_id)
        if "é" in (oracle.id_to_token(token_id) or "") and token_id in oracle.get_added_tokens_decoder():
            assert piece.decode() == "<think>é"  # literal; the library takes its é for a byte
        elif b"<0x" not in piece and oracle.id_to_token(token_id)[:3] != "<0x":
            text = oracle.decode([*letter, token_id], skip_special_tokens=False)
            assert piece.decode(errors="replace") == text.removeprefix(before)


@pytest.mark.parametrize("skip", [True, False])
def test_what_a_stream_gives_is_together_the_decoding_at_once(pair, skip) -> None:
    ours, _ = pair
    rng = random.Random(1)
    for length in (0, 1, 2, 3, 5, 8, 40):
        for _ in range(60):
            ids = samples.random_ids(rng, ours.vocab_size, length)
            assert "".join(streamed(ours, ids, skip=skip)) == ours.decode(ids, skip_special=skip)


def test_random_bytes_decode_as_python_decodes_them(llama3) -> None:
    rng = random.Random(2)
    for _ in range(300):
        ids = [i for i in samples.random_ids(rng, llama3.vocab_size, 12) if i not in llama3.special_ids]
        assert llama3.decode(ids) == b"".join(map(llama3.piece, ids)).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", TORTURE.values(), ids=TORTURE)
def test_a_stream_never_shows_a_broken_character_nor_holds_back_a_whole_one(pair, text) -> None:
    ours, oracle = pair
    ids = ours.encode(text, add_special=False)
    stream, data, shown = ours.stream(), b"", ""
    for token_id in ids:
        data += ours.piece(token_id) if token_id not in ours.special_ids else b""
        shown += stream.push(token_id)
        whole = data.decode("utf-8", errors="ignore")  # leaves out the incomplete character at the end
        assert shown in (whole, whole.removeprefix(" "))
    assert shown.count("\ufffd") == oracle.decode(ids).count("\ufffd") <= text.count("\ufffd")
    assert stream.flush() == ""


def test_a_text_cut_inside_a_character_ends_with_one_replacement(pair) -> None:
    ours, _ = pair
    for text in ("hi🫠", "ď龜"):
        data = text.encode()
        for cut in range(1, len(data)):
            ids = ours.encode(text, add_special=False)
            if all(len(ours.piece(i)) == 1 for i in ids[-cut:]):
                shown = streamed(ours, ids[:-cut])
                assert "\ufffd" not in "".join(shown[:-1])
                assert shown[-1] in ("", "\ufffd")


@pytest.mark.parametrize("text", [t for t in TORTURE.values() if t], ids=[n for n, t in TORTURE.items() if t])
def test_a_stream_after_a_prompt_continues_its_text(pair, text) -> None:
    ours, _ = pair
    ids = ours.encode(text)
    for cut in range(len(ids)):
        before, after = tuple(ids[:cut]), ids[cut:]
        if ours.stream(before).pending:
            continue
        assert ours.decode(before) + "".join(streamed(ours, after, before)) == ours.decode(ids)


def test_a_character_that_the_prompt_begins_is_completed(llama3) -> None:
    ids = llama3.encode("🫠", add_special=False)
    assert len(ids) > 2
    for cut in range(1, len(ids)):
        assert "".join(streamed(llama3, ids[cut:], tuple(ids[:cut]))) == "🫠"


def test_the_space_at_a_texts_beginning_is_kept_where_a_prompt_comes_before(llama2) -> None:
    world = llama2.encode(" world", add_special=False)
    assert llama2.decode(llama2.encode("world")) == "world"
    assert "".join(streamed(llama2, llama2.encode("it", add_special=False))) == "it"
    assert "".join(streamed(llama2, llama2.encode("it", add_special=False), tuple(world))) == " it"
    assert "".join(streamed(llama2, llama2.encode("it", add_special=False), (1,))) == "it"  # BOS alone is no text


def test_as_many_leading_spaces_are_stripped_as_the_decoder_says(tmp_path) -> None:
    backend = samples.llama2()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    backend.decoder = decoders.Sequence(steps)
    ours = load_tokenizer(samples.save(backend, tmp_path))
    for text in ("a", " a", "   a b", "     "):
        assert ours.decode(ours.encode(text)) == backend.decode(backend.encode(text).ids)


def test_a_stream_reads_only_the_ends_of_a_long_prompt(llama2) -> None:
    class Counted(tuple[int, ...]):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    prompt = Counted(llama2.encode("a long story ") * 2000)
    llama2.stream(prompt)
    assert Counted.reads <= 8


# ---- special tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_bos_comes_exactly_once(name, request) -> None:
    tokenizer = request.getfixturevalue(name)
    bos = tokenizer.token(tokenizer.bos_id)
    for text in ("hello", bos + "hello", "", bos):
        assert tokenizer.encode(text).count(tokenizer.bos_id) == 1
        assert tokenizer.encode(text)[0] == tokenizer.bos_id
    assert tokenizer.bos_id not in tokenizer.encode("hello", add_special=False)


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_only_the_post_processor_says_what_is_put_around_a_text_as_in_transformers(tmp_path, more, processor) -> None:
    from transformers import AutoTokenizer

    config = CONFIG | more | {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = samples.save(samples.byte_level(bos=processor), tmp_path, tokenizer_config=config)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.add_bos == processor
    assert tokenizer.encode("x") == AutoTokenizer.from_pretrained(folder)("x")["input_ids"]


def test_spaces_are_not_cleaned_up_after_bpe_as_in_transformers(tmp_path) -> None:
    from transformers import AutoTokenizer

    config = CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    folder = samples.save(samples.byte_level(), tmp_path, tokenizer_config=config)
    oracle = AutoTokenizer.from_pretrained(folder)
    assert oracle.clean_up_tokenization_spaces
    text = "do n't , please . I 'm ' here ' !"
    ids = load_tokenizer(folder).encode(text, add_special=False)
    assert load_tokenizer(folder).decode(ids) == oracle.decode(ids) == text


def test_cleaning_up_spaces_after_another_model_is_refused(tmp_path) -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)], 0))
    backend.decoder = decoders.Metaspace()
    samples.save(backend, tmp_path, tokenizer_config={"clean_up_tokenization_spaces": True})
    with pytest.raises(UsageError, match="clean_up_tokenization_spaces of a Unigram tokenizer"):
        load_tokenizer(tmp_path)


def test_special_tokens_in_a_text_are_plain_text_when_asked(llama3) -> None:
    text = "a<|end|>b<|begin|>"
    assert {0, 1} <= set(llama3.encode(text, add_special=False))
    plain = llama3.encode(text, add_special=False, parse_special=False)
    assert not llama3.special_ids.intersection(plain)
    assert llama3.decode(plain) == text
    assert {0, 1} <= set(llama3.encode(text, add_special=False))  # nothing was switched for good


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(tmp_path) -> None:
    for n, (files, expected) in enumerate(
        [
            ({}, {1}),
            ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 7}}, {1, 5, 6}),
            ({"config": {"eos_token_id": 7}}, {1, 7}),
            ({"generation_config": {"eos_token_id": 3}}, {1, 3}),
        ]
    ):
        folder = samples.save(samples.byte_level(), tmp_path / str(n), tokenizer_config=CONFIG, **files)
        assert load_tokenizer(folder).eos_ids == expected


def test_special_tokens_map_is_read_where_the_config_says_nothing(tmp_path) -> None:
    folder = samples.save(samples.byte_level(), tmp_path, special_tokens_map=CONFIG)
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).eos_ids) == (0, {1})


def test_tokens_in_print_are_text_or_bytes(llama3) -> None:
    ids = llama3.encode("🫠", add_special=False)
    assert all(llama3.token(i).startswith("bytes:\\x") for i in ids)
    assert b"".join(bytes.fromhex(llama3.token(i)[6:].replace("\\x", "")) for i in ids).decode() == "🫠"
    assert llama3.token(0) == "<|begin|>"


def test_ids_outside_the_vocabulary_stand_for_nothing(pair) -> None:
    ours, _ = pair
    for token_id in (-1, ours.vocab_size, 2**31, 2**70):
        assert ours.piece(token_id) == b""
        assert ours.decode([token_id]) == ours.token(token_id) == ""


def test_a_saved_truncation_does_not_cut_prompts(tmp_path) -> None:
    backend = samples.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(samples.save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode("a rather long text")) == "a rather long text"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_half_a_surrogate_pair_is_refused(pair, text) -> None:
    with pytest.raises(RequestError, match="surrogate pair"):
        pair[0].encode(text)


# ---- against transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "llama 2"])
def test_a_folder_reads_as_transformers_reads_it(tmp_path, name) -> None:
    from transformers import PreTrainedTokenizerFast

    config = CONFIG if name == "byte-level" else {"bos_token": "<s>", "eos_token": "</s>"}
    folder = samples.save(BUILT[name](), tmp_path, tokenizer_config=config)
    ours, oracle = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_ids) == (oracle.bos_token_id, {oracle.eos_token_id})
    for text in TORTURE.values():
        assert ours.encode(text) == oracle(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == oracle.decode(ours.encode(text), skip_special_tokens=True)


@pytest.mark.slow  # transformers' reader takes its time
def test_the_demo_model_reads_as_transformers_reads_it(demo) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(demo)
    oracle = AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    oracle._tokenizer.pre_tokenizer = ORACLES[
        "smollm"
    ]()  # transformers takes GPT-2's, without the model's single digits
    assert (ours.vocab_size, ours.bos_id, ours.add_bos) == (49152, 1, False)
    assert oracle.eos_token_id in ours.eos_ids
    for text in TORTURE.values():
        ids = ours.encode(text)
        assert ids == oracle(text)["input_ids"]
        assert ours.decode(ids, skip_special=False) == text
    messages = [{"role": "user", "content": "Hi 🫠"}]
    assert ours.template is not None
    rendered = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.template.render(messages) == rendered


# ---- GGUF -------------------------------------------------------------------------------------------------


def test_a_gguf_tokenizer_is_the_one_it_was_made_from(llama3) -> None:
    backend = samples.byte_level()
    ours = load_tokenizer("model.gguf", samples.gguf_metadata(backend))
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids, ours.add_bos) == (llama3.vocab_size, 0, {1}, True)
    assert ours.special_ids == llama3.special_ids
    for text in [*TORTURE.values(), "a<think>éb"]:
        assert ours.encode(text) == llama3.encode(text)
        assert ours.decode(ours.encode(text), skip_special=False) == "<|begin|>" + text


CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ORACLES: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {  # as those models' own tokenizer.json have them
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: split_as(CASELESS + r"\p{N}{1,3}" + ENDING),
    "qwen2": lambda: split_as(CASELESS + r"\p{N}" + ENDING),
}


def split_as(regex: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [word for word, _ in tokenizer.backend.inner.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ORACLES)
def test_words_are_split_as_the_original_tokenizer_splits_them(pre) -> None:
    ours = load_tokenizer("model.gguf", samples.gguf_metadata(samples.byte_level(), pre))
    for text in TORTURE.values():
        assert words(ours, text) == [word for word, _ in ORACLES[pre]().pre_tokenize_str(text)]


def test_the_default_split_is_that_of_llama_cpp() -> None:
    ours = load_tokenizer("model.gguf", samples.gguf_metadata(samples.byte_level(), "default"))
    assert words(ours, "a1234567, b's") == ["a", "123", "456", "7", ",", "Ġb", "'", "s"]


def test_a_gguf_that_says_nothing_of_bos_adds_it_only_for_llama_3() -> None:
    for pre, expected in (("llama-bpe", True), ("gpt-2", False)):
        metadata = samples.gguf_metadata(samples.byte_level(), pre)
        del metadata["tokenizer.ggml.add_bos_token"]
        assert load_tokenizer("model.gguf", metadata).add_bos == expected


def test_a_gguf_ends_at_all_its_end_tokens() -> None:
    metadata = samples.gguf_metadata(samples.byte_level(), **{"ggml.eot_token_id": 7})
    metadata["tokenizer.ggml.tokens"][0] = "<|im_end|>"  # known by its text, and a control token
    metadata["tokenizer.ggml.tokens"][9] = "<|eot_id|>"  # by its text, but an ordinary token: not taken
    assert load_tokenizer("model.gguf", metadata).eos_ids == {0, 1, 7}


BROKEN = {
    "model": ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not built; built are 'gpt2' .* and 'llama'"),
    "no model": ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    "pre": ({"tokenizer.ggml.pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2' is not built; built are .*qwen2"),
    "pre type": ({"tokenizer.ggml.pre": ["x"]}, "tokenizer.ggml.pre must be a string"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
    "empty tokens": ({"tokenizer.ggml.tokens": []}, "421 entries for 0 tokens"),
    "token type": ({"tokenizer.ggml.tokens": [1, 2]}, "list of strings"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "'a' twice"),
    "kinds": ({"tokenizer.ggml.token_type": [1]}, "1 entries for"),
    "kinds type": ({"tokenizer.ggml.token_type": "xyz"}, "token_type"),
    "kinds values": ({"tokenizer.ggml.token_type": [None] * 421}, "token_type"),
    "no merges": ({"tokenizer.ggml.merges": None}, "merges is missing"),
    "merge": ({"tokenizer.ggml.merges": ["ab"]}, "not two tokens"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["q zzz"]}, "don't fit"),
    "bos": ({"tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id"),
    "eos": ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id"),
    "eos type": ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id"),
    "add bos": ({"tokenizer.ggml.add_bos_token": 7}, "add_bos_token"),
    "template": ({"tokenizer.chat_template": 3}, "chat_template"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_gguf_tokenizer_is_one_sentence(case) -> None:
    change, message = BROKEN[case]
    with pytest.raises(UsageError, match=message) as caught:
        load_tokenizer("some.gguf", samples.gguf_metadata(samples.byte_level()) | change)
    assert caught.value.message.startswith("some.gguf: ")


# ---- broken folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", '{"model": {}}', '{"model": NaN}', "[" * 100_000, "\udcff"),
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
    ],
)
def test_a_broken_tokenizer_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("x+"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
    ],
    ids=str,
)
def test_a_decoder_that_is_not_built_is_refused(tmp_path, decoder) -> None:
    backend = samples.byte_level()
    described = json.loads(backend.to_str())
    described["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match="decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"eos_token_id": "x"}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": [-1]}}, "eos_token_id"),
        ({"tokenizer_config": {"chat_template": 1}}, "chat_template"),
        ({"tokenizer_config": []}, "tokenizer_config.json must hold a JSON object"),
    ],
)
def test_a_wrong_config_beside_it_is_one_sentence(tmp_path, files, message) -> None:
    with pytest.raises(LlmxError, match=message):
        load_tokenizer(samples.save(samples.byte_level(), tmp_path, **files))


def test_a_folder_without_a_tokenizer_says_what_it_has_instead(tmp_path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tekken\.json nor tokenizer\.model; its vocab\.json is not read") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint
