"""What a model asks for while it is built. `llmx.loading` answers from a checkpoint, or with random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmx.layers.embedding import Embedding
from llmx.layers.linear import Linear


@dataclass(frozen=True)
class Part:
    """One linear of a fused one. `name` is that of the Hugging Face checkpoint, without `.weight`.

    `heads`: the outputs are this many units that a rank takes whole (key and value heads fewer than ranks are
    replicated). None: any equal split will do. `first`, `total`: its outputs are rows [first, first + n_out) of a
    stored linear with `total` of them (Phi-3 stores q, k and v as one).
    """

    name: str
    n_out: int
    heads: int | None = None
    first: int = 0
    total: int | None = None


class Weights(Protocol):
    """The weights of one rank. Every size is that of the whole model."""

    def column(self, parts: Sequence[Part], n_in: int) -> Linear:
        """(rows, n_in) -> this rank's outputs of each part, side by side."""

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Linear:
        """(rows, this rank's inputs) -> (rows, n_out): a partial sum, to be added over ranks. `heads` as in Part."""

    def vector(self, name: str, n: int) -> Tensor:
        """(n,) float32, on every rank."""

    def embedding(self, name: str, vocab: int, hidden: int) -> Embedding:
        """This rank's rows of the vocabulary: ceil(vocab / ranks), those beyond `vocab` zeros."""

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Linear:
        """(rows, hidden) -> logits of this rank's rows of the vocabulary, cut as by `embedding`.

        If nothing is stored under `name`, the tensor of the embedding `tied_to`.
        """
