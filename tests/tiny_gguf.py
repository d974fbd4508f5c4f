"""GGUF files of tiny models as llama.cpp's converter writes them: names, keys and rules are the gguf package's and its.

Nothing here comes from our readers. What a converter does to a model (rows of q and k permuted, 1 added to Gemma's
norms, RoPE factors as tensors) is a fact of the format, kept in FORMATS by transformers' architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

Config = Mapping[str, Any]
Writer = gguf.GGUFWriter


class Inexpressible(Exception):
    """The model has something that files of this architecture don't store."""


@dataclass(frozen=True)
class Format:
    """permuted: rows of q and k stand with each head's halves interleaved. plus_one: norms are stored with 1 added."""

    permuted: bool = False
    plus_one: bool = False
    extra: Callable[[Writer, Config], None] | None = None
    windows: bool = False  # the architecture knows sliding windows


def _heads(config: Config) -> int:
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found


def _rope(config: Config) -> Config:
    parameters: Config = config["rope_parameters"]
    whole: Config = parameters.get("full_attention", parameters)
    return whole


def _gemma(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    if (cap := config["attn_logit_softcapping"]) is not None:
        writer.add_attn_logit_softcapping(cap)
    if (cap := config["final_logit_softcapping"]) is not None:
        writer.add_final_logit_softcapping(cap)
    every = 6 if config["model_type"] == "gemma3_text" else 2  # llama.cpp's own, not stored
    wanted = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]
    if config["layer_types"] != wanted:
        raise Inexpressible("layers with windows in another order than llama.cpp's")


def _granite(writer: Writer, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _phi3(writer: Writer, config: Config) -> None:
    rope = _rope(config)
    writer.add_sliding_window(config["sliding_window"] or 0)
    original = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    if "long_factor" in rope:
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
        for name in ("long", "short"):
            factors = torch.tensor(rope[f"{name}_factor"])
            writer.add_tensor(f"rope_factors_{name}.weight", factors.numpy())


FORMATS: dict[str, dict[str, Format]] = {  # transformers' architecture -> GGUF's
    "LlamaForCausalLM": {"llama": Format(permuted=True)},
    "MistralForCausalLM": {"llama": Format(permuted=True), "mistral3": Format(permuted=True)},
    "Qwen2ForCausalLM": {"qwen2": Format()},
    "Qwen3ForCausalLM": {"qwen3": Format()},
    "Gemma2ForCausalLM": {"gemma2": Format(plus_one=True, extra=_gemma, windows=True)},
    "Gemma3ForCausalLM": {"gemma3": Format(plus_one=True, extra=_gemma, windows=True)},
    "Phi3ForCausalLM": {"phi3": Format(extra=_phi3, windows=True)},
    "SmolLM3ForCausalLM": {"smollm3": Format(permuted=True)},
    "Olmo2ForCausalLM": {"olmo2": Format()},
    "GraniteForCausalLM": {"granite": Format(permuted=True, extra=_granite)},
}


def write_gguf(
    path: Path,
    architecture: str,
    name: str,
    config: Config,
    tensors: Mapping[str, Tensor],
    more: Mapping[str, Any] | None = None,
    kind: str | None = None,
    raw: Mapping[str, Tensor] | None = None,
) -> None:
    """A file of GGUF architecture `name` from transformers' config.json and weights; `more`: further metadata; `kind`:
    the type in which matrices are packed; `raw`: further tensors, by their names in the file.

    Raises Inexpressible where that is so.
    """
    form = FORMATS[architecture][name]
    if not form.windows and config.get("sliding_window") and config.get("use_sliding_window", True):
        raise Inexpressible(f"{name} files don't store a sliding window")
    writer = Writer(path, name)
    _sizes(writer, config)
    _scaling(writer, config)
    for key, value in (more or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if form.extra is not None:
        form.extra(writer, config)
    for stored, tensor in (raw or {}).items():
        writer.add_tensor(stored, tensor.numpy())
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for hf_name, tensor in tensors.items():
        stored = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"the gguf package has no name for {hf_name} in {name}"
        if form.plus_one and hf_name.endswith("norm.weight"):
            tensor = tensor + 1
        for part, heads in (("q_proj.", "num_attention_heads"), ("k_proj.", "num_key_value_heads")):
            if form.permuted and part in hf_name:
                tensor = tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
        array = tensor.contiguous().numpy()
        if kind is not None and tensor.dim() == 2:
            packed = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quantize(array, packed), raw_dtype=packed)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(writer: Writer, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(_heads(config) * _rope(config).get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def _scaling(writer: Writer, config: Config) -> None:
    """linear and yarn by keys, llama3 as one divisor for each frequency; longrope is Phi's."""
    rope = _rope(config)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", torch.tensor(_llama3(rope, _heads(config))).numpy())
    if kind not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise Inexpressible(f"the RoPE kind {kind}")


def _llama3(rope: Config, dim: int) -> list[float]:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original, found = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(float(factor))
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
