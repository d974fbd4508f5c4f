"""The tokenizer.* metadata of a GGUF file from a Hugging Face directory.

What is written is loaded again and compared on texts that tell tokenizers apart: it reads them alike, or is refused.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.convert.gguf_hashes import TEXT
from llmx.convert.gguf_pre import candidates
from llmx.convert.gguf_spm import read_model, scores_of_merges
from llmx.convert.texts import LIKE_ANY
from llmx.errors import UsageError
from llmx.formats.gguf_write import Value
from llmx.tokenizer import load_tokenizer
from llmx.tokenizer.gguf import ENDS, from_gguf
from llmx.tokenizer.splits import SPLITS

if TYPE_CHECKING:
    from llmx.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KEY = "tokenizer.ggml."
SPACE = "\u2581"
NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}
SWALLOWING = ("lstrip", "rstrip", "single_word")
# Tokens that are called no special ones and are (as llama.cpp's converter has it).
LOOK_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
PHI3, PHI3_TOKENS = re.compile("(phi)-?3", re.IGNORECASE), {"<unk>", "<s>", "<|endoftext|>"}
PROBES = (
    TEXT,
    "Hello, World! It's 2,024 o'clock; don't DON'T we'LL I'd  two  spaces\n\n\n   and\ttabs \t \n end.  ",
    "def f(x: int) -> str:\n    return f'{x:>08.3f}' # 100%\r\n\r\n\tif a != b and c <= 12345678: pass\n",
    "Größe, naïve façade, ЁЖИК ёжик, 日本語のテキスト、한국어 텍스트, العربية ١٢٣, हिन्दी ४५६, ไทย 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ½ ² ⅷ",
    "👩‍👩‍👧‍👦🏳️‍🌈 a\u0301e\u0308 \u200b\u00a0\u3000x … — “quotes” ‘single’ <tag attr=\"1\"/> [PAD] </s> 'S 'T 'Re",
    "HTTPServerError camelCaseWord UPPERlower lowerUPPER ABC123def 1a2b3c __init__ a_b-c.d/e\\f ~~~ ### $$$ ^^^ ```",
    " leading space", "trailing space ", "", " ", "\n", "a", "1", "  ", "\t\t", "x" * 70, "ab " * 30, "0" * 33,
)  # fmt: skip


@dataclass
class Vocabulary:
    """pairs: metadata in order. notes: what a user should know, one sentence each. name: the model's, that fits it."""

    pairs: dict[str, Value]
    found_by: str
    notes: list[str] = field(default_factory=list)
    name: str = ""


def vocabulary(folder: Path, rows: int, pretokenizer: str | None = None, name: str = "") -> Vocabulary:
    """For a model called `name` whose embedding has `rows` rows. UsageError for a tokenizer that GGUF can't express."""
    source = load_tokenizer(folder)
    backend = source.backend.inner  # type: ignore[attr-defined]
    spec = json.loads(backend.to_str())
    kind = spec["model"].get("type") or ("BPE" if "merges" in spec["model"] else "?")
    spm = kind == "BPE" and bool(spec["model"].get("byte_fallback"))
    if kind != "BPE":
        raise UsageError(
            f"{folder}: a {kind} tokenizer is not built for GGUF; built is BPE, byte-level or SentencePiece's."
        )
    vocab = Vocabulary({}, "")
    tokens, kinds = _tokens(spec, rows, spm, folder, vocab.notes)
    shared = _shared(spec, source, tokens, kinds, vocab.notes)
    vocab.name = _fitting_name(name, tokens, vocab.notes)
    if spm:
        if pretokenizer is not None:
            raise UsageError("--pretokenizer is for byte-level tokenizers; this one is SentencePiece's.")
        pairs = _spm(folder, spec, tokens, kinds)
        vocab.pairs, vocab.found_by = pairs | shared, "SentencePiece"
        _check(vocab, spec, source, folder)
        return vocab
    if pretokenizer is not None:
        if pretokenizer not in SPLITS:
            vocab.notes.append(f"llmx does not read files with the pre-tokenizer {pretokenizer}; nothing was checked.")
        names, found_by = [pretokenizer], "given"
    else:
        names, found_by = candidates(backend, source.add_bos)
    pairs = {KEY + "model": "gpt2", KEY + "pre": names[0], KEY + "tokens": tokens, KEY + "token_type": kinds}
    pairs[KEY + "merges"] = [_merge(pair) for pair in spec["model"]["merges"]]
    vocab.pairs, vocab.found_by = pairs | shared, found_by
    if names[0] in SPLITS:
        _check(vocab, spec, source, folder, soft=pretokenizer is not None)
    return vocab


