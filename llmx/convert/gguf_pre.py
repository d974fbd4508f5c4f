"""What a byte-level tokenizer is called in GGUF (`tokenizer.ggml.pre`): by its definition, else by llama.cpp's hash.

The definition is the list of regular expressions that cut a text before merging; `llmx.tokenizer.splits` has those that
GGUF knows. What is found is checked by encoding (see gguf_vocab): a wrong name would change every text a little.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmx.convert.gguf_hashes import NAMES, TEXT
from llmx.errors import UsageError
from llmx.tokenizer.splits import SPLITS, Split

if TYPE_CHECKING:
    import tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def candidates(backend: tokenizers.Tokenizer, add_bos: bool) -> tuple[list[str], str]:
    """(names that may be right, the likeliest first; how they were found). UsageError if there are none."""
    defined, regexes = by_definition(json.loads(backend.to_str()))
    known = NAMES.get(fingerprint(backend))
    if defined:
        defined.sort(key=lambda name: (name != known, SPLITS[name].add_bos != add_bos))
        return defined, "definition"
    if known is not None:
        return [known], "hash"
    what = " then ".join(regexes) if regexes else "its own kind"
    raise UsageError(
        f"No pre-tokenizer that GGUF files name cuts texts as this tokenizer does: by {what[:200]}.",
        hint="--pretokenizer NAME writes one all the same; texts are then read differently",
    )


def fingerprint(backend: tokenizers.Tokenizer) -> str:
    ids = backend.encode(TEXT).ids
    return hashlib.sha256(str(ids).encode()).hexdigest()[:16]


def by_definition(tokenizer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(the names with this tokenizer.json's regular expressions and merging; the expressions)."""
    regexes = [_plain(regex) for regex in _regexes(tokenizer.get("pre_tokenizer"))]
    whole = bool(tokenizer["model"].get("ignore_merges"))
    return [name for name, split in SPLITS.items() if _same(split, regexes, whole)], regexes


def _same(split: Split, regexes: list[str], whole_words: bool) -> bool:
    return [_plain(regex) for regex in split.regexes] == regexes and split.whole_words == whole_words


def _regexes(step: Any) -> list[str]:
    """The expressions of a pre-tokenizer, in order; a text that no other rule has for what is not one of these."""
    if step is None:
        return []
    match step.get("type"):
        case "Sequence":
            return [regex for part in step["pretokenizers"] for regex in _regexes(part)]
        case "Split" if "Regex" in step["pattern"]:
            removed = step.get("behavior") == "Removed" and step.get("invert")  # keeps the matches: isolates them
            if removed or (step.get("behavior") == "Isolated" and not step.get("invert")):
                return [step["pattern"]["Regex"]]
        case "Digits":
            return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
        case "Punctuation" if step.get("behavior") == "Contiguous":
            return [r"[\p{P}\$\+<=>\^~\|]+"]
        case "ByteLevel" if not step.get("add_prefix_space"):
            return [GPT2] if step.get("use_regex", True) else []
    return [f"<{step.get('type')}>"]


def _plain(regex: str) -> str:
    """Equal expressions that are written differently, made one."""
    regex = regex.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", SHORT)
    return re.sub(r"\|\\s\+$", "", regex)
