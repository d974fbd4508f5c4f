"""Where a tokenizer comes from: dispatch by kind of model, and the reader of Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from llmx.errors import UsageError
from llmx.formats.fields import load_json, shown
from llmx.templates import ChatTemplate
from llmx.tokenizer.gguf import from_gguf
from llmx.tokenizer.pieces import read_spelling
from llmx.tokenizer.sentencepiece import from_sentencepiece
from llmx.tokenizer.tekken import from_tekken
from llmx.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmx.formats.hub import Located


def load_tokenizer(located: Located | Path | str, gguf_metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face directory, or a GGUF file (by its metadata, if already read).

    Of a directory, tokenizer.json alone says what is put around a text and how tokens become text, as in transformers:
    `add_bos_token`, `add_eos_token` and (for BPE) `clean_up_tokenization_spaces` beside it change nothing.

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
    config = _read_json(folder / "tokenizer_config.json")
    specials = _specials(_read_json(folder / "special_tokens_map.json")) | _specials(config)
    file = folder / "tokenizer.json"
    if file.is_file():
        backend = _build(file)
    elif (file := folder / "tekken.json").is_file():
        backend, found = from_tekken(file)
        specials = found | specials
    elif (file := folder / "tokenizer.model").is_file():
        backend, found = from_sentencepiece(folder)
        specials = found | specials
    else:
        other = "; its vocab.json is not read" if (folder / "vocab.json").is_file() else ""
        raise UsageError(
            f"{folder} has neither tokenizer.json, tekken.json nor tokenizer.model{other}.",
            hint="Save one: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR).",
        )
    if config.get("clean_up_tokenization_spaces") is True and type(backend.model).__name__ != "BPE":
        raise UsageError(
            f"{folder}: clean_up_tokenization_spaces of a {type(backend.model).__name__} tokenizer is not built.",
            hint="Set it to false in tokenizer_config.json: then spaces before punctuation stay as generated.",
        )
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return Tokenizer(
        backend,
        read_spelling(decoder, str(file)),
        bos_id=backend.token_to_id(specials["bos_token"]) if "bos_token" in specials else None,
        eos_ids=_eos_ids(folder, backend, specials),
        template=_template(folder, config, specials),
        specials=specials,
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