def _fitting_name(name: str, tokens: Sequence[str], notes: list[str]) -> str:
    """llama.cpp looks for PHI3_TOKENS in whatever is called Phi-3, and loads no file that lacks one."""
    missing = sorted(PHI3_TOKENS - set(tokens))
    if not missing or not PHI3.search(name):
        return name
    fitting = PHI3.sub(r"\1 3", name)
    notes.append(f"The model is called {fitting}: llama.cpp loads no {name[:40]} whose tokenizer has no {missing[0]}.")
    return fitting


def _merge(pair: Any) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _tokens(
    spec: Mapping[str, Any], rows: int, spm: bool, folder: Path, notes: list[str]
) -> tuple[list[str], list[int]]:
    """Every row's token and its type. Rows without one become `[PADi]`; tokens without a row are left out, and said."""
    # What was a GGUF file before has names for rows without a token, which are no tokens.
    placed: dict[int, tuple[str, int]] = {
        i: (token, UNUSED if token[:4] == "[PAD" and token.rstrip("_") == f"[PAD{i}]" else NORMAL)
        for token, i in spec["model"]["vocab"].items()
    }
    unknown = spec["model"].get("unk_token")
    if spm:
        for i, (token, _) in list(placed.items()):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                placed[i] = (token, BYTE)
    for added in spec["added_tokens"]:
        content: str = added["content"]
        special = added["special"] or _looks_special(content)
        own = CONTROL if special else USER_DEFINED
        if spm and content == unknown:
            own = UNKNOWN
        if own == USER_DEFINED and not added["normalized"]:
            content = content.replace(SPACE, " ")  # these are found in texts before spaces are changed
        placed[added["id"]] = (content, own)
    beyond = sorted(i for i in placed if i >= rows)
    if beyond and any(placed[i][1] in (NORMAL, BYTE, UNKNOWN) for i in beyond):
        raise UsageError(f"{folder}: the tokenizer has {max(placed) + 1} tokens, the embedding {rows} rows.")
    if beyond:
        notes.append(f"{len(beyond)} tokens from {beyond[0]} on have no row in the embedding, and are left out.")
    seen: dict[str, int] = {}
    tokens, kinds = [], []
    for i in range(rows):
        token, own = placed.get(i, (f"[PAD{i}]", UNUSED))
        if own == UNUSED:
            while token in seen:
                token += "_"
        elif token in seen and own == USER_DEFINED and token.replace(" ", SPACE) not in seen:
            token = token.replace(" ", SPACE)
        if token in seen:
            raise UsageError(
                f"{folder}: tokens {seen[token]} and {i} are both {token[:40]!r}; a GGUF file with that does not load."
            )
        seen[token] = i
        tokens.append(token)
        kinds.append(own)
    if padding := kinds.count(UNUSED):
        notes.append(f"{padding} rows of the embedding have no token; they are named [PAD...].")
    return tokens, kinds


def _looks_special(token: str) -> bool:
    framed = (token.startswith("<|") and token.endswith("|>")) or (token.startswith("<｜") and token.endswith("｜>"))
    return framed or token in LOOK_SPECIAL or (token.startswith("<unused") and token.endswith(">"))


def _spm(folder: Path, spec: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Value]:
    """SentencePiece's BPE: scores from tokenizer.model where there is one, else from the order of the merges."""
    file = folder / "tokenizer.model"
    stored = read_model(file) if file.is_file() else None
    if stored is None:
        normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
        scores = scores_of_merges(spec["model"]["merges"], tokens, normal)
    else:
        scores = stored.scores(tokens)
    for i, kind in enumerate(kinds):
        if stored is None and kind in (UNKNOWN, BYTE):
            scores[i] = 0.0
        elif kind in (CONTROL, USER_DEFINED, UNUSED):
            scores[i] = -10000.0 if kind == UNUSED else -1000.0
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "tokens": list(tokens),
        KEY + "scores": scores,
        KEY + "token_type": list(kinds),
        KEY + "add_space_prefix": _prefix(spec),
    }


