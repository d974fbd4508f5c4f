"""What a model is called and whose it is: general.* metadata of a GGUF file, and the model card that says the same.

The keys, and how a name is taken apart, are those of llama.cpp's convert_hf_to_gguf.py (gguf-py's metadata.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmx.formats.fields import Fields, load_json
from llmx.formats.gguf_write import INT32, Value, encode
from llmx.layers.rope_written import short

KEY = "general."
HUB = "https://huggingface.co/"
# In a file in this order; said in a card by these names, by `model_` and one of them, or as people say it on the Hub.
SAID = (
    "name",
    "author",
    "version",
    "organization",
    "finetune",
    "basename",
    "description",
    "size_label",
)  # in this order
ALSO = {"name": "model_name", "author": "model_creator", "basename": "model_type"}
LICENSE = ("license", "license_name", "license_link")
LICENSE_KEYS = tuple(key.replace("license_", "license.") for key in LICENSE)
LISTS = {"tags": ("tags", "pipeline_tag"), "languages": ("languages", "language")}
OF = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
SAMPLING = {
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "temperature": "temp", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def about(folder: Path, named: str | None, weights: int, *, titled: bool = True) -> tuple[str, dict[str, bytes]]:
    """(The name, general.* encoded) of a Hugging Face folder. named: what its config.json says. weights: how many it
    has. titled: the name as a title, as llama.cpp has it."""
    card = read_card(folder)
    found: dict[str, Any] = {key: text for key in SAID if (text := _said(card, key)) is not None}
    # A path is no name: `organization/model` is one.
    for name in [named] if named and named.count("/") <= 1 else []:
        found = _parts(name, weights, titled) | found
    found = _parts(folder.resolve().name, weights, titled) | found
    found.setdefault("size_label", size_label(weights))
    found = {key: found[key] for key in SAID if key in found}
    found |= {own: _joined(card[key]) for own, key in zip(LICENSE_KEYS, LICENSE, strict=True) if card.get(key)}
    pairs: dict[str, bytes] = _sampling(folder)
    pairs |= {KEY + key: encode(text) for key, text in found.items()}
    for kind, keys in {"base_model": ("base_model", "base_models"), "dataset": ("datasets", "dataset")}.items():
        models = next((_listed(card[key]) for key in keys if card.get(key)), [])
        pairs |= {KEY + key: encode(text) for key, text in _others(kind, models, weights).items()}
    for key, names in LISTS.items():
        if values := [str(value) for name in names for value in _listed(card.get(name))]:
            pairs[KEY + key] = encode(values)
    return str(found["name"]), pairs


def read_card(folder: Path) -> dict[str, Any]:
    """The YAML in front of README.md; nothing if there is none that can be read."""
    import yaml

    card = folder / "README.md"
    if not card.is_file():
        return {}
    found = re.match(r"---\n(.*?\n)---\s*(\n|$)", card.read_text("utf-8", "replace").replace("\r\n", "\n"), re.DOTALL)
    if found is None:
        return {}
    text = found[1].replace("\t", "  ").replace("- no\n", '- "no"\n')  # Norwegian, which YAML takes for False
    try:
        said = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return said if isinstance(said, dict) else {}


def _said(card: Mapping[str, Any], key: str) -> str | None:
    for name in (key, f"model_{key}", ALSO.get(key, key)):
        if isinstance(card.get(name), str | int | float):
            return str(card[name])
    return None


def _joined(value: Any) -> str:
    return ",".join(map(str, _listed(value)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _others(kind: str, models: list[Any], weights: int) -> dict[str, Value]:
    """What a model was made from, or learned from: each an id of the Hub, an address, or a mapping."""
    pairs: dict[str, Value] = {}
    for i, model in enumerate(models):
        if isinstance(model, dict):
            said = {key: str(model[key]) for key in OF if key in model}
        else:
            said = _linked(str(model), weights)
        pairs |= {f"{kind}.{i}.{key}": text for key, text in said.items()}
    return {f"{kind}.count": len(models), **pairs} if models else {}


def _linked(model: str, weights: int) -> dict[str, str]:
    name, said = model, dict[str, str]()
    if re.match(r"(https?|ssh)://", model):
        said["repo_url"] = model
        hub = re.fullmatch(r"https?://huggingface\.co/([^/]+/[^/]+)", model)
        if hub is None:
            return said
        name = hub[1]
    elif "/" in model:
        said["repo_url"] = HUB + model
    parts = _parts(name, weights, True)
    return {key: parts[key] for key in ("name", "version", "organization") if key in parts} | said


def _parts(name: str, weights: int, titled: bool) -> dict[str, str]:
    """general.*'s parts of a name like `organization/Llama-3.2-1B-Instruct`."""
    if " " in name:
        return {"name": title(name) if titled else name}
    organization, _, model = name.rpartition("/")
    found = {"name": title(model) if titled else model}
    if organization and not organization.startswith("."):
        found["organization"] = title(organization)
    return found | split_name(model, weights)


def title(name: str) -> str:
    words = name.strip().replace("-", " ").split()
    return " ".join(w.title() if w.islower() and not re.match(r"(v\d+(?:\.\d+)*|\d.*)$", w) else w for w in words)


