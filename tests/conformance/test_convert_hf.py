"""`llmx convert-hf` against transformers: what it writes of each family's GGUF files gives the same logits and ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import safetensors.torch
import tokenizer_samples as samples
import torch
import transformers
import vocabularies
from tiny_gguf import FORMATS, Inexpressible, write_gguf
from tiny_models import (
    TOLERANCE,
    Double,
    Saved,
    Tiny,
    build,
    distance,
    every_tiny,
    load,
    logits_of,
    make,
    open_folder,
    open_gguf_file,
    prompt_of,
    run,
)
from tokenizer_samples import TORTURE
from torch import Tensor

from llmx.convert.hf import convert
from llmx.convert.texts import LIKE_ANY, tokenizer_texts, write_texts
from llmx.errors import LlmxError, UsageError
from llmx.formats.hub import Located
from llmx.tokenizer import Tokenizer, load_tokenizer
from llmx.tokenizer.splits import SPLITS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TINIES = {tiny.name: tiny for tiny in every_tiny()}
FILES = [(tiny, name) for tiny in TINIES.values() for name in FORMATS.get(tiny.architecture, {})]
LENGTH = 160
EXACT = 1e-5  # of the logits' standard deviation: the numbers are the same, but for rounding of 1 + weight


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("tiny")
    saved.cache_clear()


@cache
def saved(name: str, root: Path) -> Saved:
    return make(TINIES[name], root / name)


def converted(path: Path, **options: Any) -> Path:
    said: list[str] = []
    out = convert(Located("gguf", path, str(path)), path.with_name("out"), said.append, **options).path
    assert not [line for line in said if "warning" in line]
    return out


def theirs(folder: Path, length: int = LENGTH) -> Tensor:
    """transformers' logits of what is in a folder, in f64."""
    with Double():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    return logits_of(model.eval(), prompt_of(model.config.vocab_size, length))


def ours(opened: Any) -> Tensor:
    return run(load(opened, LENGTH)[0], prompt_of(opened.config.vocab, LENGTH)).logits


def expressible(tiny: Tiny, name: str, root: Path, folder: Path) -> bool:
    """Whether a file of that name can hold it: then its own case is not skipped."""
    of = saved(tiny.name, root)
    try:
        write_gguf(folder / f"{tiny.name}.gguf", tiny.architecture, name, of.config, of.tensors)
    except Inexpressible:
        return False
    return True


@pytest.mark.parametrize(("tiny", "name"), FILES, ids=[f"{tiny.name}-{name}" for tiny, name in FILES])
def test_each_familys_files_become_folders_with_the_same_logits(
    tiny: Tiny, name: str, root: Path, tmp_path: Path
) -> None:
    of, path = saved(tiny.name, root), tmp_path / "model.gguf"
    try:
        write_gguf(path, tiny.architecture, name, of.config, of.tensors)
    except Inexpressible as reason:
        others = [other for other, its in FILES if its == name and other is not tiny]
        assert any(expressible(other, name, root, tmp_path) for other in others), f"no TINY fits {name}"
        pytest.skip(str(reason))
    out = converted(path)
    wanted = logits_of(of.model, prompt_of(of.config["vocab_size"], LENGTH))
    assert distance(theirs(out), wanted) < EXACT
    assert distance(ours(open_folder(out)), ours(open_gguf_file(path))) < TOLERANCE
    written = safetensors.torch.load_file(out / "model.safetensors")
    assert written.keys() == of.tensors.keys(), "those of transformers, a tied head not among them"
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}, "the file's own"


def test_a_window_makes_a_llama_file_a_mistral_model(root: Path, tmp_path: Path) -> None:
    of, path = saved("Mistral-0", root), tmp_path / "model.gguf"
    more = {"llama.attention.sliding_window": of.config["sliding_window"]}
    write_gguf(path, "MistralForCausalLM", "llama", {**of.config, "sliding_window": None}, of.tensors, more)
    out = converted(path)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert distance(theirs(out), logits_of(of.model, prompt_of(of.config["vocab_size"], LENGTH))) < EXACT


