"""A model's anatomy from config.json: one table of what families have beside the sizes that all of them name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.planning.anatomy import Anatomy, Attention, Layer, Matrix, vector
from llmx.planning.storage import FP8, FP8_BLOCK, INT8, MXFP4, PLAIN, Quant, Storage, grouped

MAX_LAYERS, MAX_WIDTH = 4096, 2**24
WIDEST = {"low": 1, "high": MAX_WIDTH}


@dataclass(frozen=True)
class Family:
    """What a family's config.json leaves unsaid. runs: whether this version runs it (a test compares).

    qkv_bias, out_bias: None: as `attention_bias` says, whose default is `biased`. windows: the rule by which layers
    look back on `sliding_window` tokens only, unless `layer_types` says (see _windows). tied, position, head_dim and
    window: defaults of the keys of that name. shared: "expert": one shared expert as wide as the routed ones (Llama 4).
    """

    runs: bool = False
    norms: int = 2
    qk_norm: str = ""
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    biased: bool = False
    windows: str = "none"
    tied: bool = False
    position: int = 2048
    head_dim: int | None = None
    window: int | None = None
    shared: str = ""
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False


_QWEN2 = {"qkv_bias": True, "out_bias": False, "windows": "late", "position": 32768, "window": 4096}
_GEMMA = {"norms": 4, "tied": True, "head_dim": 256, "window": 4096}
_GEMMA3 = Family(True, qk_norm="head", windows="5 of 6", position=131072, **_GEMMA)  # type: ignore[arg-type]
_LLAMA4 = Family(windows="3 of 4", shared="expert", position=131072)
FAMILIES = {
    "LlamaForCausalLM": Family(True),
    "MistralForCausalLM": Family(True, qkv_bias=False, out_bias=False, windows="all", position=131072, window=4096),
    "Qwen2ForCausalLM": Family(True, **_QWEN2),  # type: ignore[arg-type]
    "Qwen3ForCausalLM": Family(True, qk_norm="head", windows="late", position=32768, head_dim=128, window=4096),
    "Gemma2ForCausalLM": Family(True, windows="1 of 2", position=8192, **_GEMMA),  # type: ignore[arg-type]
    "Gemma3ForCausalLM": _GEMMA3,
    "Phi3ForCausalLM": Family(True, qkv_bias=False, out_bias=False, windows="all", position=4096),
    "Olmo2ForCausalLM": Family(True, qk_norm="full"),
    "GraniteForCausalLM": Family(True),
    "SmolLM3ForCausalLM": Family(True, tied=True, windows="unturned", position=32768),
    "MixtralForCausalLM": Family(qkv_bias=False, out_bias=False, windows="all", position=131072),
    "Qwen2MoeForCausalLM": Family(**_QWEN2),  # type: ignore[arg-type]
    "Qwen3MoeForCausalLM": Family(qk_norm="head", windows="late", position=32768, window=4096),
    "DeepseekV2ForCausalLM": Family(position=2048),
    "DeepseekV3ForCausalLM": Family(position=4096, router_bias=True),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "GptOssForCausalLM": Family(
        biased=True, windows="even", position=131072, window=128, router_bias=True, expert_bias=True, sinks=True
    ),
}


def from_config(fields: Fields, name: str) -> Anatomy:
    """From the fields of a config.json. UsageError for a family that is not in the table, or sizes that can't be."""
    architecture = next(iter(fields.strings("architectures", ())), "none")
    if (family := FAMILIES.get(architecture)) is None:
        known = ", ".join(sorted(FAMILIES))
        raise UsageError(f"{fields.where}: {architecture[:80]!r} can't be planned; this version knows {known}.")
    text = fields.section("text_config", None)
    notes = ("only the text model is planned, not what reads images or sound",) if text else ()
    inner = text or fields
    reader = _Reader(inner, family)
    layers = tuple(reader.layer(i) for i in range(reader.layers))
    dtype = _dtype(inner) or _dtype(fields) or "bfloat16"
    tied = inner.boolean("tie_word_embeddings", fields.boolean("tie_word_embeddings", family.tied))
    ends = [Matrix("embed_tokens", "embedding", reader.vocab, reader.hidden, "vocab"), vector("norm", reader.hidden)]
    if not tied:
        ends.append(Matrix("lm_head", "head", reader.vocab, reader.hidden, "vocab"))
    anatomy = Anatomy(
        name=name,
        architecture=architecture,
        runs=family.runs,
        vocab=reader.vocab,
        hidden=reader.hidden,
        max_position=inner.integer("max_position_embeddings", family.position, low=1),
        layers=layers,
        ends=tuple(ends),
        tied=tied,
        dtype=dtype,
        stored=dtype,
        norms=family.norms,
        notes=notes,
    )
    return _as_quantised(anatomy, fields.section("quantization_config", inner.section("quantization_config", None)))