def split_name(name: str, weights: int) -> dict[str, str]:
    """basename, version, size_label and finetune, as far as a name has them; nothing if it has a base only.

    A version that stands before anything else is part of the base. A size far from `weights` is a context's length.
    """
    parts = [_kind(part, i, weights) for i, part in enumerate(p for p in name.split("-") if p)]
    if any(kind == "size_label" and re.search(r"\d", part) for part, kind in parts):
        parts = [(p, "" if kind == "size_label" and p.isalpha() else kind) for p, kind in parts]
    base = 0
    while base < len(parts) and (parts[base][1] == "version" or (not parts[base][1] and parts[base][0][0].isalpha())):
        base += 1
    if base == len(parts):  # a version at the very end is none of the base
        while base and parts[base - 1][1] == "version":
            base -= 1
    rest = [(part, kind or "finetune") for part, kind in parts[base:]]
    found = {"basename": "-".join(part for part, _ in parts[:base])}
    for wanted in ("version", "size_label", "finetune"):
        found[wanted] = "-".join(part for part, kind in rest if kind == wanted)
    found["size_label"] = "-".join(dict.fromkeys(part for part, kind in rest if kind == "size_label"))
    if not any(found[key] for key in ("version", "size_label", "finetune")):
        return {}
    return {key: text for key, text in found.items() if text}


def _kind(part: str, at: int, weights: int) -> tuple[str, str]:
    """(the part as it is written, what it is: "" if nothing tells)."""
    if re.fullmatch(r"(v|iter)?\d+([.]\d+)*", part, re.IGNORECASE):
        return part, "version"
    if re.fullmatch(r"i?q\d(_\w)*|b?fp?(16|32)", part, re.IGNORECASE):
        return part.upper(), "type"
    size = r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)"
    if at and re.fullmatch(size, part, re.IGNORECASE):
        return _size(part.replace("_", "."), weights)
    return part, "finetune" if at and re.fullmatch(r"chat|instruct|vision|lora", part, re.IGNORECASE) else ""


def _size(part: str, weights: int) -> tuple[str, str]:
    if part[-1].isdecimal():  # 7b1 is 7.1b
        part = f"{part[:-2]}.{part[-1]}{part[-2]}"
    if part[-2].isdecimal():
        part = part[:-1] + part[-1].upper()
    if weights and re.fullmatch(r"[\d.]+[KMBT]", part):
        said = float(part[:-1]) * SUFFIXES[part[-1]]
        if abs(said - weights) > 7 * weights // 8:
            return part[:-1] + part[-1].lower(), "finetune"
    return part, "size_label"


def size_label(weights: int) -> str:
    """135M, 1.2B: two digits at least."""
    suffix = next((s for s in "TBM" if weights > SUFFIXES[s]), "K")
    scaled = weights * (1 / SUFFIXES[suffix])
    return f"{scaled:.{max(2 - len(str(round(scaled)).lstrip('0')), 0)}f}{suffix}"


def _sampling(folder: Path) -> dict[str, bytes]:
    file = folder / "generation_config.json"
    said = load_json(file) if file.is_file() else Fields({}, "")
    found = {name: said.number(key, None) for key, name in SAMPLING.items()}
    return {
        f"{KEY}sampling.{name}": encode(int(value), INT32) if name == "top_k" else encode(float(value))
        for name, value in found.items()
        if value is not None
    }


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json's part of it, from a GGUF file's metadata."""
    found = {key: metadata.get(f"{KEY}sampling.{name}") for key, name in SAMPLING.items()}
    numbers = {key: n for key, n in found.items() if isinstance(n, int | float) and math.isfinite(n)}
    said = {key: int(n) if key == "top_k" else short(n) for key, n in numbers.items()}
    return {"do_sample": True, **said} if said else {}


def card_of(metadata: Mapping[str, Any]) -> str | None:
    """README.md with what a GGUF file's general.* say, as `about` reads it; None if they say nothing. What is of
    another kind than it should be is left out: nothing depends on it."""
    import yaml

    said: dict[str, Any] = _texts(metadata, "", SAID)
    said |= {key.replace(".", "_"): text for key, text in _texts(metadata, "", LICENSE_KEYS).items()}
    for kind, key in {"base_model": "base_model", "dataset": "datasets"}.items():
        count = metadata.get(f"{KEY}{kind}.count", 0)
        numbers = range(min(count, 64) if isinstance(count, int) else 0)
        said[key] = [other for i in numbers if (other := _other(metadata, f"{kind}.{i}."))]
    for key in LISTS:
        listed = metadata.get(KEY + key)
        said[key] = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    said = {key: value for key, value in said.items() if value}
    if not said:
        return None
    front = yaml.safe_dump(said, allow_unicode=True, sort_keys=False, default_flow_style=False)
    return f"---\n{front}---\n\n# {said.get('name', 'A model')}\n\nMade from a GGUF file by llmx convert-hf.\n"


def _texts(metadata: Mapping[str, Any], prefix: str, keys: Iterable[str]) -> dict[str, str]:
    return {key: text for key in keys if isinstance(text := metadata.get(KEY + prefix + key), str)}


def _other(metadata: Mapping[str, Any], prefix: str) -> str | dict[str, str]:
    """An id of the Hub if that says all."""
    said = _texts(metadata, prefix, OF)
    model = said.get("repo_url", said.get("name", "")).removeprefix(HUB)
    return model if _linked(model, 0) == said else said
