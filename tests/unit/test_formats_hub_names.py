"""Names of the hub, and which of a repository's files they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmx.errors import UsageError
from llmx.formats import hub_names
from llmx.formats.hub_names import HubName, parse


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("meta-llama/Llama-3.2-1B", HubName("meta-llama/Llama-3.2-1B")),
        ("org/name_v0.1@v1", HubName("org/name_v0.1", "v1")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name:Q4_K_M", HubName("org/name", "main", "Q4_K_M")),
        ("org/name@v1:sub/file.gguf", HubName("org/name", "v1", "sub/file.gguf")),
    ],
)
def test_a_hub_name_has_a_repository_a_revision_and_a_type(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "demo", "gpt2", "org/", "/name", "a/b/c", "./a/b", "../name", "~/name", "org/name:", "org/name@"),
        *(
            "org/..",
            "org/a..b",
            "org/a--b",
            "org/a-",
            "a./b",
            "org/name@../../x",
            "org/name@a//b",
            "org/name@a/",
            "é/b",
        ),
        *("dir/model.gguf", "dir/model.safetensors", "dir/config.json", "org/na me", "org/name\n", "org/name:a:b"),
        *("o/" + "n" * 97, "x" * 10_000 + "/y"),
    ],
)
def test_other_texts_are_no_hub_names(text: str) -> None:
    assert parse(text) is None


def test_only_configs_tokenizers_and_templates_go_with_the_weights() -> None:
    wanted = ["added_tokens.json", "additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json"]
    wanted += ["generation_config.json", "hf_quant_config.json", "merges.txt", "model.safetensors.index.json"]
    wanted += ["quantize_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "vocab.json"]
    others = ["README.md", ".gitattributes", "modeling_x.py", "pytorch_model.bin", "model.pt", "onnx/model.onnx"]
    others += ["original/tokenizer.model", "original/params.json", "1_Pooling/config.json", "model.safetensors"]
    others += [
        "pytorch_model.bin.index.json",
        "tf_model.h5",
        "trainer_state.json",
        "x.gguf",
        "additional_chat_templates/a.py",
    ]
    assert hub_names.beside(wanted + others) == sorted(wanted)


def weights(folder: Path, *files: str) -> list[str]:
    return hub_names.weights(HubName("o/n"), files, folder)


def test_the_weights_are_the_single_file_or_the_shards_of_the_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / hub_names.INDEX).write_text(json.dumps(index))
    shards = list(index["weight_map"].values())
    assert weights(tmp_path, hub_names.INDEX, *shards, "consolidated.safetensors") == shards
    assert weights(tmp_path, hub_names.INDEX, *shards[:1]) == shards
    assert weights(tmp_path, "model.safetensors", "model.fp16.safetensors") == ["model.safetensors"]
    assert weights(tmp_path, "adapter.safetensors", "sub/x.safetensors") == ["adapter.safetensors"]
    for files in (shards[:1], ["a.safetensors", "b.safetensors"]):
        with pytest.raises(UsageError, match=f"has {len(files)} safetensors files and no model"):
            weights(tmp_path, *files)


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (["config.json", "tokenizer.json"], "neither safetensors nor GGUF files: no weights", "converted"),
        (["config.json", "pytorch_model.bin"], r"pickles \(pytorch_model\.bin\), which could run code", "converted"),
        (["model.safetensors", "tokenizer.json"], "no config.json", ""),
        (["model.safetensors", "config.json"], "no tokenizer", "Adapters"),
        (["a-Q8_0.gguf", "a.Q4_K_M.gguf"], "2 types, Q4_K_M and Q8_0, and its name", "for instance o/n:Q4_K_M"),
        (["a-Q6_K.gguf", "mmproj-a-f16.gguf"], "1 type, Q6_K, and its name", "for instance o/n:Q6_K"),
    ],
)
def test_a_repository_that_is_no_model_says_why(files: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        hub_names.check_model(HubName("o/n"), files)
    assert hint in f"{caught.value.hint}"


MANY = [
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m.q4_0.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m_IQ2_XXS.gguf",
    "m-f16.gguf",
    "m-MXFP4_MOE.gguf",
    "BF16/m-BF16-00001-of-00003.gguf",
    "BF16/m-BF16-00002-of-00003.gguf",
    "BF16/m-BF16-00003-of-00003.gguf",
    "Q8_0/weights.gguf",
    "Q2_K-imatrix.gguf",
    "mmproj-m-Q8_0.gguf",
    "m-final.gguf",
    "sub/m-final.gguf",
    "config.json",
]


@pytest.mark.parametrize(
    ("what", "files"),
    [
        ("Q4_K_M", MANY[:1]),
        ("q4_k_m", MANY[:1]),
        ("Q4_0", MANY[2:3]),
        ("UD-Q4_K_XL", MANY[3:4]),
        ("IQ2_XXS", MANY[4:5]),
        ("F16", MANY[5:6]),
        ("MXFP4_MOE", MANY[6:7]),
        ("BF16", MANY[7:10]),
        ("Q8_0", MANY[10:11]),
        ("m-Q4_K_S.gguf", MANY[1:2]),
        ("weights.gguf", MANY[10:11]),
        ("m-BF16-00002-of-00003.gguf", MANY[7:10]),
        ("mmproj-m-Q8_0.gguf", ["mmproj-m-Q8_0.gguf"]),
        ("sub/m-final.gguf", ["sub/m-final.gguf"]),
        ("m-final.gguf", ["m-final.gguf"]),
    ],
)
def test_a_type_or_a_file_name_means_one_gguf_file_with_all_its_parts(what: str, files: list[str]) -> None:
    assert hub_names.ggufs(HubName("o/n", what=what), MANY[::-1]) == files


@pytest.mark.parametrize(
    ("what", "files", "message", "hint"),
    [
        ("Q3_K_L", MANY, r"no GGUF file of type 'Q3_K_L'; it has BF16, F16, IQ2_XXS, .* and sub/m-final", "o/n:Q4_K_M"),
        ("Q4_K", MANY, "no GGUF file of type 'Q4_K'", "o/n:Q4_K_M"),
        ("K_M", MANY, "no GGUF file of type 'K_M'", "o/n:Q4_K_M"),
        ("x.gguf", MANY, r"no GGUF file 'x\.gguf'; it has BF16/m-BF16-00001-of-00003\.gguf, ", "o/n:BF16/m"),
        ("a.gguf", ["x/a.gguf", "y/a.gguf"], r"could be any of 2 files: x/a\.gguf and y/a\.gguf", "o/n:x/a.gguf"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], r"any of 2 files: a-Q8_0\.gguf and b-Q8_0\.gguf", "o/n:a-Q8_0.gguf"),
        ("Q8_0", [], "o/n holds no GGUF files", "None"),
        ("Q8_0", ["model.safetensors"], "o/n holds no GGUF files", "Its safetensors are o/n"),
        ("Q8_0", ["a-Q8_0-00001-of-00003.gguf", "a-Q8_0-00003-of-00003.gguf"], "lacks a-Q8_0-00002-of-00003", "None"),
        ("Q8_0", ["a-Q8_0-00002-of-99999.gguf"], "lacks a-Q8_0-00001-of-99999", "None"),
        ("Q8_0", ["a-Q8_0-00000-of-00000.gguf"], "lacks", "None"),
        ("Q8_0", [f"a{i:03}-Q8_0.gguf" for i in range(99)], "any of 99 files: .* and 69 more", "o/n:a000-Q8_0.gguf"),
    ],
)
def test_no_file_or_several_are_a_sentence_with_the_candidates(
    what: str, files: list[str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        hub_names.ggufs(HubName("o/n", what=what), files)
    assert hint in f"{caught.value.hint}"
    assert len(caught.value.message) < 1000
