"""convert-gguf, convert-hf and convert-gguf again: the same file, for every family, tokenizer and rule of turning."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizer_samples as samples
import tokenizers
import torch
import yaml
from tiny_models import Tiny, build, every_tiny, save

from llmx.convert import hf
from llmx.convert.gguf_about import about, card_of, generation_of
from llmx.convert.gguf_run import Wanted, convert
from llmx.convert.gguf_types import Asked
from llmx.errors import UsageError
from llmx.formats.hub import Located

TINIES = {tiny.name: tiny for tiny in every_tiny()}
SAYS: list[str] = []
ORIGINAL = {"original_max_position_embeddings": 64}
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
}
CARD = """---
license: other
license_name: tiny
license_link: https://example.com/license
base_model:
- upstream/Tiny-1B-v0.2
- https://example.com/model
datasets: upstream/texts
language: [en, cs]
pipeline_tag: text-generation
---
# Tiny
"""


def files(path: Path) -> list[Path]:
    """All parts of a model whose first is `path`."""
    return sorted(path.parent.glob(path.name.replace("00001", "*"))) if "-of-" in path.name else [path]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata: key -> type and value, tensors: name -> type and bytes), in order, as the gguf package reads them."""
    pairs: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in files(path):
        reader = gguf.GGUFReader(part)
        for key, field in reader.fields.items():
            if not key.startswith(("GGUF.", "split.")):
                pairs[key] = (field.types, field.contents())
        tensors |= {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in reader.tensors}
    return pairs, tensors


def to_gguf(folder: Path, out: Path, kind: str, **options: Any) -> Path:
    wanted = Wanted(Asked(kind), out, **options)
    return Path(convert(Located("hf", folder, folder.name), wanted, lambda done, total: None, SAYS.append)["paths"][0])


def to_hf(path: Path, out: Path) -> Path:
    return hf.convert(Located("gguf", path, path.name), out, SAYS.append, dtype=torch.float32).path


def there_and_back(folder: Path, kind: str, **options: Any) -> tuple[Path, Path]:
    """Two files that hold the same, the second from a folder made of the first."""
    torch.set_num_threads(1)
    first = to_gguf(folder, folder.parent / "first.gguf", kind, **options)
    back = to_hf(first, folder.parent / "back")
    second = to_gguf(back, folder.parent / "second.gguf", kind)
    (pairs, tensors), (pairs_again, tensors_again) = read(first), read(second)
    assert pairs_again == pairs
    assert list(pairs_again) == list(pairs)
    assert tensors_again == tensors
    assert list(tensors_again) == list(tensors)
    return first, back


def folder_of(path: Path, tiny: Tiny, rows: int, more: dict[str, Any] | None = None) -> Path:
    tiny = replace(tiny, options={**tiny.options, "vocab_size": rows, "eos_token_id": 1, "bos_token_id": 0})
    config = tiny.config_json()
    return save(path, config | (more or {}), build(tiny.oracle, config))


def byte_level() -> tokenizers.Tokenizer:
    """With added tokens of all kinds, some past a gap of rows that padding fills."""
    backend = samples.byte_level()
    backend.add_special_tokens(["<|eot_id|>", "<|eom_id|>", "[PAD424]"])
    backend.add_tokens([tokenizers.AddedToken("  two  spaces", normalized=False), "plain added"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = samples.llama2()
    backend.add_tokens([tokenizers.AddedToken("  ", normalized=False), tokenizers.AddedToken("\n\n", normalized=False)])
    return backend


ENDS = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|eom_id|>"}
NAMED = [{"name": "default", "template": "{{ messages[0].content }} é"}, {"name": "tool_use", "template": "B\n"}]
KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], int, dict[str, Any]]] = {
    "byte-level": (byte_level, 432, ENDS | {"chat_template": NAMED}),
    "SentencePiece": (metaspace, 480, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
}


def with_tokenizer(folder: Path, kind: str) -> Path:
    backend, _, config = KINDS[kind]
    return samples.save(backend(), folder, tokenizer_config=config, generation_config={"eos_token_id": [1, 421]})


@pytest.mark.parametrize(("kind", "stored"), [("byte-level", "f32"), ("SentencePiece", "q8_0")])
@pytest.mark.parametrize("name", TINIES)
def test_every_familys_file_comes_back_as_it_was(name: str, kind: str, stored: str, tmp_path: Path) -> None:
    folder = with_tokenizer(folder_of(tmp_path / "Tiny-7B-chat", TINIES[name], KINDS[kind][1]), kind)
    if TINIES[name].options.get("use_sliding_window"):
        with pytest.raises(UsageError, match="don't store sliding windows"):
            there_and_back(folder, stored)
        return
    first, _ = there_and_back(folder, stored)
    pairs, _ = read(first)
    kinds = pairs["tokenizer.ggml.token_type"][1]
    assert set(kinds) == ({1, 3, 4, 5} if kind == "byte-level" else {1, 2, 3, 4, 5, 6}), "all kinds of tokens"


@pytest.mark.parametrize("stored", ["q4_0", "q4_1", "q5_0", "q5_1", "f16", "bf16"])
def test_every_type_whose_grid_follows_from_its_numbers_comes_back(stored: str, tmp_path: Path) -> None:
    there_and_back(with_tokenizer(folder_of(tmp_path / "m", TINIES["Llama-0"], 432), "byte-level"), stored)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_every_rule_of_turning_comes_back_and_both_styles_make_one_file(kind: str, style: str, tmp_path: Path) -> None:
    rule = {"rope_type": kind, **ROPES[kind]}
    parts = {"rope_theta": 500.0, "rope_scaling": rule} if style == "rope_scaling" else {
        "rope_parameters": {"rope_theta": 500.0, **rule}}  # fmt: skip
    folder = with_tokenizer(folder_of(tmp_path / "m", TINIES["Llama-0"], 432), "byte-level")
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | parts))
    first, back = there_and_back(folder, "f32")
    assert json.loads((back / "config.json").read_text())["rope_scaling"] == rule | (
        {"beta_fast": 32.0, "beta_slow": 1.0} if kind == "yarn" else {}
    )
    other = {"rope_parameters": {"rope_theta": 500.0, **rule}} if style == "rope_scaling" else {
        "rope_theta": 500.0, "rope_scaling": rule}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | other))
    assert to_gguf(folder, tmp_path / "other.gguf", "f32").read_bytes() == first.read_bytes()


