"""What a Hugging Face config says about how its linears are stored: `quantization_config`, read without torch.

It says only what the stored tensors do not say themselves; which linears are quantised is seen from these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmx.errors import UsageError
from llmx.formats.fields import Fields, load_json, shown

METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
FORMATS = {"pack-quantized": "packed", "int-quantized": "int8", "float-quantized": "fp8", "naive-quantized": ""}
CONFIG_LIMIT = 4 * 2**20
MOST = 2**24  # of a group or block


@dataclass(frozen=True)
class Rule:
    """One way that linears are stored.

    format: "awq", "gptq", "packed", "int8", "fp8". group: inputs that share a scale; None: all of an output, or as the
    stored shapes say. version: of GPTQ's zero points. block: outputs and inputs of a block with a scale. targets: names
    of linears, `re:` patterns, or "Linear" for all of them. symmetric: without zero points. varies: some linears have
    other bits and groups.
    """

    format: str
    bits: int = 8
    group: int | None = None
    version: int = 1
    block: tuple[int, int] | None = None
    targets: tuple[str, ...] = ("Linear",)
    symmetric: bool = True
    varies: bool = False


@dataclass(frozen=True)
class Quantization:
    """method: `quant_method` of the config. rules: compressed-tensors may have several."""

    method: str
    rules: tuple[Rule, ...]

    def rule(self, module: str) -> Rule | None:
        """The rule for the linear of this name: one that names it goes before a pattern, a pattern before a class."""
        ranked = [(min((_rank(target, module) for target in rule.targets), default=3), rule) for rule in self.rules]
        best = min(ranked, key=lambda pair: pair[0], default=None)
        return None if best is None or best[0] == 3 else best[1]


def _rank(target: str, module: str) -> int:
    """How closely a target means the linear `module`; 3: not at all."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else 3
    return 2 if "." not in target else 3  # a class: linears are all that is stored in these formats


def of_folder(folder: Path) -> Quantization | None:
    """As the folder's config.json says, or quantize_config.json, which the first GPTQ models have. None: neither."""
    path = folder / "config.json"
    fields = load_json(path, CONFIG_LIMIT) if path.is_file() else Fields({}, path.name)
    inner = fields.section("text_config", None)
    for table in (fields, inner):
        if table is not None and (found := table.section("quantization_config", None)) is not None:
            return read(found)
    old = folder / "quantize_config.json"
    if not old.is_file():
        return None
    return read(Fields({"quant_method": "gptq"} | dict(load_json(old, CONFIG_LIMIT).data), old.name))


def read(config: Fields) -> Quantization:
    """The table `quantization_config`. UsageError for what this version can't read."""
    method = config.text("quant_method")
    if method not in METHODS:
        raise UsageError(
            f"{config.where}: weights quantised as {shown(method)} (quant_method) can't be read by this version.",
            hint=f"the methods it reads are {', '.join(METHODS)}, and GGUF files of every type",
        )
    _refuse(config, "kv_cache_scheme", "scales for the cache of keys and values")
    if method == "awq":
        return Quantization(method, (_awq(config),))
    if method == "gptq":
        return Quantization(method, (_gptq(config),))
    if method == "fp8":
        return Quantization(method, (_fp8(config),))
    return Quantization(method, _compressed(config))


def _refuse(config: Fields, key: str, what: str) -> None:
    """UsageError where something is said under `key`."""
    if config.data.get(key):
        raise UsageError(f"{config.where}: the weights come with {what} ({key}), which this version can't use.")


def _group(config: Fields, key: str = "group_size") -> int | None:
    size = config.integer(key, -1, low=-1, high=MOST)
    return size if size > 0 else None


def _awq(config: Fields) -> Rule:
    for key in ("version", "format", "checkpoint_format"):
        version = config.text(key, "gemm")
        if version.lower() != "gemm":
            raise UsageError(f"{config.where}: AWQ weights in version {shown(version)} can't be read; gemm can.")
    config.boolean("zero_point", True)
    bits = config.integer("bits" if "bits" in config else "w_bit", 4, low=1, high=32)
    if bits != 4:
        raise UsageError(f"{config.where}: AWQ weights of {bits} bits can't be read; they have 4.")
    return Rule("awq", bits, _group(config, "group_size" if "group_size" in config else "q_group_size"))


