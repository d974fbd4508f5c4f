"""Opens a model's files and compares them with each other before torch is imported.

What is compared holds for every model of the format, by its usual tensor names; a family's own checks come later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint, by
from llmx.formats.fields import Fields, load_json, shown
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.formats.safetensors import open_safetensors

CONFIG_LIMIT = 4 * 2**20  # bytes of config.json
MAX_LAYERS = 4096
MAX_WIDTH = 2**24  # of any axis, the vocabulary's too
MAX_CONTEXT = 2**31

Sizes = tuple[int | None, ...]  # of a tensor's axes; None: one that the config does not give


@dataclass(frozen=True)
class Opened:
    """A model whose files are open and agree. `config`: config.json, or the metadata of a GGUF file."""

    located: Located
    checkpoint: Checkpoint
    config: Fields


def check(located: Located) -> Opened:
    """Opens `located`; UsageError if a file is damaged or the sizes in the config are not those of the tensors."""
    return _check_gguf(located) if located.kind == "gguf" else _check_folder(located)


def _check_folder(located: Located) -> Opened:
    config = load_json(located.path / "config.json", CONFIG_LIMIT)
    hidden = config.integer("hidden_size", None, low=1, high=MAX_WIDTH)
    vocab = config.integer("vocab_size", None, low=1, high=MAX_WIDTH)
    layers = config.integer("num_hidden_layers", 0, low=1, high=MAX_LAYERS)
    config.integer("max_position_embeddings", None, low=1, high=MAX_CONTEXT)
    heads = _first(config, "num_attention_heads")
    kv_heads = _first(config, "num_key_value_heads") or heads
    head_dim = _first(config, "head_dim") or (hidden // heads if hidden and heads else None)
    value_dim = _first(config, "v_head_dim") or head_dim
    inner = _first(config, "intermediate_size")
    checkpoint = open_safetensors(located.path)
    _check_layers(checkpoint, r"model\.layers\.(\d+)\.", layers, "config.json: num_hidden_layers")
    expected: tuple[tuple[str, Sizes, str], ...] = (
        ("model.embed_tokens.weight", (vocab, hidden), "vocab_size and hidden_size"),
        ("lm_head.weight", (vocab, hidden), "vocab_size and hidden_size"),
        ("model.norm.weight", (hidden,), "hidden_size"),
        ("model.layers.0.mlp.down_proj.weight", (hidden, inner), "hidden_size and intermediate_size"),
    )
    for name, shape, keys in expected:
        _check_shape(checkpoint, name, shape, f"config.json: {keys}")
    # A model without this tensor makes its keys in another way, and then its heads' sizes are other keys' affair.
    if "model.layers.0.self_attn.k_proj.weight" in checkpoint:
        why = "config.json: hidden_size, num_attention_heads, num_key_value_heads and the head size"
        for name, shape in (("k", (_times(kv_heads, head_dim), hidden)), ("o", (hidden, _times(heads, value_dim)))):
            _check_shape(checkpoint, f"model.layers.0.self_attn.{name}_proj.weight", shape, why)
    return Opened(located, checkpoint, config)


def _check_gguf(located: Located) -> Opened:
    checkpoint = open_gguf(located.path)
    config = Fields(checkpoint.metadata, located.path.name)
    arch = config.text("general.architecture")
    kind = config.text("general.type", "model")
    if kind != "model" or "token_embd.weight" not in checkpoint:
        what = f"a GGUF file of type {shown(kind)}" if kind != "model" else "without token embeddings"
        raise UsageError(f"{located.path} is {what}, not a language model.")
    hidden = config.integer(f"{arch}.embedding_length", low=1, high=MAX_WIDTH)
    layers = config.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    config.integer(f"{arch}.context_length", None, low=1, high=MAX_CONTEXT)
    vocab = config.integer(f"{arch}.vocab_size", None, low=1, high=MAX_WIDTH)
    if "tokenizer.ggml.tokens" in config:
        vocab = len(config.strings("tokenizer.ggml.tokens"))
    heads = _first(config, f"{arch}.attention.head_count", low=0)
    kv_heads = _first(config, f"{arch}.attention.head_count_kv", low=0) or heads
    key_dim = _first(config, f"{arch}.attention.key_length") or (hidden // heads if heads else None)
    value_dim = _first(config, f"{arch}.attention.value_length") or key_dim
    inner = _first(config, f"{arch}.feed_forward_length", low=0)
    where = located.path.name
    _check_layers(checkpoint, r"blk\.(\d+)\.", layers, f"{where}: {arch}.block_count")
    for name, shape, keys in (
        ("token_embd.weight", (vocab, hidden), f"the number of tokens and {arch}.embedding_length"),
        ("output.weight", (vocab, hidden), f"the number of tokens and {arch}.embedding_length"),
        ("output_norm.weight", (hidden,), f"{arch}.embedding_length"),
        ("blk.0.attn_k.weight", (_times(kv_heads, key_dim), hidden), f"{arch}.attention.head_count_kv and key_length"),
        (
            "blk.0.attn_output.weight",
            (hidden, _times(heads, value_dim)),
            f"{arch}.attention.head_count and value_length",
        ),
        ("blk.0.ffn_down.weight", (hidden, inner), f"{arch}.feed_forward_length"),
    ):
        _check_shape(checkpoint, name, shape, f"{where}: {keys}")
    return Opened(located, checkpoint, config)


def _first(config: Fields, key: str, low: int = 1) -> int | None:
    """The size under `key`, of layer 0 where each layer has its own; None where it is not given, or 0."""
    sizes = config.integers(key, (), low=low, high=MAX_WIDTH)
    return (sizes[0] or None) if sizes else None


def _times(count: int | None, size: int | None) -> int | None:
    return count * size if count and size else None


def _check_layers(checkpoint: Checkpoint, pattern: str, layers: int, key: str) -> None:
    """Tensors of each of the `layers`, if any name matches `pattern`; more may be there (drafting layers are)."""
    matches = map(re.compile(pattern).match, checkpoint.names())
    found = {match[1] for match in matches if match}
    missing = [index for index in range(layers) if str(index) not in found]
    if found and missing:
        raise UsageError(f"{key} is {layers}, but the weights of layer {missing[0]} are missing.")


def _check_shape(checkpoint: Checkpoint, name: str, shape: Sizes, why: str) -> None:
    """UsageError if `name` is there with another shape than this."""
    if name not in checkpoint or checkpoint.stored(name).kind in ("U8", "I8", "I32", "U32"):  # packed by some scheme
        return
    stored = checkpoint.stored(name).shape
    wanted = tuple(have if want is None else want for want, have in zip(shape, stored, strict=False))
    if len(stored) != len(shape) or stored != wanted:
        raise UsageError(f"{why} make {name} {by(wanted)}, but it is stored as {by(stored)}.")