def test_a_split_file_with_a_card_and_a_template_of_its_own_comes_back(tmp_path: Path) -> None:
    folder = with_tokenizer(folder_of(tmp_path / "Tiny-0.2B-Instruct", TINIES["Llama-0"], 432), "byte-level")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }}{% endfor %}")
    (folder / "README.md").write_text(CARD)
    sampling = {"eos_token_id": [1, 421], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    first, back = there_and_back(folder, "f32", most=200_000)
    assert len(files(first)) > 1
    pairs = {key: value for key, (_, value) in read(first)[0].items()}
    assert pairs["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text()
    assert pairs["general.base_model.0.repo_url"] == "https://huggingface.co/upstream/Tiny-1B-v0.2"
    again = json.loads((back / "generation_config.json").read_text())
    assert {key: again[key] for key in sampling} == sampling | {"eos_token_id": [1, 421, 422]}, "<|eom_id|> by its text"


@pytest.mark.parametrize(
    "name",
    [
        *("Tiny-0.2M-Instruct", "tiny", "Llama-3.2-1B-Instruct", "Phi-3-mini-4k-instruct", "OLMo-2-0425-1B", "phi-4"),
        *("bloom-7b1", "Mixtral-8x7B-Instruct-v0.1", "Llama-3-8B-262k", "x-q4_k-fp16", "v2", "Big-small-7B", "A name"),
    ],
)
def test_general_metadata_is_what_the_gguf_package_finds(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    sampling = {"temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    for weights in (0, 200_000, 7 * 10**9):
        for card in ("", CARD):
            (folder / "README.md").write_text(card)
            (folder / "config.json").write_text(json.dumps(named := {"_name_or_path": "org/Other-3B"} if card else {}))
            metadata = gguf.Metadata.load(None, folder, None, weights)
            metadata.size_label = metadata.size_label or gguf.size_label(weights, weights, 0, 0)
            writer = gguf.GGUFWriter(None, "llama")
            metadata.set_gguf_meta_model(writer)
            wanted = {key: (value.type, value.value) for key, value in writer.kv_data[0].items()}
            del wanted["general.architecture"]
            found = about(folder, named.get("_name_or_path"), weights)[1]
            assert {key: int.from_bytes(raw[:4], "little") for key, raw in found.items()} == {
                key: kind for key, (kind, _) in wanted.items()
            }
            for key, raw in found.items():
                assert raw == encoded(writer, *wanted[key]), key


def test_general_metadata_of_other_kinds_is_left_out() -> None:
    odd = {"general.name": 3, "general.license": ["mit"], "general.tags": "a", "general.languages": [1, "cs"]}
    odd |= {"general.base_model.count": "x", "general.dataset.count": 2**63, "general.sampling.temp": "hot"}
    odd |= {"general.sampling.top_p": math.nan}
    assert generation_of(odd) == {}
    card = card_of(odd)
    assert card is not None
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"languages": ["cs"]}
    assert card_of({"general.name": ["x"]}) is None


def piece(text: str, score: float, kind: int) -> bytes:
    """Of sentencepiece_model.proto."""
    inner = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score)
    return b"\x0a" + bytes([len(inner) + 2]) + inner + b"\x18" + bytes([kind])


def test_scores_of_sentencepieces_own_file_come_back(tmp_path: Path) -> None:
    """Its trainer numbers merges, then characters; bytes and <unk> have 0."""
    folder = folder_of(tmp_path / "m", TINIES["Llama-0"], 480)
    backend = samples.llama2()
    made = json.loads(backend.to_str())["model"]
    products = {left + right for left, right in made["merges"]}
    words = [token for token in made["vocab"] if made["vocab"][token] > 258]
    order = [token for token in words if token in products] + [token for token in words if token not in products]
    pieces = [piece(token, 0.0, 6 if i > 2 else 3 if i else 2) for token, i in made["vocab"].items() if i < 259]
    pieces += [piece(token, -float(order.index(token)), 1) for token in words]
    samples.save(backend, folder, tokenizer_config=KINDS["SentencePiece"][2])
    (folder / "tokenizer.model").write_bytes(b"".join(pieces))
    there_and_back(folder, "f32")


def encoded(writer: gguf.GGUFWriter, kind: gguf.GGUFValueType, value: Any) -> bytes:
    return bytes(writer._pack_val(value, kind, add_vtype=True))
