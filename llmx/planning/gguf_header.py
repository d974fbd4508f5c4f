"""A model's anatomy from a GGUF file's header: its metadata, and the names, shapes and types of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod

from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN as PLAIN_KINDS
from llmx.formats.checkpoint import Stored
from llmx.formats.fields import Fields
from llmx.formats.gguf import TYPES, Gguf
from llmx.planning.anatomy import Anatomy, Attention, Layer, Matrix
from llmx.planning.storage import Storage

RUNS = frozenset(("llama", "mistral3", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3"))
# Names as llama.cpp gives them -> (Hugging Face's last part, kind, split).
NAMES = {
    "attn_q": ("q_proj", "attention", "out"),
    "attn_k": ("k_proj", "attention", "kv"),
    "attn_v": ("v_proj", "attention", "kv"),
    "attn_qkv": ("qkv_proj", "attention", "out"),
    "attn_output": ("o_proj", "attention", "in"),
    "attn_q_a": ("q_a_proj", "attention", "whole"),
    "attn_q_b": ("q_b_proj", "attention", "out"),
    "attn_kv_a_mqa": ("kv_a_proj_with_mqa", "attention", "whole"),
    "attn_kv_b": ("kv_b_proj", "attention", "out"),
    "attn_k_b": ("k_b_proj", "attention", "out"),
    "attn_v_b": ("v_b_proj", "attention", "out"),
    "ffn_gate": ("gate_proj", "mlp", "out"),
    "ffn_up": ("up_proj", "mlp", "out"),
    "ffn_down": ("down_proj", "mlp", "in"),
    "ffn_gate_inp": ("router", "router", "whole"),
    "ffn_gate_exps": ("gate_proj", "experts", "out"),
    "ffn_up_exps": ("up_proj", "experts", "out"),
    "ffn_down_exps": ("down_proj", "experts", "in"),
    "ffn_gate_shexp": ("gate_proj", "shared", "out"),
    "ffn_up_shexp": ("up_proj", "shared", "out"),
    "ffn_down_shexp": ("down_proj", "shared", "in"),
}
ENDS = {"token_embd": ("embed_tokens", "embedding", "vocab"), "output": ("lm_head", "head", "vocab")}
EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # but each so-manyth layer has a window; elsewhere all have, or none


def from_gguf(file: Gguf, name: str) -> Anatomy:
    """UsageError for an architecture whose attention the header does not describe."""
    fields = Fields(file.metadata, file.path.name)
    architecture = fields.text("general.architecture")
    key = f"{architecture}."
    count = fields.integer(key + "block_count", low=1, high=4096)
    hidden = fields.integer(key + "embedding_length", low=1)
    heads = fields.integers(key + "attention.head_count", low=0)
    if not heads or not min(heads):
        raise UsageError(f"{fields.where}: {architecture} has layers without attention, which can't be planned.")
    of_layer, ends = _matrices(file)
    experts = fields.integer(key + "expert_count", 0, low=0)
    active = fields.integer(key + "expert_used_count", min(experts, 1), low=0, high=max(experts, 0))
    attention = _attention(fields, key, heads, hidden, architecture, count)
    if missing := [i for i in range(count) if i not in of_layer]:
        raise UsageError(f"{fields.where}: the tensors of layer {missing[0]} are missing.")
    layers = []
    for i in range(count):
        routed = any(matrix.kind == "experts" for matrix in of_layer[i])
        layers.append(Layer(attention[i], tuple(of_layer[i]), experts * routed, active * routed))
    kinds: dict[str, int] = defaultdict(int)
    for stored in map(file.stored, file.names()):
        kinds[stored.kind] += stored.nbytes
    return Anatomy(
        name=name,
        architecture=architecture,
        runs=architecture in RUNS and not experts,
        vocab=file.stored("token_embd.weight").shape[0],
        hidden=hidden,
        max_position=fields.integer(key + "context_length", low=1),
        layers=tuple(layers),
        ends=tuple(ends),
        tied="output.weight" not in file,
        dtype="float32",  # of what is not quantised: each tensor says itself
        stored=max(kinds, key=kinds.__getitem__).lower(),
        norms=sum(m.name.endswith("_norm") and m.n_out == hidden for m in layers[0].matrices),
    )


def _matrices(file: Gguf) -> tuple[dict[int, list[Matrix]], list[Matrix]]:
    """By layer, and those of no layer. What only holds numbers for the rotary embedding is a vector like others."""
    layers: dict[int, list[Matrix]] = defaultdict(list)
    ends: list[Matrix] = []
    for stored in map(file.stored, file.names()):
        found = re.fullmatch(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?", stored.name)
        part, suffix = (found[2], found[3]) if found else stored.name.rsplit(".", 1) if "." in stored.name else ("", "")
        table = NAMES if found else ENDS
        named = table.get(part or stored.name, (part or stored.name, "norm", "whole"))
        (layers[int(found[1])] if found else ends).append(_matrix(stored, *named, bias=suffix == "bias"))
    return layers, ends


def _matrix(stored: Stored, name: str, kind: str, split: str, *, bias: bool) -> Matrix:
    storage = _storage(stored.kind)
    if bias or len(stored.shape) == 1:
        return Matrix(f"{name}.bias" if bias else name, kind, prod(stored.shape), 1, split, storage=storage)
    *stacked, n_out, n_in = stored.shape
    return Matrix(name, kind, n_out, n_in, split, prod(stacked), storage=storage)


def _storage(kind: str) -> Storage:
    if kind in PLAIN_KINDS:
        return Storage(kind, 1, PLAIN_KINDS[kind][0])
    elements, size = next((elements, size) for name, elements, size in TYPES.values() if name == kind)
    return Storage(kind, elements, 8 * size)


def _attention(
    fields: Fields, key: str, heads: tuple[int, ...], hidden: int, architecture: str, count: int
) -> list[Attention]:
    kv_heads = fields.integers(key + "attention.head_count_kv", heads, low=1)
    width = fields.integer(key + "attention.key_length", hidden // heads[0], low=1)
    value = fields.integer(key + "attention.value_length", width, low=1)
    window = fields.integer(key + "attention.sliding_window", 4096 if architecture == "gemma2" else 0, low=0) or None
    every = fields.integers(key + "attention.sliding_window_pattern", (), low=0) if architecture == "gemma3" else ()
    step = every[0] if len(every) == 1 and every[0] > 1 else EVERY.get(architecture, 0)
    rank = fields.integer(key + "attention.kv_lora_rank", 0, low=0)
    rope = fields.integer(key + "rope.dimension_count", 64, low=1)
    found = []
    for i in range(count):
        h, kv = heads[i % len(heads)], kv_heads[i % len(kv_heads)]
        if rank:
            found.append(Attention(h, 1, rank + rope, 0, 2 * rank + rope, latent=True))
            continue
        seen = None if step and (i + 1) % step == 0 else window
        found.append(Attention(h, kv, width, value, width + value, seen))
    return found