def _prefix(spec: Mapping[str, Any]) -> bool:
    """Whether a text gets a space in front."""
    for step in _steps(spec.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            return True
    return any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(spec.get("pre_tokenizer"), "pretokenizers")
    )


def _steps(step: Any, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inner]) if step.get("type") == "Sequence" else [step]


def _shared(
    spec: Mapping[str, Any], source: Tokenizer, tokens: Sequence[str], kinds: Sequence[int], notes: list[str]
) -> dict[str, Value]:
    """Special tokens, what is put around a text, and templates."""
    pairs: dict[str, Value] = {}
    count = len(tokens)
    ids = {added["content"]: added["id"] for added in spec["added_tokens"]} | dict(spec["model"]["vocab"])
    specials = source.specials
    for key, name in NAMED.items():
        if (token := specials.get(key)) is not None and ids.get(token, count) < count:
            pairs[f"{KEY}{name}_token_id"] = ids[token]
    if source.bos_id is not None and source.bos_id < count:
        pairs[KEY + "bos_token_id"] = source.bos_id
    ends = [i for i in sorted(source.eos_ids) if i < count]
    if ends and KEY + "eos_token_id" not in pairs:
        pairs[KEY + "eos_token_id"] = ends[0]
    # Readers of GGUF files take these for ends by their texts; the rest has two keys.
    known = {i for i, token in enumerate(tokens) if token in ENDS and kinds[i] in (CONTROL, UNKNOWN)}
    others = sorted({*ends, *known} - {pairs.get(KEY + "eos_token_id")}, key=lambda i: (i in known, i))
    for name, i in zip(("eot", "eom"), others, strict=False):
        pairs[f"{KEY}{name}_token_id"] = i
    if lost := [i for i in others[2:] if i not in known]:
        notes.append(f"{len(lost)} more tokens end a text, which the file has no key for: {tokens[lost[0]][:40]!r}...")
    pairs[KEY + "add_bos_token"] = source.add_bos
    around = source.encode("a")
    eos = pairs.get(KEY + "eos_token_id")
    pairs[KEY + "add_eos_token"] = eos is not None and around[-1:] == [eos]
    if source.template is not None:
        template = source.template
        pairs["tokenizer.chat_template"] = template.source
        others_named = {name: t.source for name, t in template.named.items() if name != "default"}
        for name, text in others_named.items():
            pairs[f"tokenizer.chat_template.{name}"] = text
        if others_named:
            pairs["tokenizer.chat_templates"] = list(others_named)
    return pairs


def _check(vocab: Vocabulary, spec: Mapping[str, Any], source: Tokenizer, folder: Path, soft: bool = False) -> None:
    """What was made reads texts as the source does. UsageError, or with `soft` a note, where it does not.

    Notes too, for GGUF has no place for it: SentencePiece's readers put a space in front of every stretch of text,
    where transformers does not double one that is there, and around special tokens; added tokens that swallow spaces
    beside them; letters and accents that are composed first (NFC), as Qwen's are.
    """
    made = from_gguf({**vocab.pairs, "general.name": vocab.name}, str(folder))
    spm = vocab.pairs[KEY + "model"] == "llama"
    added = set(source.backend.added.values())
    if not spm:
        added = {token["content"] for token in spec["added_tokens"] if any(token[key] for key in SWALLOWING)}
    composes = {step.get("type") for step in _steps(spec.get("normalizer"), "normalizers")} == {"NFC"}
    if composes:
        vocab.notes.append("Accents are composed with their letters (NFC) by this tokenizer, and not by GGUF's.")
    noted = False
    for text in (*PROBES, *LIKE_ANY):
        text = unicodedata.normalize("NFC", text) if composes else text
        want, got = source.encode(text), made.encode(text)
        if want == got:
            continue
        at = next((n for n, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
        said = (
            f"{folder}: as a GGUF tokenizer ({vocab.pairs[KEY + 'model']}, {vocab.pairs[KEY + 'pre']}) it would read "
            f"{text[:30]!r} differently from token {at} on."
        )
        expected = (spm and text[:1] in (" ", SPACE)) or any(token in text for token in added)
        if not soft and not expected:
            raise UsageError(said, hint=None if spm else "--pretokenizer NAME writes it all the same")
        if not noted:
            vocab.notes.append(said)
        noted = True