ORIGINAL = {"original_max_position_embeddings": 128}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "llama3 with other bounds": {
        "rope_type": "llama3", "factor": 5.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0, **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn with betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, **ORIGINAL},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_turns_are_those_of_the_model(kind: str, root: Path, tmp_path: Path) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    config = of.config | {"rope_parameters": {"rope_theta": 500.0, **SCALINGS[kind]}}
    write_gguf(path, "LlamaForCausalLM", "llama", config, of.tensors)
    out = converted(path)
    wanted = logits_of(build(of.tiny.oracle, config, of.gain), prompt_of(of.config["vocab_size"], LENGTH))
    assert distance(wanted, logits_of(of.model, prompt_of(of.config["vocab_size"], LENGTH))) > 0.01, "it shows"
    assert distance(theirs(out), wanted) < (1e-4 if kind.startswith("llama3") else EXACT)  # divisors in float32
    written = json.loads((out / "config.json").read_text())
    if kind == "llama3":  # found again from its divisors
        assert written["rope_scaling"] == SCALINGS[kind]
    assert "rope_parameters" not in written, "which transformers 4 doesn't know"


def test_divisors_that_follow_from_no_rule_are_listed(root: Path, tmp_path: Path) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    divisors = [1 + 0.7 * (i % 3) + 0.1 * i for i in range(8)]
    factors = {"rope_freqs.weight": torch.tensor(divisors)}
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": divisors, "long_factor": divisors}
    rope |= {"attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": 64}
    write_gguf(path, "LlamaForCausalLM", "llama", of.config, of.tensors, raw=factors)
    wanted = build(of.tiny.oracle, of.config | {"rope_parameters": rope}, of.gain)
    out = converted(path)
    assert distance(theirs(out), logits_of(wanted, prompt_of(of.config["vocab_size"], LENGTH))) < 1e-4
    assert distance(ours(open_folder(out)), ours(open_gguf_file(path))) < TOLERANCE


@pytest.mark.parametrize(("name", "kind"), [("Llama-0", "Q8_0"), ("Gemma3-1", "Q4_1"), ("Phi3-0", "Q5_0")])
def test_packed_weights_are_written_as_they_unpack(name: str, kind: str, root: Path, tmp_path: Path) -> None:
    of, path = saved(name, root), tmp_path / "model.gguf"
    write_gguf(path, of.tiny.architecture, next(iter(FORMATS[of.tiny.architecture])), of.config, of.tensors, kind=kind)
    packed = gguf.GGMLQuantizationType[kind]
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)):
        out = converted(path, dtype=dtype, force=True)
        written = safetensors.torch.load_file(out / "model.safetensors")
        for tensor_name, tensor in of.tensors.items():
            if tensor.dim() == 1:  # 1 was added and is taken away again
                torch.testing.assert_close(written[tensor_name], tensor.to(expected), rtol=0.01, atol=1e-5)
                continue
            blocks = gguf.quantize(tensor.numpy(), packed)  # each row by itself, so that permuting them is all the same
            unpacked = torch.from_numpy(gguf.dequantize(blocks, packed))
            assert torch.equal(written[tensor_name], unpacked.to(expected))
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == str(expected).removeprefix("torch.")
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert model.dtype == expected
    assert distance(ours(open_folder(converted(path, dtype=torch.float32, force=True))), ours(open_gguf_file(path))) < (
        TOLERANCE
    )


