"""Which type each tensor of a GGUF file gets: llama.cpp's mixtures and fallbacks (src/llama-quant.cpp, 2026-10)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmx.errors import UsageError
from llmx.formats.gguf_write import NUMBERS

MIXTURES: Mapping[str, tuple[str, int]] = {  # --type -> (the type most tensors get, general.file_type)
    "f32": ("F32", 0),
    "f16": ("F16", 1),
    "bf16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
    "q4_1": ("Q4_1", 3),
    "q5_0": ("Q5_0", 8),
    "q5_1": ("Q5_1", 9),
    "q2_k": ("Q2_K", 10),
    "q3_k_s": ("Q3_K", 11),
    "q3_k_m": ("Q3_K", 12),
    "q3_k_l": ("Q3_K", 13),
    "q4_k_s": ("Q4_K", 14),
    "q4_k_m": ("Q4_K", 15),
    "q5_k_s": ("Q5_K", 16),
    "q5_k_m": ("Q5_K", 17),
    "q6_k": ("Q6_K", 18),
    "iq4_nl": ("IQ4_NL", 25),
    "iq4_xs": ("IQ4_XS", 30),
}
PLAIN = ("F32", "F16", "BF16")
WRITTEN = (*PLAIN, *dict.fromkeys(kind for kind, _ in MIXTURES.values() if kind not in PLAIN))
# For rows that are no whole blocks of 256.
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
# Parts of names of matrices that are never quantised: small, or more than weights.
KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj"),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight"),
    *("time_mix_first.weight", "time_mix_lerp_fused.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_"),
    *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")),
    *("time_mix_decay_w1.weight", "time_mix_decay_w2.weight", ".rel_pos", ".patch_embd", ".patch_merger"),
    *("a.rvq.codebook", "mm.a.code_embd"),
)
KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
TOKENS, OUTPUT = ("token_embd.weight", "per_layer_token_embd.weight"), "output.weight"


@dataclass(frozen=True)
class Sizes:
    """What the rules ask of a model. gqa: heads that share a key-value head."""

    architecture: str
    layers: int
    gqa: int
    experts: int = 0


@dataclass(frozen=True)
class Asked:
    """A user's wishes. overrides: (regex, type), the first that is found in a name counts. output, embedding: types."""

    mixture: str
    pure: bool = False
    fallback: bool = True
    overrides: Sequence[tuple[re.Pattern[str], str]] = ()
    output: str | None = None
    embedding: str | None = None
    importance: bool = False


@dataclass(frozen=True)
class Choice:
    """A tensor's type. instead_of: what it would have been if its rows were whole blocks of that."""

    kind: str
    instead_of: str | None = None


def may_be_quantised(name: str, shape: tuple[int, ...]) -> bool:
    return (
        len(shape) >= 2
        and name.endswith("weight")
        and name not in KEPT_WHOLE
        and not any(part in name for part in KEPT)
    )


