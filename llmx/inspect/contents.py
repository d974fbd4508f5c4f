"""What is stored in a checkpoint, tensor by tensor, read from the headers alone: without torch, and though parts of it
may be damaged. What the readers refuse becomes a finding."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from llmx.errors import UsageError
from llmx.formats.checkpoint import MappedCheckpoint, Region, Stored
from llmx.formats.fields import Fields, load_json
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.formats.quantization import Quantization, Rule, of_folder
from llmx.formats.quantized import by_module, faults, sign, whole_numbers
from llmx.formats.safetensors import open_shard, read_regions
from llmx.inspect.findings import Finding

INDEX = "model.safetensors.index.json"
KINDS = ("embedding", "attention", "mlp", "norms", "head", "other")
_KINDS = (
    ("norms", re.compile(r"norm|(^|\.)ln_")),
    ("embedding", re.compile(r"embed|token_embd|(^|\.)wte(\.|$)")),
    ("head", re.compile(r"(^|\.)lm_head(\.|$)|^output(\.|$)")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|experts")),
)
LABELS = {"awq": "AWQ", "gptq": "GPTQ", "packed": "compressed-tensors", "int8": "INT8", "fp8": "FP8"}


@dataclass(frozen=True)
class Entry:
    """A stored tensor. kind: one of KINDS. scheme: of the linear that it is part of. weights: those that it holds, 0
    for scales and the like. shape: (n_out, n_in) of packed weights. bits: effective, of a weight, all that belongs to
    the linear counted but its bias; None for what holds no weights."""

    stored: Stored
    module: str
    part: str
    kind: str
    scheme: str
    weights: int
    shape: tuple[int, ...]
    bits: float | None


@dataclass
class Contents:
    """config: config.json, or a GGUF file's metadata; empty where it can't be read. broken: linears whose tensors do
    not fit together, which later checks leave alone. readable: whether all files were."""

    located: Located
    config: Fields
    checkpoint: MappedCheckpoint
    entries: list[Entry] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    readable: bool = True

    @property
    def quantization(self) -> Quantization | None:
        return self.checkpoint.quantization

    @property
    def settings(self) -> Mapping[str, Any]:
        """The table `quantization_config` as it is written; empty: there is none."""
        for table in (self.config.data, self.config.data.get("text_config")):
            if isinstance(table, Mapping) and isinstance(found := table.get("quantization_config"), Mapping):
                return found
        return {}

    def matching(self, pattern: str) -> list[Entry]:
        return [entry for entry in self.entries if fnmatch.fnmatchcase(entry.stored.name, pattern)]


def open_contents(located: Located) -> Contents:
    """Opens what can be opened of a model's files."""
    if located.kind == "gguf":
        contents = _open_gguf(located)
    else:
        contents = _open_folder(located)
        for module, error in faults(contents.checkpoint):
            contents.broken.add(module)
            contents.findings.append(Finding("error", "packing", "packing", module, error.message, error.hint or ""))
    contents.entries = list(_entries(contents))
    return contents


def _open_gguf(located: Located) -> Contents:
    try:
        checkpoint = open_gguf(located.path)
    except UsageError as error:
        empty = Contents(located, Fields({}, located.path.name), MappedCheckpoint("gguf", {}), readable=False)
        empty.findings.append(_damage(located.path, error))
        return empty
    return Contents(located, Fields(checkpoint.metadata, located.path.name), checkpoint)


def _open_folder(located: Located) -> Contents:
    findings: list[Finding] = []
    config, quantization, readable = Fields({}, "config.json"), None, True
    try:
        config = load_json(located.path / "config.json")
        quantization = of_folder(located.path)
    except UsageError as error:
        findings.append(Finding("error", "config", "unreadable", "config.json", error.message, error.hint or ""))
    try:
        regions = read_regions(located.path)
    except UsageError as error:
        findings.append(_damage(located.path, error))
        readable = False
        regions = _readable(located.path, findings)
    if readable:
        findings += _strays(located.path, regions)
    checkpoint = MappedCheckpoint("safetensors", regions, quantization)
    return Contents(located, config, checkpoint, findings=findings, readable=readable)


def _damage(path: Path, error: UsageError) -> Finding:
    return Finding("error", "files", error.message, path.name, error.message, error.hint or "")


