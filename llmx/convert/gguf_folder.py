"""What a GGUF file is made from where that is a Hugging Face folder: what is packed there is unpacked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import lcm, prod

import numpy as np
import torch
from torch import Tensor

from llmx.convert.arrays import Bytes, Numbers, bytes_of, in_steps
from llmx.convert.gguf_about import about
from llmx.convert.gguf_source import GgufSource, Rows
from llmx.convert.gguf_types import Sizes
from llmx.convert.gguf_vocab import vocabulary
from llmx.convert.plain import FLOATS, Plain, dense_dtype, pieces
from llmx.errors import UsageError
from llmx.formats.checkpoint import Stored
from llmx.formats.gguf_write import QUANTIZATION_VERSION, UINT32, encode
from llmx.formats.hub import Located
from llmx.layers.gguf_form import GgufForm
from llmx.models import Opened, open_model

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
TIED = "lm_head.weight"
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's numbers of what is not quantised
NAMED_AS_IT_IS = ("phi3",)  # llama.cpp knows by "phi-3" in its name that its tokens swallow the spaces after them
UNUSED = (".rotary_emb.inv_freq",)  # stored by old versions of transformers, and follow from the config


@dataclass(frozen=True)
class _Unit:
    stored: str
    heads: int | None
    plus: float


class FolderSource(GgufSource):
    """A Hugging Face folder of a family that llmx runs."""

    def __init__(self, located: Located, pretokenizer: str | None) -> None:
        opened = open_model(located)
        form: GgufForm = opened.config.to_gguf()
        config = opened.config
        super().__init__(Sizes(form.architecture, config.layers, config.heads // config.kv_heads), {})
        self._plain = Plain(opened, torch.float32)
        self._dense = dense_dtype(opened)
        self._units: dict[str, _Unit] = {}
        self._extra = {name: np.array(values, np.float32) for name, values in form.tensors.items()}
        self.notes += form.notes
        self._name_tensors(opened, form)
        rows = self.shapes["token_embd.weight"][0]
        named = opened.metadata.text("_name_or_path", None)
        weights = sum(map(prod, self.shapes.values()))
        name, said = about(located.path, named, weights, titled=form.architecture not in NAMED_AS_IT_IS)
        vocab = vocabulary(located.path, rows, pretokenizer, name)
        self.notes += vocab.notes
        self.found_by = vocab.found_by
        self.pairs |= {"general.architecture": encode(form.architecture), "general.type": encode("model")} | said
        self.pairs["general.name"] = encode(vocab.name)
        written = form.pairs | {f"{form.architecture}.vocab_size": rows} | vocab.pairs
        self.pairs |= {key: encode(value) for key, value in written.items()}
        self.pairs["general.file_type"] = encode(FILE_TYPES[self._mostly()], UINT32)
        self.pairs["general.quantization_version"] = encode(QUANTIZATION_VERSION, UINT32)

    def _name_tensors(self, opened: Opened, form: GgufForm) -> None:
        left_out = []
        table, permuted = opened.family.GGUF, opened.family.GGUF_PERMUTED
        for name in self._plain.names():
            owner, _, suffix = name.rpartition(".")
            found = _LAYER.match(owner)
            pattern = owner if found is None else f"model.layers.{{i}}.{found[2]}"
            if name == TIED and opened.config.tied:
                if not self._equals_embedding():
                    self.notes.append("lm_head.weight differs from the embedding, which the config says it shares.")
                continue
            if pattern not in table or suffix not in ("weight", "bias"):
                if not name.endswith(UNUSED):
                    left_out.append(name)
                continue
            target = f"{table[pattern] if found is None else table[pattern].replace('{i}', found[1])}.{suffix}"
            part = owner.rsplit(".", 1)[-1]
            heads = getattr(opened.config, permuted[part]) if part in permuted else None
            plus = form.norms if suffix == "weight" and owner.endswith("norm") else 0.0
            self._units[target] = _Unit(name, heads, plus)
            self._add(target, self._plain.stored(name), self._packed(name))
        for name, values in self._extra.items():
            self.shapes[name], self.kinds[name] = values.shape, "F32"
        self.nbytes = sum(opened.checkpoint.stored(name).nbytes for name in opened.checkpoint.names())
        if left_out:
            self.notes.append(f"{len(left_out)} tensors have no place in a GGUF file: {left_out[0]}...")
        self._complete(opened)

    def _mostly(self) -> str:
        """The kind that most weights have."""
        sizes = Counter[str]()
        for name, kind in self.kinds.items():
            sizes[kind] += prod(self.shapes[name])
        return sizes.most_common(1)[0][0]

    def _packed(self, name: str) -> bool:
        return not self._plain._entries[name].same

    def _equals_embedding(self) -> bool:
        if "model.embed_tokens.weight" not in self._plain:
            return True
        head, embedding = TIED, "model.embed_tokens.weight"
        shape = self._plain.stored(head).shape
        if shape != self._plain.stored(embedding).shape:
            return False
        together = lcm(self._plain.together(head), self._plain.together(embedding))
        return all(
            torch.equal(self._plain.read(head, {0: rows}).float(), self._plain.read(embedding, {0: rows}).float())
            for rows in in_steps(shape, together)
        )

    def _add(self, target: str, stored: Stored, packed: bool) -> None:
        if stored.kind not in FLOATS:
            raise UsageError(f"{stored.name} is stored as {stored.kind}; it must be floating-point numbers.")
        if not stored.shape:
            raise UsageError(f"{stored.name} is a single number, which no tensor of a model is.")
        self.shapes[target] = stored.shape
        kind = next(kind for kind, dtype in FLOATS.items() if dtype == self._dense) if packed else stored.kind
        self.kinds[target] = kind if len(stored.shape) > 1 else "F32"

    def _complete(self, opened: Opened) -> None:
        """UsageError unless every layer has what the first has, with its shape, and the ends are there."""
        config = opened.config
        wanted = {"token_embd.weight": (config.vocab, config.hidden), "output_norm.weight": (config.hidden,)}
        if not config.tied:
            wanted["output.weight"] = (config.vocab, config.hidden)
        first = {name.removeprefix("blk.0."): shape for name, shape in self.shapes.items() if name.startswith("blk.0.")}
        for layer in range(config.layers):
            wanted |= {f"blk.{layer}.{rest}": shape for rest, shape in first.items()}
        for name, shape in wanted.items():
            if name not in self.shapes:
                raise UsageError(f"{opened.metadata.where}: the checkpoint has no tensor for {name}; is it complete?")
            if self.shapes[name] != shape:
                raise UsageError(f"{name} would be {self.shapes[name]}, but the config asks for {shape}.")
        if not first or (beyond := [n for n in self.shapes if n.startswith(f"blk.{config.layers}.")]):
            what = beyond[0] if first else "blk.0"
            raise UsageError(f"{opened.metadata.where}: {config.layers} layers, which does not fit the tensor {what}.")

    def numbers(self, name: str) -> Iterator[Rows]:
        if name in self._extra:
            yield Rows(1, partial(self._extra[name].reshape, 1, -1))
            return
        unit = self._units[name]
        shape = self._plain.stored(unit.stored).shape
        if len(shape) == 1:
            yield Rows(1, lambda: self._rows(unit, 0, shape[0]).reshape(1, -1))
            return
        together = lcm(self._plain.together(unit.stored), 1 if unit.heads is None else shape[0] // unit.heads)
        for first, last in in_steps(shape, together):
            yield Rows((last - first) * prod(shape[1:-1]), partial(self._rows, unit, first, last))

    def _rows(self, unit: _Unit, first: int, last: int) -> Numbers:
        """Some rows, whole heads, where GGUF has them."""
        shape = self._plain.stored(unit.stored).shape
        made = self._plain.read(unit.stored, {0: (first, last)})
        if unit.heads is not None:
            made = interleaved(made, unit.heads * (last - first) // shape[0])
        made = made.reshape(-1, shape[-1]).float()
        found: Numbers = (made + unit.plus if unit.plus else made).numpy()
        return found

    def as_stored(self, name: str, kind: str) -> Iterator[Bytes] | None:
        unit = self._units.get(name)
        if unit is None or unit.heads is not None or unit.plus or self._packed(unit.stored):
            return None
        if self._plain.stored(unit.stored).kind != kind:
            return None
        return map(bytes_of, pieces(self._plain, unit.stored))

    def release(self, name: str) -> None:
        if name in self._units:
            self._plain.release(self._units[name].stored)

    def kept(self, name: str) -> str:
        return "F32"


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """(head, half, pair) rows -> (head, pair, half), as GGUF's llama has q and k."""
    made: Tensor = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return made
