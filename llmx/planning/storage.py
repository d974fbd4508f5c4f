"""Bytes of a stored matrix, scheme by scheme, with the scales and zero points that a scheme's name does not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmx.errors import UsageError
from llmx.formats.gguf import TYPES

TILE = 128  # of FP8's two-dimensional blocks: a float32 scale for each, also for those cut by an edge
GROUP = 128  # of AWQ and GPTQ
# What llama.cpp takes where rows are no whole number of a type's blocks.
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"} | dict.fromkeys(
    ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
)
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
KV_SCALES = 8  # bytes that each head of a token has beside int8 keys and values


@dataclass(frozen=True)
class Storage:
    """One way to store an (n_out, n_in) matrix.

    block_bits: of `block` weights along a row, scales and zero points included; the last block is whole. out_bytes,
    in_bytes: for each output and input besides. tile_bytes: for each TILE x TILE tile. arithmetic: what a kernel
    multiplies in ("bf16", "fp8", "int8").
    """

    name: str
    block: int
    block_bits: int
    out_bytes: int = 0
    in_bytes: int = 0
    tile_bytes: int = 0
    arithmetic: str = "bf16"

    def nbytes(self, n_out: int, n_in: int) -> int:
        bits = n_out * -(-n_in // self.block) * self.block_bits
        tiles = -(-n_out // TILE) * -(-n_in // TILE)
        return -(-bits // 8) + n_out * self.out_bytes + n_in * self.in_bytes + tiles * self.tile_bytes


PLAIN = {
    "float32": Storage("float32", 1, 32),
    "bfloat16": Storage("bfloat16", 1, 16),
    "float16": Storage("float16", 1, 16),
}
FP8 = Storage("fp8", 1, 8, out_bytes=4, arithmetic="fp8")  # a float32 scale for each output
FP8_BLOCK = Storage("fp8-block", 1, 8, tile_bytes=4, arithmetic="fp8")
INT8 = Storage("int8", 1, 8, out_bytes=4, arithmetic="int8")
MXFP4 = Storage("mxfp4", 32, 32 * 4 + 8)  # Open Compute Project: 4 bits and an 8-bit exponent for 32 weights


def grouped(name: str, bits: int, group: int, *, indexed: bool) -> Storage:
    """AWQ, GPTQ: `bits` a weight, and for each group a float16 scale and a zero point of `bits`.

    indexed: GPTQ's int32 group number for each input. A group of 0 is the whole row.
    """
    if group < 1:
        return Storage(name, 1, bits, out_bytes=2 + -(-bits // 8), in_bytes=4 if indexed else 0)
    return Storage(name, group, group * bits + bits + 16, in_bytes=4 if indexed else 0)


def ggml(kind: str, n_in: int) -> Storage:
    """GGUF type `kind`, or what llama.cpp falls back to where a row of `n_in` is no whole number of its blocks."""
    table = {name: (elements, size) for name, elements, size in TYPES.values()}
    for name in (kind, FALLBACK.get(kind, "F16"), "F16"):
        elements, size = table[name]
        if n_in % elements == 0:
            return Storage(name, elements, 8 * size)
    raise AssertionError("F16 has blocks of one")


Rule = Callable[[str, str, int, int, int], Storage | None]


@dataclass(frozen=True)
class Quant:
    """How a model's matrices are stored. `of(name, kind, layer, layers, n_in)`; None: in the model's own dtype."""

    name: str
    of: Rule


def _linears(storage: Storage) -> Rule:
    """All linears of the layers but routers; embeddings and the head stay as they are."""

    def rule(name: str, kind: str, layer: int, layers: int, n_in: int) -> Storage | None:
        return storage if kind in ("attention", "mlp", "experts", "shared") else None

    return rule


def _gguf(kind: str, better: str | None = None) -> Rule:
    """As llama-quantize: every matrix; the head in Q6_K at least; routers in float32. `better`: of the _M mixtures."""

    def rule(name: str, part: str, layer: int, layers: int, n_in: int) -> Storage | None:
        if part in ("norm", "router"):
            return PLAIN["float32"]
        if part == "head":
            return ggml("Q8_0" if kind == "Q8_0" else "Q6_K", n_in)
        if better and name in ("v_proj", "down_proj") and more_bits(layer, layers):
            return ggml(better, n_in)
        return ggml(kind, n_in)

    return rule


def more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's use_more_bits: the layers in which the _M mixtures store value and down projections finer."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _every() -> dict[str, Quant]:
    rules: dict[str, Rule] = {
        "bfloat16": lambda *_: PLAIN["bfloat16"],
        "float16": lambda *_: PLAIN["float16"],
        "float32": lambda *_: PLAIN["float32"],
        "fp8": _linears(FP8),
        "fp8-block": _linears(FP8_BLOCK),
        "int8": _linears(INT8),
        "awq": _linears(grouped("awq", 4, GROUP, indexed=False)),
        "gptq": _linears(grouped("gptq", 4, GROUP, indexed=True)),
    }
    sizes = (name for name, elements, _ in TYPES.values() if elements > 1 and name not in ("Q8_1", "Q8_K"))
    rules |= {name.lower(): _gguf(name) for name in sizes}
    rules |= {"q4_k_m": _gguf("Q4_K", "Q6_K"), "q5_k_m": _gguf("Q5_K", "Q6_K")}
    rules["mxfp4"] = _linears(MXFP4)
    return {name: Quant(name, rule) for name, rule in rules.items()}


QUANTS = _every()
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"} | {
    "none": "bfloat16",
    "w8a8": "int8",
    "fp8_block": "fp8-block",
}


def quant(name: str) -> Quant:
    """The scheme of --quant. UsageError if there is none of the name."""
    found = QUANTS.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise UsageError(f"--quant {name} is not known; there are {', '.join(QUANTS)}.")
    return found


def kv_bytes(name: str) -> int:
    """Bytes of one stored key or value element."""
    found = KV_BYTES.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise UsageError(f"--kv-dtype {name} is not known; there are {', '.join(KV_BYTES)}.")
    return found