def _gptq(config: Fields) -> Rule:
    bits = config.integer("bits", low=1, high=32)
    if bits not in (2, 3, 4, 8):
        raise UsageError(f"{config.where}: GPTQ weights of {bits} bits can't be read; 2, 3, 4 and 8 can.")
    versions = {config.text(key, "gptq") for key in ("checkpoint_format", "format")}
    if unknown := versions - {"gptq", "gptq_v2"}:
        raise UsageError(f"{config.where}: GPTQ weights in format {shown(min(unknown))} can't be read; gptq and "
                         "gptq_v2 can.")  # fmt: skip
    if config.boolean("is_marlin_format", False) or config.text("pack_dtype", "int32") != "int32":
        raise UsageError(
            f"{config.where}: GPTQ weights that are not packed as int32 in GPTQ's own order can't be read."
        )
    config.boolean("sym", True)
    config.boolean("desc_act", False)
    varies = bool(config.section("dynamic", None))
    return Rule("gptq", bits, _group(config), version=2 if "gptq_v2" in versions else 1, varies=varies)


def _fp8(config: Fields) -> Rule:
    kind = config.text("fmt", "e4m3")
    if "e4m3" not in kind:
        raise UsageError(f"{config.where}: FP8 weights in format {shown(kind)} can't be read; e4m3 can.")
    config.text("activation_scheme", "dynamic", one_of=("dynamic", "static"))
    return Rule("fp8", block=_block(config, "weight_block_size"))


def _block(config: Fields, key: str) -> tuple[int, int] | None:
    sizes = config.integers(key, (), low=1, high=MOST)
    if sizes and len(sizes) != 2:
        raise UsageError(f"{config.where}: {config.prefix}{key} must hold the outputs and inputs of a block.")
    return (sizes[0], sizes[1]) if sizes else None


def _compressed(config: Fields) -> tuple[Rule, ...]:
    sparsity = config.section("sparsity_config", None)
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        _refuse(config, "sparsity_config", "sparse weights")
    _refuse(config, "transform_config", "rotations of the weights")
    status = config.text("quantization_status", "compressed")
    if status != "compressed":
        raise UsageError(
            f"{config.where}: the weights are not stored quantised (quantization_status is {shown(status)})."
        )
    groups = config.section("config_groups")
    common = config.text("format", None)
    found = []
    for name in list(groups.keys()):
        group = groups.section(name)
        weights = group.section("weights", None)
        if weights is not None:
            kind = group.text("format", None) or common
            found.append(_compressed_group(config.where, kind, weights, group.strings("targets", ("Linear",))))
    return tuple(found)


def _compressed_group(where: str, kind: str | None, weights: Fields, targets: tuple[str, ...]) -> Rule:
    if kind not in FORMATS:
        raise UsageError(
            f"{where}: compressed-tensors weights in format {shown(kind)} can't be read by this version.",
            hint=f"the formats it reads are {', '.join(FORMATS)}",
        )
    is_float = weights.text("type", "int", one_of=("int", "float")) == "float"
    bits = weights.integer("num_bits", 8, low=2, high=8)
    form = FORMATS[kind] or ("fp8" if is_float else "int8")
    if is_float != (form == "fp8") or (is_float and bits != 8):
        raise UsageError(f"{where}: {'floating-point' if is_float else 'whole'} numbers of {bits} bits are no {kind}.")
    strategy = weights.text("strategy", "group" if "group_size" in weights else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UsageError(f"{where}: weights with scales by {shown(strategy)} (strategy) can't be read.")
    if weights.boolean("dynamic", False):
        raise UsageError(f"{where}: weights whose scales are not stored (dynamic) can't be read.")
    for pattern in (target[3:] for target in targets if target.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{where}: the target {shown(pattern)} is no regular expression: {error}.") from error
    block = _block(weights, "block_structure") if strategy == "block" else None
    group = _group(weights) if strategy == "group" else None
    even = weights.boolean("symmetric", True)
    return Rule(form, bits, group, block=block, targets=targets, symmetric=even)
