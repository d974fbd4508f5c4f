"""What a config says of a checkpoint against what is stored, and what vLLM makes of it; from headers, without torch.

What vLLM 0.32 refuses is read from its loaders: GPTQ with zero points, other bits or act-order; AWQ without zero
points; compressed-tensors that are sorted by activation; linears that it fuses of which only some are quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmx.errors import UsageError
from llmx.formats.checkpoint import Stored
from llmx.formats.fields import load_json
from llmx.formats.quantization import Rule
from llmx.formats.quantized import by_module, sign
from llmx.inspect.contents import Contents, groups_of, kind_of, logical
from llmx.inspect.findings import Finding

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # what vLLM reads as one linear
GROUPS = (None, 32, 64, 128)  # that vLLM has GPTQ kernels for; None: one a row
OLD = "quantize_config.json"
SAME = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")

Linears = Mapping[str, Mapping[str, Stored]]


def declared(contents: Contents) -> Iterator[Finding]:
    """Findings of the config, linear by linear where it matters."""
    settings = contents.settings
    if contents.quantization is None or not settings:
        return
    stored = by_module(contents.checkpoint)
    linears = {module: linear for module, linear in stored.items() if _is_linear(module, linear)}
    yield from _said_where(contents, settings)
    yield from _methods(contents, settings)
    yield from _left_out(linears, settings)
    yield from _fused(linears)
    yield from _ragged(contents, linears)
    yield from _static(linears, settings)


def _is_linear(module: str, linear: Mapping[str, Stored]) -> bool:
    found = sign(linear) or linear.get("weight")
    return found is not None and len(found.shape) == 2 and kind_of(f"{module}.weight") in ("attention", "mlp", "head")


def _said_where(contents: Contents, settings: Mapping[str, Any]) -> Iterator[Finding]:
    if not contents.config.data.get("quantization_config") and contents.config.data.get("text_config"):
        yield Finding("warning", "vllm", "nested", "config.json",
                      "quantization_config stands inside text_config, where vLLM does not look for it.",
                      "Move it to the top of config.json.")  # fmt: skip
    old = contents.located.path / OLD
    if settings.get("quant_method") == "gptq" and old.is_file():
        yield from _old(old, settings)


def _old(path: Path, settings: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        says = load_json(path).data
    except UsageError as error:
        yield Finding("warning", "config", "old", OLD, error.message)
        return
    for key in SAME:
        if key in says and key in settings and says[key] != settings[key]:
            yield Finding("error", "config", "old", OLD,
                          f"{OLD} says {key} is {says[key]!r}, config.json says {settings[key]!r}.",
                          "Old loaders read the one, new ones the other: make them equal.")  # fmt: skip


def _vllm(kind: str, message: str, hint: str) -> Finding:
    return Finding("warning", "vllm", kind, "config.json", f"vLLM 0.32 does not load {message}.", hint)


def _methods(contents: Contents, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """What vLLM refuses for the method as a whole."""
    assert contents.quantization is not None
    method = settings.get("quant_method")
    for rule in contents.quantization.rules:
        if method == "gptq":
            yield from _gptq(rule, settings)
        elif method == "awq" and settings.get("zero_point", True) is False:
            yield _vllm("awq", "AWQ without zero points (zero_point: false)", "Quantise with zero points.")
    for name, group in (settings.get("config_groups") or {}).items():
        order = (group.get("weights") or {}).get("actorder") if isinstance(group, Mapping) else None
        if order in ("group", "dynamic", True):
            yield _vllm("order", f"weights that are sorted by activation (actorder: {order!r} of {name})",
                        "Quantise with static act-order.")  # fmt: skip


def _gptq(rule: Rule, settings: Mapping[str, Any]) -> Iterator[Finding]:
    if rule.bits not in (4, 8):
        yield _vllm("bits", f"GPTQ of {rule.bits} bits", "It has kernels for 4 and 8; llmx runs them all.")
    if settings.get("sym", True) is False:
        yield _vllm("sym", "GPTQ with zero points (sym: false)", "Quantise with --sym, or as AWQ.")
    if rule.group not in GROUPS:
        yield _vllm("group", f"GPTQ in groups of {rule.group}", "It has kernels for 32, 64, 128 and whole rows.")
    if settings.get("desc_act", False) and rule.group is not None:
        yield _vllm("order", "GPTQ sorted by activation (desc_act: true)", "Quantise with static act-order.")


def left_out(module: str, settings: Mapping[str, Any]) -> bool:
    """Whether the table `quantization_config` says that this linear is not quantised."""
    method = settings.get("quant_method")
    if method == "gptq":
        rules = settings.get("dynamic") or {}
        return any(key.startswith("-:") and re.match(key[2:], module) for key in rules)
    if method == "awq":
        return any(name in module for name in settings.get("modules_to_not_convert") or ())
    if method == "fp8":
        names = settings.get("ignored_layers") or settings.get("modules_to_not_convert") or ()
        return any(module == name or module.startswith(f"{name}.") for name in names)
    names = settings.get("ignore") or ()
    return any(re.match(name[3:], module) if name.startswith("re:") else name == module for name in names)


def _left_out(linears: Linears, settings: Mapping[str, Any]) -> Iterator[Finding]:
    method = settings.get("quant_method")
    for module, linear in linears.items():
        packed, is_head = sign(linear), kind_of(f"{module}.weight") == "head"
        try:
            out = left_out(module, settings)
        except (re.error, TypeError, AttributeError):
            yield Finding("error", "config", "ignore", "config.json", "The list of linears that quantization_config "
                          "leaves out can't be read.", "Names or regular expressions are expected.")  # fmt: skip
            return
        if packed is not None and (out or (is_head and method == "gptq" and not settings.get("lm_head", False))):
            why = "leaves it out" if out else "says lm_head: false"
            yield Finding("error", "config", "left out", module, f"{module} is stored quantised, but "
                          f"quantization_config {why}.", "Loaders that believe it want a plain weight.")  # fmt: skip
        if packed is None and not out and method != "gptq" and (not is_head or method == "compressed-tensors"):
            where = {"awq": "modules_to_not_convert", "fp8": "modules_to_not_convert"}.get(str(method), "ignore")
            yield Finding("warning", "vllm", "not left out", module, f"{module} is stored plainly, and "
                          f"quantization_config does not leave it out.", f"Name it in {where}.")  # fmt: skip


def _fused(linears: Linears) -> Iterator[Finding]:
    for module in linears:
        owner, _, last = module.rpartition(".")
        for parts in FUSED:
            if last != parts[0] or any(f"{owner}.{part}" not in linears for part in parts):
                continue
            packed = [part for part in parts if sign(linears[f"{owner}.{part}"]) is not None]
            if packed and len(packed) < len(parts):
                plain = [part for part in parts if part not in packed]
                yield Finding("warning", "vllm", "fused", module, f"{owner}: {', '.join(packed)} are quantised and "
                              f"{', '.join(plain)} not, but vLLM reads them as one linear.",
                              "Quantise all of them or none.")  # fmt: skip
            elif packed and len({frozenset(linears[f"{owner}.{part}"]) - {"bias"} for part in parts}) > 1:
                yield Finding("warning", "vllm", "fused", module, f"{owner}: {', '.join(parts)} are quantised in "
                              "different ways, but vLLM reads them as one linear.", "Quantise them alike.")  # fmt: skip


def _ragged(contents: Contents, linears: Linears) -> Iterator[Finding]:
    """Groups that do not divide the inputs: llmx reads them, vLLM does not."""
    assert contents.quantization is not None
    for module, linear in linears.items():
        rule = contents.quantization.rule(module)
        if sign(linear) is None or rule is None or rule.group is None or module in contents.broken:
            continue
        if rule.format not in ("gptq", "packed", "int8"):
            continue
        n_in, groups = logical(contents.checkpoint, linear, rule)[1], groups_of(linear, rule)
        size = rule.group if not rule.varies else -(-n_in // groups)
        if n_in % size:
            yield Finding("warning", "groups", "ragged", module, f"{module} has {n_in} inputs, which are "
                          f"{n_in // size} groups of {size} and {n_in % size} more; vLLM 0.32 does not load such a "
                          "rest.", f"Quantise again with a group size that divides {n_in}.")  # fmt: skip


def _static(linears: Linears, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Scales of activations that were to be stored."""
    static = settings.get("quant_method") == "fp8" and settings.get("activation_scheme") == "static"
    for group in (settings.get("config_groups") or {}).values():
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        static = static or (isinstance(inputs, Mapping) and inputs.get("dynamic") is False)
    for module, linear in linears.items() if static else ():
        if sign(linear) is not None and "input_scale" not in linear:
            yield Finding("error", "packing", "input_scale", module, f"{module}.input_scale is missing, but "
                          "quantization_config says that activations have static scales.",
                          "Loaders that round activations have none for it.")  # fmt: skip