def test_shards_have_an_index_and_hold_the_same(root: Path, tmp_path: Path) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    write_gguf(path, "LlamaForCausalLM", "llama", of.config, of.tensors)
    out = converted(path, shard=60_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert all(sum(t.nbytes for t in safetensors.torch.load_file(f).values()) <= 60_000 for f in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(of.tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in of.tensors.values())
    assert distance(theirs(out), logits_of(of.model, prompt_of(of.config["vocab_size"], LENGTH))) < EXACT


def test_biases_that_transformers_has_not_are_refused_and_others_kept(root: Path, tmp_path: Path) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    tiny = build(of.tiny.oracle, config := of.config | {"attention_bias": True}, of.gain)
    tensors = {name: p.detach().float() for name, p in tiny.named_parameters()}
    write_gguf(path, "LlamaForCausalLM", "llama", config, tensors)
    assert distance(theirs(converted(path)), logits_of(tiny, prompt_of(config["vocab_size"], LENGTH))) < EXACT
    some = {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}
    write_gguf(path, "LlamaForCausalLM", "llama", config, some)
    with pytest.raises(UsageError, match="biases on k_proj, q_proj, v_proj"):
        converted(path, force=True)


def test_numbers_that_float16_can_not_hold_are_an_error_and_leave_nothing(root: Path, tmp_path: Path) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    tensors = dict(of.tensors)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] * 1e6
    write_gguf(path, "LlamaForCausalLM", "llama", of.config, tensors)
    with pytest.raises(LlmxError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has numbers too large for float16"):
        converted(path, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == [path]


def test_a_config_that_says_something_else_is_caught(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, path = saved("Llama-0", root), tmp_path / "model.gguf"
    write_gguf(path, "LlamaForCausalLM", "llama", of.config, of.tensors)
    family = open_gguf_file(path).family
    right = family.Config.to_hf
    for key, value in (("rms_norm_eps", 1e-4), ("rope_theta", 501.0), ("head_dim", 8), ("hidden_act", "gelu")):
        monkeypatch.setattr(family.Config, "to_hf", lambda *given, k=key, v=value: right(*given) | {k: v})
        with pytest.raises(LlmxError, match="This is a bug"):
            converted(path)
    assert list(tmp_path.iterdir()) == [path]


# ---- tokenizers -------------------------------------------------------------------------------------------


def sentencepiece(prefix: bool) -> dict[str, Any]:
    """Llama 2's vocabulary as a GGUF file has it: scores that fall with the rank of a merge."""
    oracle = samples.llama2()
    vocab = oracle.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [left + right for left, right in samples.merges(oracle)]
    ranks = {token: rank for rank, token in reversed(list(enumerate(merges)))}
    return vocabularies.spm(prefix) | {
        "tokenizer.ggml.tokens": [*tokens, "<x>", "\n\n\n\n"],
        "tokenizer.ggml.scores": [*(-float(ranks.get(token, 0)) for token in tokens), -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259) + [4, 4],
    }


KINDS = {pre: vocabularies.byte_level(pre) for pre in {split: pre for pre, split in SPLITS.items()}.values()}
KINDS |= {"llama 2": sentencepiece(True), "gemma": sentencepiece(False)}
KINDS |= {"gpt-2 with eos": KINDS["gpt-2" if "gpt-2" in KINDS else next(iter(KINDS))] | {
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}}  # fmt: skip
KINDS |= {"phi-3": sentencepiece(False) | {"general.name": "Phi-3 mini"}}
TEXTS = [*TORTURE.values(), *LIKE_ANY, *vocabularies.TEXTS, *vocabularies.SPM_TEXTS[1:], "<x>  b\n\n\n\na"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_file_and_folder_and_transformers_agree(kind: str, tmp_path: Path) -> None:
    metadata = KINDS[kind]
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer("model.gguf", metadata | {"tokenizer.chat_template": template})
    write_texts(tokenizer_texts(tokenizer, 512), tmp_path)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": min(tokenizer.eos_ids)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written, auto = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert written.encode(text) == ids, text
        assert auto(text).input_ids == ids or _twice(tokenizer, ids, auto(text).input_ids), text
        assert written.decode(ids) == tokenizer.decode(ids)
        assert auto.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (written.bos_id, written.eos_ids, written.add_bos) == (
        tokenizer.bos_id,
        tokenizer.eos_ids,
        tokenizer.add_bos,
    )
    assert written.special_ids == tokenizer.special_ids
    messages = [{"role": "user", "content": "hé"}]
    assert tokenizer.template is not None
    assert auto.apply_chat_template(messages, tokenize=False) == tokenizer.template.render(messages)


def _twice(tokenizer: Tokenizer, ids: list[int], theirs: list[int]) -> bool:
    """Whether transformers has put BOS or EOS beside one that was in the text already."""
    before, after = tokenizer.frame
    whole = [*before, *ids] if before and ids[: len(before)] == before else ids
    return theirs in (whole, [*ids, *after], [*whole, *after])


def test_added_tokens_that_merging_makes_too_and_the_gap_in_scores_stay_as_in_the_file(tmp_path: Path) -> None:
    """Random SentencePiece vocabularies whose scores differ: each text is cut alike."""
    generator = torch.Generator().manual_seed(5)

    def drawn(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    for _ in range(20):
        words = sorted({"".join("ab▁"[drawn(3)] for _ in range(1 + drawn(4))) for _ in range(40)} | set("ab▁"))
        metadata = vocabularies.spm(prefix=False)
        tokens = [*metadata["tokenizer.ggml.tokens"][:259], *words]
        order = torch.randperm(len(words), generator=generator).tolist()
        metadata |= {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in order],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        }
        tokenizer = load_tokenizer("model.gguf", metadata)
        write_texts(tokenizer_texts(tokenizer, 512), tmp_path)
        written = load_tokenizer(tmp_path)
        agree = [
            tokenizer.encode(text) == written.encode(text)
            for text in ("".join("ab "[drawn(3)] for _ in range(30)) for _ in range(20))
        ]
        assert all(agree)


def test_the_demo_model_keeps_its_ids_and_files(demo: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(demo)
    write_texts(tokenizer_texts(tokenizer, 8192), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert auto(text).input_ids == tokenizer.encode(text)
    assert (auto.bos_token, auto.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert math.isclose(auto.model_max_length, 8192)
