"""Whole quantizer runs over tiny models, and what a result's weights amount to in transformers' model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import Saved, every_tiny, logits_of, prompt_of
from torch import Tensor

from llmx.formats.hub import Located
from llmx.formats.safetensors import open_safetensors
from llmx.quantize.driver import Run, fingerprint, open_source
from llmx.quantize.options import Options, group_for
from llmx.quantize.output import Output
from llmx.schemes import find

TINIES = {tiny.name: tiny for tiny in every_tiny()}
LLAMA = "Llama-0"


def texts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in (60, 40, 60, 17, 60, 60)]


def begin(
    folder: Path, out: Path, options: Options, *, resume: bool = False, force: bool = False, group: int | None = 32,
    on_disk: bool = False,
) -> Run:  # fmt: skip
    source = open_source(Located("hf" if folder.is_dir() else "gguf", folder, folder.name, False))
    if options.grids:
        mine = [(unit.name, unit.n_in) for unit in source.mine(options)]
        options = replace(options, group=group_for(group, mine))
    texts = texts_of(source.opened.config.vocab)
    mark = fingerprint(source, options, texts, 0)
    into = Output(out, len(source.units), mark, resume=resume, force=force)
    return Run(source, options, texts, into, lambda line: None, on_disk=on_disk)


def whole(folder: Path, out: Path, options: Options, **more: Any) -> Run:
    run = begin(folder, out, options, **more)
    run.quantize()
    run.finish()
    return run


def effective(run: Run, out: Path) -> dict[str, Tensor]:
    """The result's tensors as transformers names them, linears unpacked."""
    checkpoint = open_safetensors(out)
    units = {unit.name for unit in run.source.mine(run.options)}
    found, packed = {}, dict[str, dict[str, Tensor]]()
    for name in checkpoint.names():
        owner, _, suffix = name.rpartition(".")
        if owner in units and suffix != "bias" and not run.options.ignores(owner):
            packed.setdefault(owner, {})[suffix] = checkpoint.read(name)
        else:
            found[name] = checkpoint.read(name)
    for owner, tensors in packed.items():
        stored = {suffix: checkpoint.stored(f"{owner}.{suffix}") for suffix in tensors}
        scheme = find(owner, stored, checkpoint.quantization)
        read = {suffix: tensor for suffix, tensor in tensors.items() if suffix not in scheme.unread}
        found[f"{owner}.weight"] = scheme.unpack(read, torch.float32)
    return found


@contextmanager
def effective_in(run: Run, out: Path, saved: Saved) -> Iterator[None]:
    """The result's weights in transformers' model, for a while."""
    before = {name: p.detach().clone() for name, p in saved.model.named_parameters()}
    try:
        with torch.no_grad():
            made = effective(run, out)
            for name, parameter in saved.model.named_parameters():
                parameter.copy_(made[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in saved.model.named_parameters():
                parameter.copy_(before[name])


def loss(run: Run, out: Path, saved: Saved) -> float:
    """Root mean square distance of the result's logits by transformers from the source's, in standard deviations."""
    prompt = prompt_of(saved.config["vocab_size"], 80)
    wanted = logits_of(saved.model, prompt)
    with effective_in(run, out, saved):
        return float((logits_of(saved.model, prompt) - wanted).square().mean().sqrt() / wanted.std())


def tree(folder: Path) -> str:
    """A hash of all names and bytes in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()
