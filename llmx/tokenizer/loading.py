"""Where a tokenizer comes from: dispatch by kind of model, and the reader of Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from llmx.errors import UsageError
from llmx.formats.fields import load_json, shown
from llmx.templates import ChatTemplate
from llmx.tokenizer.gguf import from_gguf
from llmx.tokenizer.pieces import read_spelling
from llmx.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmx.formats.hub import Located


def load_tokenizer(located: Located | Path | str, gguf_metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face directory, or a GGUF file (by its metadata, if already read).

    UsageError, naming the file and what is wrong, for one that is missing, broken or of a kind that is not built.
    """
    path = Path(located) if isinstance(located, str | Path) else located.path
    if gguf_metadata is not None:
        return from_gguf(gguf_metadata, path.name)
    if path.is_dir():
        return _from_directory(path)
    from llmx.formats.gguf import open_gguf

    return from_gguf(open_gguf(path).metadata, path.name)


def _from_directory(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        other = next((name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()), None)
        found = f"; its {other} is not read" if other else ""
        raise UsageError(
            f"{folder} has no tokenizer.json{found}.",
            hint="Save one: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR).",
        )
    described = load_json(file).data
    backend = _build(file)
    spelling = read_spelling(described.get("decoder"), str(file))
    config = _read_json(folder / "tokenizer_config.json")
    specials = _specials(_read_json(folder / "special_tokens_map.json")) | _specials(config)
    bos_id = backend.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend,
        spelling,
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, backend, specials),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        template=_template(folder, config, specials),
    )


def _build(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no Exception
        raise UsageError(f"{file} is no tokenizer that the tokenizers library can read: {_short(error)}.") from None


def _read_json(file: Path) -> Mapping[str, Any]:
    """An optional file beside the tokenizer's: empty if it is not there."""
    return load_json(file).data if file.is_file() else {}


def _short(error: BaseException) -> str:
    return str(error)[:200].rstrip(".")


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, ...), each given as a string or as an object with `content`."""
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, specials: Mapping[str, str]) -> set[int]:
    """The tokenizer's end token and those of generation_config.json (config.json if that has none)."""
    ids: set[int] = set()
    if (own := specials.get("eos_token")) is not None and (token_id := backend.token_to_id(own)) is not None:
        ids.add(token_id)
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise UsageError(f"{folder / name}: eos_token_id must be token ids, not {shown(item)}.")
        if listed:
            return ids | set(listed)
    return ids


def _template(folder: Path, config: Mapping[str, Any], specials: Mapping[str, str]) -> ChatTemplate | None:
    """Files of their own come before the entry in tokenizer_config.json, which is a text or a list of named ones."""
    entry = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(entry, str):
        named["default"] = entry
    elif isinstance(entry, list) and all(isinstance(item, dict) for item in entry):
        named = {str(item.get("name")): item.get("template", "") for item in entry}
    elif entry is not None:
        raise UsageError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of named texts.")
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            named[name] = _read_text(file)
    if not named:
        return None
    return ChatTemplate(named["default"] if "default" in named else next(iter(named.values())), specials, named=named)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read as text: {_short(error)}.") from None