def _readable(folder: Path, findings: list[Finding]) -> dict[str, Region]:
    """Of the shards that can be read by themselves; those that can't are found too."""
    regions: dict[str, Region] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shard = open_shard(path)
        except UsageError as error:
            if all(finding.message != error.message for finding in findings):
                findings.append(_damage(path, error))
            continue
        for name in shard.names():
            regions.setdefault(name, shard.region(name))
    return regions


def _strays(folder: Path, regions: Mapping[str, Region]) -> Iterator[Finding]:
    """Weight files that nothing names: other loaders may read them all."""
    used = {region.file.path.name for region in regions.values()}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in used:
            by = INDEX if (folder / INDEX).is_file() else "model.safetensors, which is read instead,"
            yield Finding("warning", "files", "stray", path.name, f"{path.name} holds weights that {by} does not name.",
                          "Delete it if it is left over.")  # fmt: skip


def kind_of(name: str) -> str:
    """Which of KINDS a tensor's name says it is, in Hugging Face's names and GGUF's."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def _entries(contents: Contents) -> Iterator[Entry]:
    checkpoint = contents.checkpoint
    packed: dict[str, tuple[Stored, tuple[int, ...], str]] = {}
    groups = by_module(checkpoint)
    for module, linear in groups.items():
        carrier, rule = sign(linear), None
        if carrier is None:
            continue
        if contents.quantization is not None:
            rule = contents.quantization.rule(module)
        size = None if rule is None or module in contents.broken else logical(checkpoint, linear, rule)
        packed[module] = (carrier, size or carrier.shape, _label(linear, rule, size) if rule else carrier.kind)
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        module, _, part = name.rpartition(".")
        if module not in packed or part == "bias":
            bits = 8 * stored.nbytes / prod(stored.shape) if prod(stored.shape) else None
            yield Entry(stored, module, part, kind_of(name), stored.kind, prod(stored.shape), stored.shape, bits)
            continue
        carrier, shape, scheme = packed[module]
        if stored is not carrier:
            yield Entry(stored, module, part, kind_of(name), scheme, 0, stored.shape, None)
            continue
        held = sum(one.nbytes for other, one in groups[module].items() if other != "bias")
        bits = 8 * held / prod(shape) if prod(shape) else None
        yield Entry(stored, module, part, kind_of(name), scheme, prod(shape), shape, bits)


def logical(checkpoint: MappedCheckpoint, linear: Mapping[str, Stored], rule: Rule) -> tuple[int, int]:
    """(n_out, n_in) of a quantised linear whose tensors fit together."""
    if rule.format == "awq":
        return linear["scales"].shape[1], linear["qweight"].shape[0]
    if rule.format == "gptq":
        n_out = linear["scales"].shape[1]
        return n_out, linear["qweight"].shape[0] * 32 // gptq_bits(linear)
    if rule.format == "packed":
        n_out, n_in = whole_numbers(checkpoint, linear["weight_shape"])
        return n_out, n_in
    n_out, n_in = linear["weight"].shape
    return n_out, n_in


def gptq_bits(linear: Mapping[str, Stored]) -> int:
    """Of this linear: others of the model may have other bits."""
    return linear["qzeros"].shape[1] * 32 // linear["scales"].shape[1]


def groups_of(linear: Mapping[str, Stored], rule: Rule) -> int:
    """Scales of an output."""
    if rule.format in ("awq", "gptq"):
        return linear["scales"].shape[0]
    return linear["weight_scale"].shape[-1]


def _label(linear: Mapping[str, Stored], rule: Rule, shape: tuple[int, int] | None) -> str:
    """The scheme of a linear: "AWQ 4 bits, groups of 64"."""
    name = LABELS[rule.format] + (" v2" if rule.version == 2 else "")
    if shape is None:
        return name
    if rule.block is not None:
        return f"{name}, blocks of {rule.block[0]}×{rule.block[1]}"
    if rule.format in ("fp8", "int8"):
        scale = next((one for part, one in linear.items() if part.startswith("weight_scale")), None)
        by = "tensor" if scale is None or prod(scale.shape) == 1 else "output" if rule.group is None else "group"
        return f"{name} by {by}"
    bits = gptq_bits(linear) if rule.format == "gptq" else rule.bits
    groups = groups_of(linear, rule)
    size = "rows as groups" if groups == 1 else f"groups of {-(-shape[1] // groups) if rule.varies else rule.group}"
    zeros = ", zero points" if not rule.symmetric else ""
    return f"{name} {bits} bits, {size}{zeros}"
