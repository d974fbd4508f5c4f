"""One side of a comparison: a model with its settings, its tokenizer, and a forward over given tokens with a probe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmx.config import EngineConfig
from llmx.core import Request, SamplingParams
from llmx.engine.build import RANDOM, build_engine
from llmx.errors import UsageError
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located, locate
from llmx.inspect.probe import Follower, Recorder, attach
from llmx.kernels import BACKENDS
from llmx.models import Opened, open_model, random_shape
from llmx.tokenizer import Tokenizer, load_tokenizer

KERNELS = "LLMX_KERNELS"


@dataclass(frozen=True)
class Side:
    """config: the model and its settings. kernels: the backend that every op is taken from; None: as chosen."""

    config: EngineConfig
    kernels: str | None = None

    def __post_init__(self) -> None:
        if self.kernels is not None and self.kernels not in BACKENDS:
            raise UsageError(f"--kernels {self.kernels} is not a backend; there are {', '.join(BACKENDS)}.")

    @property
    def located(self) -> Located | None:
        return None if self.config.model.startswith(RANDOM) else locate(self.config.model)

    def opened(self) -> Opened | None:
        return None if self.located is None else open_model(self.located)

    def shape(self) -> Any:
        found = self.opened()
        return random_shape(self.config.model[len(RANDOM) :])[1] if found is None else found.config

    def tokenizer(self) -> Tokenizer | None:
        """None where the model has none."""
        located = self.located
        if located is None:
            return None
        if located.kind == "hf" and not any(
            (located.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
        ):
            return None
        if located.kind == "gguf":
            metadata = open_gguf(located.path).metadata
            return load_tokenizer(located, metadata) if "tokenizer.ggml.model" in metadata else None
        return load_tokenizer(located)

    def name(self) -> str:
        """The model and what was set of its settings."""
        config, plain = self.config, EngineConfig()
        said = [config.model]
        said += [
            f"{flag} {value}"
            for flag, value, usual in (
                ("dtype", config.dtype, plain.dtype),
                ("device", config.device, plain.device),
                ("kv-cache-dtype", config.kv_cache_dtype, plain.kv_cache_dtype),
                ("activations", config.activations, "bf16"),
                ("kernels", self.kernels, None),
            )
            if value != usual
        ]
        return ", ".join(said)


@contextmanager
def _forced(kernels: str | None) -> Iterator[None]:
    """The environment variable, which is read when a model is built, for as long as that takes."""
    before = os.environ.get(KERNELS)
    if kernels is not None:
        os.environ[KERNELS] = kernels
    try:
        yield
    finally:
        if kernels is not None:
            if before is None:
                del os.environ[KERNELS]
            else:
                os.environ[KERNELS] = before


@dataclass(frozen=True)
class Seen:
    """What a forward gave. logits: (rows, vocab) f32 on the CPU, of rows from `first` on. kernels: op -> backend."""

    logits: Tensor
    first: int
    dtype: str
    kernels: dict[str, str]


def _build(side: Side, length: int) -> tuple[Any, Any]:
    config = replace(
        side.config,
        max_model_len=length + 1,
        max_num_seqs=1,
        max_num_batched_tokens=length + 1,
        prefix_caching=False,
        overlap=False,
    )
    with _forced(side.kernels):
        return build_engine(config)


def continued(side: Side, prompt: Sequence[int], tokens: int) -> list[int]:
    """The prompt and the side's own greedy continuation."""
    if tokens == 0:
        return list(prompt)
    engine, _ = _build(side, len(prompt) + tokens)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
    with torch.inference_mode():
        (sequence,) = engine.run([Request("diff", tuple(prompt), params)])
    return list(sequence.tokens)


@torch.inference_mode()
def run(side: Side, ids: Sequence[int], first: int, probe: Recorder | Follower) -> Seen:
    """One forward over all of `ids` in one step. The model is built for it and let go."""
    engine, info = _build(side, len(ids))
    attach(engine.model, probe)
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    engine.scheduler.add(Request("diff", tuple(ids), params))
    launched = engine.launch()
    assert launched is not None
    assert len(launched.hidden) == len(ids), "all tokens are one step's"
    logits = engine.model.head(launched.hidden[first:])
    return Seen(logits.float().cpu(), first, info.dtype, dict(info.kernels))
