"""What a model is made of, as far as sizes go: the matrices of every layer, and what each keeps of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from llmx.planning.storage import PLAIN, Quant, Storage

# How tensor-parallel ranks cut a matrix. "kv": by key-value heads, of which ranks that outnumber them hold copies.
SPLITS = ("out", "in", "kv", "vocab", "whole")
KINDS = ("embedding", "attention", "mlp", "experts", "shared", "router", "norm", "head")


@dataclass(frozen=True)
class Matrix:
    """`count` equal matrices (n_out, n_in), or a vector with n_in = 1. `name` is the last part of Hugging Face's.

    bias: elements of it, each with `count`. storage: as the file has it; None: in the model's dtype.
    """

    name: str
    kind: str
    n_out: int
    n_in: int
    split: str = "whole"
    count: int = 1
    bias: int = 0
    storage: Storage | None = None

    @property
    def parameters(self) -> int:
        return self.count * (self.n_out * self.n_in + self.bias)

    def nbytes(self, dtype: Storage) -> int:
        """As stored. Vectors and biases are in the model's dtype unless the file says otherwise."""
        storage = self.storage or dtype
        if self.n_in == 1:
            return self.count * storage.nbytes(1, self.n_out)
        return self.count * (storage.nbytes(self.n_out, self.n_in) + dtype.nbytes(1, self.bias))

    def share(self, ranks: int, units: int) -> Fraction:
        """Of the matrix that one of `ranks` holds; units: heads by which it is cut, if it is."""
        if self.split == "whole" or ranks == 1:
            return Fraction(1)
        if self.split == "kv":
            return Fraction(1, min(ranks, units))
        if self.split == "vocab":
            return Fraction(-(-self.n_out // ranks), self.n_out)
        return Fraction(1, ranks)


@dataclass(frozen=True)
class Attention:
    """heads of queries; kv_heads that are kept, `key` and `value` wide. window: tokens it looks back on; None: all.

    latent: MLA keeps one vector of `key` elements (latent and rotary part) for all heads, on every rank. score: flops
    for a query and one key of a head are 2 * score (products with the key, then with the value).
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    score: int
    window: int | None = None
    latent: bool = False

    def elements(self, ranks: int = 1) -> int:
        """Kept of a token on one of `ranks`."""
        if self.latent:
            return self.key
        return max(1, self.kv_heads // ranks) * (self.key + self.value)

    def kept(self, element: int, scales: int, ranks: int = 1) -> int:
        """Bytes of a token on one of `ranks`. element: of a number. scales: beside the keys and values of a head."""
        return self.elements(ranks) * element + max(1, self.kv_heads // ranks) * scales

    def reach(self, tokens: int) -> int:
        """Keys that the last of `tokens` sees."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class Layer:
    """experts: stored ones that are routed to, of which `active` serve a token; 0: a dense layer."""

    attention: Attention
    matrices: tuple[Matrix, ...]
    experts: int = 0
    active: int = 0

    @property
    def inner(self) -> int:
        """Width of the widest gated activation that one token goes through at once."""
        wide = [m.n_out * (self.active if m.kind == "experts" else 1) for m in self.matrices if m.name == "up_proj"]
        return max(wide, default=0)


@dataclass(frozen=True)
class Anatomy:
    """A model. `ends`: embedding, last norm, head. runs: whether this version of llmx can run the family.

    dtype: of what no scheme stores otherwise. stored: the name of how it is stored. notes: what isn't counted.
    """

    name: str
    architecture: str
    runs: bool
    vocab: int
    hidden: int
    max_position: int
    layers: tuple[Layer, ...]
    ends: tuple[Matrix, ...]
    tied: bool
    dtype: str
    stored: str
    norms: int = 2  # per layer
    notes: tuple[str, ...] = field(default=())

    @property
    def heads(self) -> int:
        return self.layers[0].attention.heads

    @property
    def kv_heads(self) -> int:
        return self.layers[0].attention.kv_heads

    @cached_property
    def embedding(self) -> Matrix:
        return next(matrix for matrix in self.ends if matrix.kind == "embedding")

    @cached_property
    def head(self) -> Matrix:
        """The matrix that gives logits: the embedding's, if the two are tied."""
        return next((matrix for matrix in self.ends if matrix.kind == "head"), self.embedding)

    @property
    def latent(self) -> bool:
        return self.layers[0].attention.latent

    @property
    def experts(self) -> int:
        return max(layer.experts for layer in self.layers)

    @cached_property
    def alike(self) -> dict[Layer, list[int]]:
        """Layers that are the same, and where they are."""
        found: dict[Layer, list[int]] = {}
        for i, layer in enumerate(self.layers):
            found.setdefault(layer, []).append(i)
        return found

    def matrices(self) -> Iterator[tuple[int | None, Matrix]]:
        """(layer, matrix) of all that is stored."""
        yield from ((None, matrix) for matrix in self.ends)
        yield from ((i, matrix) for i, layer in enumerate(self.layers) for matrix in layer.matrices)

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for _, matrix in self.matrices())

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with or that are looked up: all, but of the routed experts its own."""
        total = Fraction(sum(matrix.parameters for matrix in self.ends))
        for layer in self.layers:
            share = Fraction(layer.active, layer.experts) if layer.experts else Fraction(1)
            total += sum((share if m.kind == "experts" else 1) * m.parameters for m in layer.matrices)
        return int(total)

    def weight_bytes(self) -> dict[str, int]:
        """By kind, as stored."""
        found = dict.fromkeys(KINDS, 0)
        for _, matrix in self.matrices():
            found[matrix.kind] += matrix.nbytes(PLAIN[self.dtype])
        return {kind: size for kind, size in found.items() if size}

    def quantised(self, quant: Quant) -> Anatomy:
        """Stored another way. A tied embedding is stored as the head would be."""
        dtype = quant.name if quant.name in PLAIN else self.dtype if self.dtype != "float32" else "bfloat16"
        count = len(self.layers)

        def put(matrix: Matrix, layer: int) -> Matrix:
            kind = "head" if self.tied and matrix.kind == "embedding" else matrix.kind
            if matrix.n_in == 1:
                kind = "norm"
            return replace(matrix, storage=quant.of(matrix.name, kind, layer, count, matrix.n_in))

        layers = tuple(
            replace(layer, matrices=tuple(put(m, i) for m in layer.matrices)) for i, layer in enumerate(self.layers)
        )
        ends = tuple(put(matrix, 0) for matrix in self.ends)
        return replace(self, layers=layers, ends=ends, dtype=dtype, stored=quant.name)

    def kv_kept(self, tokens: int, element: int, scales: int = 0, ranks: int = 1, layers: slice = slice(None)) -> int:
        """Bytes that a sequence of `tokens` keeps in these layers on one of `ranks`; windows keep their own only."""
        attentions = (one.attention for one in self.layers[layers])
        return sum(a.reach(tokens) * a.kept(element, scales, ranks) for a in attentions)


def vector(name: str, width: int, kind: str = "norm") -> Matrix:
    return Matrix(name, kind, width, 1)
