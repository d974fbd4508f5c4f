"""Config and tensors must agree before torch is imported; a bad file costs one sentence and little processor time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmx.errors import UsageError
from llmx.formats import hub, structure

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}
SHAPES = {
    "model.embed_tokens.weight": (50, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (50, 32),
} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }.items()
}


def folder(path: Path, changed: dict[str, Any], shapes: dict[str, tuple[int, ...] | None]) -> str:
    from safetensors.numpy import save_file

    wanted = {name: shape for name, shape in (SHAPES | shapes).items() if shape is not None}
    save_file({name: np.zeros(shape, np.float16) for name, shape in wanted.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    return str(path)


def test_a_good_folder_is_opened(tmp_path: Path) -> None:
    opened = structure.check(hub.locate(folder(tmp_path, {}, {})))
    assert opened.config.integer("hidden_size") == 32
    assert opened.checkpoint.kind == "safetensors"
    assert set(opened.checkpoint.names()) == set(SHAPES)


@pytest.mark.parametrize(
    ("changed", "shapes"),
    [
        ({"head_dim": 8}, {}),
        ({"num_key_value_heads": None}, {f"model.layers.{i}.self_attn.k_proj.weight": (32, 32) for i in range(2)}),
        ({"num_hidden_layers": 1}, {}),  # a drafting layer may follow
        ({"intermediate_size": [64, 64]}, {}),
        ({"hidden_size": None, "vocab_size": None}, {}),  # other families have other keys
        ({}, {"lm_head.weight": None}),
        ({"v_head_dim": 4}, {"model.layers.0.self_attn.o_proj.weight": (32, 16)}),
        ({"num_attention_heads": 3}, {"model.layers.0.self_attn.k_proj.weight": None}),  # latent attention
    ],
)
def test_what_families_differ_in_is_let_through(
    tmp_path: Path, changed: dict[str, Any], shapes: dict[str, tuple[int, ...] | None]
) -> None:
    structure.check(hub.locate(folder(tmp_path, changed, shapes)))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hidden_size": 48}, "config.json: .* make model.embed_tokens.weight 50×48, but it is stored as 50×32"),
        ({"vocab_size": 51}, "make model.embed_tokens.weight 51×32, but it is stored as 50×32"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but the weights of layer 2 are missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number between 1 and 4096, not 1000000000"),
        ({"num_attention_heads": 2}, "k_proj.weight 32×32, but it is stored as 16×32"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number between 1"),
        ({"num_key_value_heads": 1}, "k_proj.weight 8×32, but it is stored as 16×32"),
        ({"head_dim": 16}, "k_proj.weight 32×32, but it is stored as 16×32"),
        ({"intermediate_size": 96}, "down_proj.weight 32×96, but it is stored as 32×64"),
        ({"hidden_size": "x"}, "config.json: hidden_size must be a whole number between 1 and 16777216, not 'x'"),
        ({"hidden_size": -1}, "hidden_size must be a whole number between 1"),
        ({"vocab_size": 10**12}, "vocab_size must be a whole number between 1"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be a whole number between 1"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors_is_one_sentence(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    located = hub.locate(folder(tmp_path, changed, {}))
    with pytest.raises(UsageError, match=problem):
        structure.check(located)


def gguf_file(path: Path, changed: dict[str, Any], shapes: dict[str, tuple[int, ...] | None] | None = None) -> str:
    from gguf import GGUFWriter

    values: dict[str, Any] = {"llama.embedding_length": 32, "llama.block_count": 2, "llama.feed_forward_length": 64}
    values |= {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.context_length": 128}
    values |= {"tokenizer.ggml.tokens": [f"t{index}" for index in range(50)]}
    writer = GGUFWriter(path / "m.gguf", "llama")
    for key, value in (values | changed).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    wanted: dict[str, tuple[int, ...] | None] = {"token_embd.weight": (50, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        wanted[f"blk.{layer}.attn_k.weight"] = (16, 32)
        wanted[f"blk.{layer}.attn_output.weight"] = (32, 32)
        wanted[f"blk.{layer}.ffn_down.weight"] = (32, 64)
    for name, shape in (wanted | (shapes or {})).items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path / "m.gguf")


def test_a_good_gguf_is_opened(tmp_path: Path) -> None:
    opened = structure.check(hub.locate(gguf_file(tmp_path, {})))
    assert opened.config.integer("llama.block_count") == 2
    assert opened.checkpoint.kind == "gguf"


def test_the_demo_model_is_opened(demo: Path) -> None:
    opened = structure.check(hub.locate(str(demo)))
    assert opened.config.text("general.architecture") == "llama"
    assert len(opened.checkpoint.names()) == 272


@pytest.mark.parametrize(
    ("changed", "shapes", "problem"),
    [
        ({"general.type": "imatrix"}, {}, "is a GGUF file of type 'imatrix', not a language model"),
        ({}, {"token_embd.weight": None}, "is without token embeddings, not a language model"),
        ({"llama.embedding_length": None}, {}, "m.gguf: llama.embedding_length is missing"),
        ({"llama.block_count": 0}, {}, "llama.block_count must be a whole number between 1"),
        ({"llama.block_count": 3}, {}, "llama.block_count is 3, but the weights of layer 2 are missing"),
        ({"llama.block_count": 2**32 - 1}, {}, "llama.block_count must be a whole number between 1 and 4096"),
        ({"llama.embedding_length": 48}, {}, "token_embd.weight 50×48, but it is stored as 50×32"),
        ({"tokenizer.ggml.tokens": ["a"]}, {}, "token_embd.weight 1×32, but it is stored as 50×32"),
        ({"llama.attention.head_count": 3}, {}, "blk.0.attn_k.weight 20×32, but it is stored as 16×32"),
        ({"llama.attention.head_count_kv": 1}, {}, "blk.0.attn_k.weight 8×32, but it is stored as 16×32"),
        ({"llama.feed_forward_length": 96}, {}, "blk.0.ffn_down.weight 32×96, but it is stored as 32×64"),
        ({"llama.context_length": "long"}, {}, "llama.context_length must be a whole number"),
    ],
)
def test_gguf_metadata_that_disagrees_with_the_tensors_is_one_sentence(
    tmp_path: Path, changed: dict[str, Any], shapes: dict[str, tuple[int, ...] | None], problem: str
) -> None:
    located = hub.locate(gguf_file(tmp_path, changed, shapes))
    with pytest.raises(UsageError, match=problem):
        structure.check(located)


def cut(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


@pytest.mark.parametrize("make", [lambda path: folder(path, {}, {}), lambda path: gguf_file(path, {})])
def test_a_cut_file_costs_little_time_and_no_torch(tmp_path: Path, make: Callable[[Path], str]) -> None:
    name = make(tmp_path)
    cut(next(path for path in tmp_path.iterdir() if path.suffix in (".gguf", ".safetensors")))
    script = f"""
import sys, time
from llmx.errors import UsageError
from llmx.formats import hub, structure
try:
    structure.check(hub.locate({name!r}))
except UsageError as error:
    heavy = [m for m in ("torch", "numpy", "gguf", "safetensors", "transformers", "tokenizers") if m in sys.modules]
    print(error.message, heavy, time.process_time() < 1.0)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert "Was the download" not in ran.stdout
    assert ran.stdout.rstrip().endswith("[] True")
