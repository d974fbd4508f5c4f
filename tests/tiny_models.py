"""Tiny models that transformers builds from a family's TINY, with weights drawn anew so that no part of them hides."""

from __future__ import annotations

import copy
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from llmx.cache.pools import windows_of
from llmx.core import Request, SamplingParams
from llmx.engine.engine import Decided, Engine, Launched
from llmx.formats.hub import Located
from llmx.kernels import Kernels
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened, families, open_model
from llmx.scheduler import Limits

CPU = torch.device("cpu")
PROMPT, GREEDY, SIZE = 300, 64, 16
TOLERANCE = 1e-4  # of the logits' standard deviation
SPREAD = 2.5  # what the logits' standard deviation is made, so that a small error can't hide among small logits


@dataclass(frozen=True, eq=False)
class Tiny:
    """One of a family's TINY: an architecture of transformers, and keyword arguments of its config."""

    family: ModuleType
    architecture: str
    options: Mapping[str, Any]
    index: int

    @property
    def name(self) -> str:
        return f"{self.architecture.removesuffix('ForCausalLM')}-{self.index}"

    @property
    def oracle(self) -> Any:
        return getattr(transformers, self.architecture)

    def config_json(self) -> dict[str, Any]:
        """What transformers writes to config.json."""
        made = self.oracle.config_class(**self.options)
        return json.loads(made.to_json_string(use_diff=False)) | {"architectures": [self.architecture]}


@cache
def tinies(family: ModuleType) -> list[Tiny]:
    """`TINY` is a dict, for the first of ARCHITECTURES, or a tuple of (architecture, dict)."""
    found = getattr(family, "TINY", ())
    pairs = [(family.ARCHITECTURES[0], found)] if isinstance(found, dict) else found
    return [Tiny(family, architecture, options, i) for i, (architecture, options) in enumerate(pairs)]


def every_tiny() -> list[Tiny]:
    return [tiny for family in families() for tiny in tinies(family)]


class Double(TorchFunctionMode):
    """float64 wherever float32 is named. transformers turns, norms and sums in float32 whatever the weights' dtype, and
    angles of some hundred radians in float32 are an error of the size that is looked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def build(oracle: Any, config: Mapping[str, Any], gain: float = 1.0, reads: set[str] | None = None) -> Any:
    """transformers' model of a config.json, its weights redrawn: f32 values held in f64. Raises whatever it raises.

    reads: is given the names of all that transformers reads from its config, now and later.
    """
    made = parse(oracle, config)
    if reads is not None:
        kind = type(made)

        class Watched(kind):  # type: ignore[valid-type, misc]
            def __getattribute__(self, name: str) -> Any:
                reads.add(name)
                return kind.__getattribute__(self, name)

        made.__class__ = Watched
    with Double(), no_init_weights():
        model = oracle._from_config(made, attn_implementation="eager", dtype=torch.float64).eval()
        model.tie_weights()
        redraw(model, gain)
    return model


def parse(oracle: Any, config: Mapping[str, Any]) -> Any:
    """transformers' config; what it is given stays as it is."""
    return oracle.config_class.from_dict(copy.deepcopy(dict(config)))


@torch.no_grad()
def redraw(model: torch.nn.Module, gain: float) -> None:
    """Each tensor from its name and shape alone, so that models which share it have it alike.

    Linears N(0, 1.5 / sqrt(fan in)), biases +- 0.3, what a norm multiplies by 1 +- 0.3. Embedding and head
    N(0, gain / sqrt(hidden)). The last norm has either sign: else a tied head would only ever repeat the last token.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{tuple(parameter.shape)}".encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            stored = parameter.mean().item()  # 1, or 0 where the family adds 1
            assert stored in (0.0, 1.0), name
            factor = 1 + 0.3 * noise
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                factor *= 1.6
            if name == "model.norm.weight":
                factor *= torch.randint(0, 2, factor.shape, generator=generator) * 2 - 1
            parameter.copy_((factor - 1 + stored).float())
        elif name.endswith("bias"):
            parameter.copy_((0.3 * noise).float())
        else:
            vocabulary = "embed_tokens" in name or "lm_head" in name
            drawn = noise * (gain if vocabulary else 1.5) / math.sqrt(parameter.shape[1])
            parameter.copy_(drawn.float())


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """(tokens, vocab) f64, in one piece, without a cache."""
    with Double():
        said = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return (said.logits if hasattr(said, "logits") else said[0])[0]


@torch.no_grad()
def attention_of(model: Any, tokens: Sequence[int]) -> list[Tensor]:
    """Per layer (heads, tokens, tokens)."""
    with Double():
        said = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_attentions=True, return_dict=True)
    return [layer[0] for layer in said.attentions]


def prompt_of(vocab: int, length: int = PROMPT) -> tuple[int, ...]:
    """Random tokens, with stretches that come again, as in a text."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(3, vocab, (length,), generator=generator)
    drawn[length // 2 : length // 2 + length // 6] = drawn[: length // 6]
    return tuple(drawn.tolist())


@dataclass(frozen=True, eq=False)
class Saved:
    """A tiny model on disk, as a Hugging Face folder, and transformers' view of it."""

    tiny: Tiny
    config: dict[str, Any]
    model: Any
    gain: float
    folder: Path
    reads: frozenset[str]  # what transformers reads of its config to build it and run it

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach().float() for name, p in self.model.named_parameters()}

    def open(self) -> Opened:
        return open_folder(self.folder)