def _dtype(fields: Fields) -> str | None:
    found = fields.text("dtype", None) or fields.text("torch_dtype", None)
    return found if found in PLAIN else None


class _Reader:
    """The sizes of a config.json, and its layers."""

    def __init__(self, fields: Fields, family: Family) -> None:
        self.fields, self.family = fields, family
        self.hidden, self.vocab = self._size("hidden_size"), self._size("vocab_size")
        self.layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
        self.heads = self._size("num_attention_heads")
        self.kv_heads = self._size("num_key_value_heads", self.heads)
        self.head_dim = self._size("head_dim", family.head_dim or max(1, self.hidden // self.heads))
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{fields.where}: {self.heads} attention heads can't share {self.kv_heads} key-value heads evenly."
            )
        biased = fields.boolean("attention_bias", family.biased)
        self.qkv_bias = biased if family.qkv_bias is None else family.qkv_bias
        self.out_bias = biased if family.out_bias is None else family.out_bias
        self.experts = max(
            fields.integer(key, 0, low=0, high=MAX_WIDTH)
            for key in ("n_routed_experts", "num_local_experts", "num_experts")
        )
        self.active = min(self.experts, fields.integer("num_experts_per_tok", 2 if self.experts else 0, low=0))
        if family.shared:  # Llama 4
            self.active = min(self.experts, fields.integer("num_experts_per_tok", 1, low=1))
        self.windows = _windows(fields, family, self.layers)
        self.routed = _routed(fields, family, self.layers) if self.experts else frozenset()

    def _size(self, key: str, default: int | None = None) -> int:
        if default is None:
            return self.fields.integer(key, low=1, high=MAX_WIDTH)
        return self.fields.integer(key, default, low=1, high=MAX_WIDTH)

    def layer(self, index: int) -> Layer:
        latent = "kv_lora_rank" in self.fields
        attention, matrices = self._latent() if latent else self._heads(self.windows[index])
        norms = [vector(f"norm{i}", self.hidden) for i in range(self.family.norms)]
        if index in self.routed:
            feed = self._experts()
            return Layer(attention, (*norms, *matrices, *feed), self.experts, self.active)
        width = self._size("intermediate_size")
        if self.family.shared:
            width = self._size("intermediate_size_mlp", width)
        bias = self.fields.boolean("mlp_bias", False)
        return Layer(attention, (*norms, *matrices, *self._gated("mlp", width, bias=bias)))

    def _heads(self, window: int | None) -> tuple[Attention, list[Matrix]]:
        dim, hidden, family = self.head_dim, self.hidden, self.family
        q, kv = self.heads * dim, self.kv_heads * dim
        found = [
            Matrix("q_proj", "attention", q, hidden, "out", bias=q * self.qkv_bias),
            Matrix("k_proj", "attention", kv, hidden, "kv", bias=kv * self.qkv_bias),
            Matrix("v_proj", "attention", kv, hidden, "kv", bias=kv * self.qkv_bias),
            Matrix("o_proj", "attention", hidden, q, "in", bias=hidden * self.out_bias),
        ]
        if family.qk_norm:
            widths = (dim, dim) if family.qk_norm == "head" else (q, kv)
            found += [vector("q_norm", widths[0]), vector("k_norm", widths[1])]
        if family.sinks:
            found.append(vector("sinks", self.heads))
        return Attention(self.heads, self.kv_heads, dim, dim, 2 * dim, window), found

    def _latent(self) -> tuple[Attention, list[Matrix]]:
        """Multi-head latent attention, DeepSeek-V2 (2024): a token keeps its latent and one rotary key."""
        rank, rope = self._size("kv_lora_rank"), self._size("qk_rope_head_dim")
        nope, value = self._size("qk_nope_head_dim"), self._size("v_head_dim")
        heads, hidden, bias = self.heads, self.hidden, self.qkv_bias
        found = []
        if low := self.fields.integer("q_lora_rank", 0, low=0, high=MAX_WIDTH):
            found += [
                Matrix("q_a_proj", "attention", low, hidden, bias=low * bias),
                vector("q_a_layernorm", low),
                Matrix("q_b_proj", "attention", heads * (nope + rope), low, "out"),
            ]
        else:
            found.append(Matrix("q_proj", "attention", heads * (nope + rope), hidden, "out"))
        found += [
            Matrix("kv_a_proj_with_mqa", "attention", rank + rope, hidden, bias=(rank + rope) * bias),
            vector("kv_a_layernorm", rank),
            Matrix("kv_b_proj", "attention", heads * (nope + value), rank, "out"),
            Matrix("o_proj", "attention", hidden, heads * value, "in", bias=hidden * self.out_bias),
        ]
        # Served from the latent itself (kv_b folded into queries and output): each head takes products with it twice.
        return Attention(heads, 1, rank + rope, 0, 2 * rank + rope, latent=True), found

    def _gated(self, kind: str, width: int, count: int = 1, *, bias: bool = False) -> list[Matrix]:
        up = {"split": "out", "count": count, "bias": width * bias}
        return [
            Matrix("gate_proj", kind, width, self.hidden, **up),  # type: ignore[arg-type]
            Matrix("up_proj", kind, width, self.hidden, **up),  # type: ignore[arg-type]
            Matrix("down_proj", kind, self.hidden, width, "in", count, self.hidden * bias),
        ]

    def _experts(self) -> list[Matrix]:
        fields, family = self.fields, self.family
        width = fields.integer("moe_intermediate_size", fields.integer("intermediate_size", low=1), **WIDEST)
        biased = family.router_bias and family.expert_bias
        found = [Matrix("router", "router", self.experts, self.hidden, bias=self.experts * biased)]
        if family.router_bias and not family.expert_bias:  # DeepSeek-V3's selects only, and is kept in float32
            bias = Matrix("e_score_correction_bias", "router", self.experts, 1, storage=PLAIN["float32"])
            found.append(bias)
        found += self._gated("experts", width, self.experts, bias=family.expert_bias)
        shared = width * fields.integer("n_shared_experts", 0, low=0) if not family.shared else width
        if "shared_expert_intermediate_size" in fields:  # Qwen2-MoE weighs its shared expert by a gate of its own
            shared = fields.integer("shared_expert_intermediate_size", **WIDEST)
            found.append(vector("shared_expert_gate", self.hidden, "router"))
        return found + (self._gated("shared", shared) if shared else [])


def _routed(fields: Fields, family: Family, layers: int) -> frozenset[int]:
    """The layers that have experts."""
    if family.shared:
        step = fields.integer("interleave_moe_layer_step", 1, low=1)
        return frozenset(fields.integers("moe_layers", tuple(range(step - 1, layers, step)), low=0))
    first = fields.integer("first_k_dense_replace", 0, low=0)
    every = fields.integer("moe_layer_freq", 1, low=1)
    step = fields.integer("decoder_sparse_step", 1, low=1)
    dense = set(fields.integers("mlp_only_layers", (), low=0))
    return frozenset(i for i in range(first, layers) if i % every == 0 and (i + 1) % step == 0 and i not in dense)


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """How far each layer looks back. Families without windows ignore the keys, as the engine does."""
    rule = family.windows
    everything = (None,) * layers
    if rule == "none":
        return everything
    if rule == "3 of 4":  # Llama 4: chunks, in the layers that turn
        chunk = fields.integer("attention_chunk_size", 8192, low=1)
        turns = fields.integers("no_rope_layers", (), low=0) or tuple(int((i + 1) % 4 != 0) for i in range(layers))
        return _typed(fields, chunk, tuple(bool(turn) for turn in turns), "chunked_attention", layers)
    default = None if "sliding_window" in fields.data else family.window  # null is none
    window: int | None = fields.integer("sliding_window", default, low=0) or None
    if window is None or (rule in ("late", "unturned") and not fields.boolean("use_sliding_window", False)):
        return everything
    if rule == "all":
        return (window,) * layers
    marked: Sequence[bool]
    if rule == "late":
        first = fields.integer("max_window_layers", 28, low=0)
        marked = [i >= first for i in range(layers)]
    elif rule == "unturned":
        every = fields.integer("no_rope_layer_interval", 4, low=1)
        turning = fields.integers("no_rope_layers", tuple(int((i + 1) % every != 0) for i in range(layers)))
        marked = [not turn for turn in turning]
    elif rule == "even":
        marked = [i % 2 == 0 for i in range(layers)]
    else:  # "1 of 2", "5 of 6": all but each so-manyth
        every = fields.integer("sliding_window_pattern", int(rule[-1]), low=1) if rule == "5 of 6" else int(rule[-1])
        marked = [bool((i + 1) % every) for i in range(layers)]
    return _typed(fields, window, marked, "sliding_attention", layers)


def _typed(fields: Fields, window: int, marked: Sequence[bool], kind: str, layers: int) -> tuple[int | None, ...]:
    named = fields.strings("layer_types", ())
    marks = [one == kind for one in named] if named else list(marked)
    if len(marks) != layers:
        raise UsageError(f"{fields.where}: {len(marks)} layers are said to have windows or not; there are {layers}.")
    return tuple(window if mark else None for mark in marks)


def _as_quantised(anatomy: Anatomy, config: Fields | None) -> Anatomy:
    """As config.json says that the checkpoint is stored."""
    if config is None:
        return anatomy
    method = config.text("quant_method", "none")
    storage = _storage(method, config)
    if storage is None:
        note = f"quantization_config {method[:40]!r} is not known here: weights are counted in {anatomy.dtype}"
        return replace(anatomy, notes=(*anatomy.notes, note))
    kinds = ("experts",) if method == "mxfp4" else ("attention", "mlp", "experts", "shared")

    def rule(name: str, kind: str, layer: int, layers: int, n_in: int) -> Storage | None:
        return storage if kind in kinds else PLAIN["float32"] if name == "e_score_correction_bias" else None

    return anatomy.quantised(Quant(storage.name, rule))


def _storage(method: str, config: Fields) -> Storage | None:
    if method == "fp8":
        return FP8_BLOCK if "weight_block_size" in config else FP8
    if method in ("awq", "gptq"):
        bits, group = config.integer("bits", 4, low=2, high=8), config.integer("group_size", 128)
        return grouped(method, bits, group, indexed=method == "gptq")
    if method == "mxfp4":
        return MXFP4
    if method == "compressed-tensors":
        groups = config.section("config_groups", None)
        first = groups.section(next(iter(groups.keys()), ""), None) if groups else None
        weights = first.section("weights", None) if first else None
        if weights is None:
            return None
        bits, group = weights.integer("num_bits", 8, low=2, high=8), weights.integer("group_size", 0, low=0)
        if bits == 8 and not group:
            return FP8 if weights.text("type", "int") == "float" else INT8
        return grouped(f"w{bits}", bits, group, indexed=False)
    return None