def in_order(name: str) -> tuple[int, str]:
    """Sorts tensors as llama.cpp goes through them, which its rules count by: by layer, then by name."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


def parse_type(text: str, option: str) -> str:
    kind = text.strip().upper()
    if kind not in WRITTEN:
        raise UsageError(f"{option} {text[:40]} is no type that is written; there are {', '.join(WRITTEN).lower()}.")
    return kind


def parse_override(text: str) -> tuple[re.Pattern[str], str]:
    """`REGEX=TYPE`."""
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"--tensor-type {text[:80]!r} must be REGEX=TYPE, such as attn_v=q8_0.")
    try:
        return re.compile(pattern), parse_type(kind, "--tensor-type")
    except re.error as error:
        raise UsageError(f"--tensor-type: {pattern[:80]!r} is no regular expression: {error}.") from error


@dataclass
class _Counts:
    values: int = 0  # of all tensors that count as attention values
    value: int = 0
    down: int = 0
    tied: bool = True
    layers: int = 0
    found: dict[str, Choice] = field(default_factory=dict)


def choose(tensors: Mapping[str, tuple[int, ...]], sizes: Sizes, asked: Asked) -> dict[str, Choice]:
    """The type of each tensor (name -> shape) that may be quantised. UsageError for a fallback that is not wanted, and
    for wishes about no tensor."""
    base, _ = MIXTURES[asked.mixture]
    counts = _Counts(layers=sizes.layers, tied=OUTPUT not in tensors)
    counts.values = sum(_part(name) == "value" for name in tensors)
    for name in sorted(tensors, key=in_order):
        if may_be_quantised(name, tensors[name]):
            kind = _kind(name, base, tensors[name][-1], sizes, asked, counts)
            counts.found[name] = _fitting(kind, tensors[name][-1])
    for pattern, kind in asked.overrides:
        if not any(map(pattern.search, counts.found)):
            raise UsageError(
                f"--tensor-type: {pattern.pattern[:60]!r} is in no name of a tensor that may become {kind.lower()}.",
                hint="--dry-run lists the names; norms, biases and what else is small stays as it is",
            )
    bad = [name for name, choice in counts.found.items() if choice.instead_of]
    if bad and not asked.fallback:
        first = counts.found[bad[0]]
        raise UsageError(
            f"Rows of {len(bad)} of {len(tensors)} tensors are no whole blocks: {bad[0]} has {tensors[bad[0]][-1]} "
            f"inputs, {first.instead_of} stores {NUMBERS[first.instead_of or ''][1]} together.",
            hint=f"without --no-fallback it becomes {first.kind}; --tensor-type chooses another",
        )
    return counts.found


def _fitting(kind: str, inputs: int) -> Choice:
    if inputs % NUMBERS[kind][1] == 0:
        return Choice(kind)
    other = FALLBACKS.get(kind, kind)
    return Choice(other if inputs % NUMBERS[other][1] == 0 else "F16", instead_of=kind)


def _kind(name: str, base: str, inputs: int, sizes: Sizes, asked: Asked, counts: _Counts) -> str:
    manual = next((kind for pattern, kind in asked.overrides if pattern.search(name)), None)
    if asked.embedding and name in TOKENS and not (manual and name == TOKENS[1]):
        return asked.embedding
    if asked.output and name == OUTPUT:
        return asked.output
    if manual is not None:
        return manual
    if base in PLAIN or asked.pure:
        return base
    return _mixed(name, base, inputs, sizes, asked, counts)


def _part(name: str) -> str:
    """What a tensor does, as far as the rules care."""
    for part, names in (
        ("value", ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
        ("key", ("attn_k.weight",)),
        ("attention output", ("attn_output.weight",)),
        ("down", ("ffn_down",)),
    ):
        if any(other in name for other in names):
            return part
    return "other"


def _more(index: int, count: int) -> bool:
    """The layers that get more bits: the first and last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _mixed(name: str, base: str, inputs: int, sizes: Sizes, asked: Asked, counts: _Counts) -> str:
    if name == OUTPUT or (counts.tied and name in TOKENS):
        if asked.output:
            return asked.output
        if sizes.architecture == "falcon" or inputs % NUMBERS[base][1]:
            return "Q8_0"
        return base if base == "Q8_0" else "Q6_K"
    match _part(name) if name not in TOKENS else "":
        case "value":
            counts.value += 1
            return _value(base, sizes, asked, counts.value - 1, counts.values)
        case "key":
            return "Q8_0" if sizes.experts == 8 else base
        case "down":
            counts.down += 1
            index = counts.down - 1 if sizes.experts < 2 else in_order(name)[0]
            return _down(base, sizes, asked, index)
        case "attention output":
            return _attention_output(base, sizes, asked)
    return base


def _value(base: str, sizes: Sizes, asked: Asked, index: int, count: int) -> str:
    kind, wide = base, sizes.gqa >= 4
    match asked.mixture:
        case "q2_k":
            kind = "Q4_K" if wide else "Q3_K"
        case "q3_k_m":
            kind = "Q5_K" if index < 2 else "Q4_K"
        case "q3_k_l":
            kind = "Q5_K"
        case "iq4_nl" | "iq4_xs" if wide:
            kind = "Q5_K"
        case "q4_k_m" | "q5_k_m" if _more(index, count):
            kind = "Q6_K"
        case "q4_k_s" if index < 4:
            kind = "Q5_K"
    if sizes.architecture == "llama" and sizes.layers == 80 and sizes.gqa > 1 and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"  # Llama 2 and 3 of 70B: values are an eighth of the queries
    return "Q8_0" if sizes.experts == 8 else kind


def _down(base: str, sizes: Sizes, asked: Asked, index: int) -> str:
    layers, falcon = sizes.layers, sizes.architecture == "falcon"
    early, more = index < layers // 8, _more(index, layers)
    match asked.mixture:
        case "q2_k":
            return "Q3_K"
        case "q3_k_m":
            return "Q5_K" if index < layers // 16 else "Q4_K" if not falcon or more else "Q3_K"
        case "q3_k_l":
            return "Q4_K" if falcon else "Q5_K"
        case "q4_k_m" if falcon:
            return "Q6_K" if index < layers // 16 else "Q5_K" if more else "Q4_K"
        case "q4_k_m" | "q5_k_m" if more:
            return "Q6_K"
        case "q4_k_s" if early and not falcon:
            return "Q5_K"
        case "iq4_nl" | "iq4_xs" if early and not asked.importance:
            return "Q5_K"
        case "q4_0" | "q5_0" if early and asked.importance:
            return "Q4_1" if asked.mixture == "q4_0" else "Q5_1"
    return base


def _attention_output(base: str, sizes: Sizes, asked: Asked) -> str:
    mixture = asked.mixture
    if sizes.architecture == "falcon":
        return "Q4_K" if mixture == "q3_k_l" else base
    if sizes.experts == 8:
        most = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
        return "Q5_K" if mixture in most else base
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mixture, base)