def save(folder: Path, config: Mapping[str, Any], model: Any | None, like: Path | None = None) -> Path:
    """A folder with this config.json and the model's weights, or those of the folder `like`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    target = folder / "model.safetensors"
    if like is not None:
        target.symlink_to(like / "model.safetensors")
    else:
        assert model is not None
        safetensors.torch.save_file({n: p.detach().float().contiguous() for n, p in model.named_parameters()}, target)
    return folder


def make(tiny: Tiny, folder: Path) -> Saved:
    """Built, its logits' spread measured and set, saved."""
    config = tiny.config_json()
    prompt, gain = prompt_of(config["vocab_size"]), SPREAD
    for _ in range(3):  # a soft-cap bends what a gain does
        model = build(tiny.oracle, config, gain)
        gain *= SPREAD / logits_of(model, prompt).std().item()
    reads: set[str] = set()
    model = build(tiny.oracle, config, gain, reads)
    logits_of(model, prompt)
    return Saved(tiny, config, model, gain, save(folder, config, model), frozenset(reads))


def open_folder(folder: Path) -> Opened:
    return open_model(Located("hf", folder, folder.name, False))


def open_gguf_file(path: Path) -> Opened:
    return open_model(Located("gguf", path, path.name, False))


class Recorder(Engine):
    """An engine for one text, that keeps the hidden state of each of its positions."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.hidden: dict[int, Tensor] = {}
        self.steps: list[int] = []

    def launch(self, before: Decided | None = None) -> Launched | None:
        launched = super().launch(before)
        if launched is not None:
            self.steps.append(len(launched.batch.tokens))
            self.hidden |= dict(zip(launched.batch.positions.tolist(), launched.hidden.clone(), strict=True))
        return launched


@dataclass(frozen=True)
class Said:
    """logits (positions, vocab) of prompt and output but for its last token; steps: tokens of each."""

    logits: Tensor
    output: tuple[int, ...]
    steps: tuple[int, ...]


def load(opened: Opened, length: int, config: Any = None) -> tuple[Any, CheckpointWeights]:
    """Our model, f32, from checked files; `config` in place of theirs."""
    kernels = Kernels("cpu")
    weights = CheckpointWeights(opened.checkpoint, opened.names, Shard(), torch.float32, CPU, kernels)
    with torch.inference_mode():
        model = opened.family.Model(config or opened.config, weights, kernels, length=length, device=CPU)
    return model, weights


@torch.inference_mode()
def run(model: Any, prompt: Sequence[int], *, outputs: int = 1, budget: int = 1024) -> Said:
    """Greedy, the prompt in chunks of `budget`. Every position's logits, by the model's head."""
    length = len(prompt) + outputs
    blocks = 2 + length // SIZE
    engine = Recorder(
        model,
        limits=Limits(budget=budget, running=1, length=length),
        blocks=[1 + blocks] * len(windows_of(model.config.specs())),
        size=SIZE,
        kv_dtype=torch.float32,
        device=CPU,
        poison=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=outputs, seed=0)
    (sequence,) = engine.run([Request("it", tuple(prompt), params)])
    hidden = torch.stack([engine.hidden[i] for i in range(length - 1)])
    return Said(model.head(hidden), tuple(sequence.output), tuple(engine.steps))


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in standard deviations of what is wanted."""
    assert found.shape == wanted.shape
    worst = (found - wanted).abs().max().item() / wanted.std().item()
    return worst if math.isfinite(worst) else math.inf
