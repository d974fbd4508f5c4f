"""Models of the Hugging Face Hub by name, `org/name[@revision][:TYPE]`, and which files a name means. No network here.

`:TYPE` (`:Q4_K_M`) or `:file.gguf` asks for GGUF; without it, the safetensors of the repository are meant.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from llmx.errors import UsageError
from llmx.formats.fields import load_json, shown

MAIN = "main"
INDEX = "model.safetensors.index.json"
LISTED = 30  # candidates that an error message names
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
BESIDE = (  # what is fetched beside the weights; code, pickles and other frameworks' files never are
    *TOKENIZERS,
    INDEX,
    "config.json",
    "generation_config.json",
    "*quant*config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<what>[^:]+))?", re.ASCII
)
_TYPE = re.compile(
    r"(?:^|(?<=[-._]))(?:UD-)?(?:I?Q[1-9]|TQ[1-9]|MXFP\d|NVFP\d|BF16|FP?16|FP?32)(?:_[0-9A-Z]+)*(?=$|[-.])", re.I
)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.I | re.S)
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class HubName:
    """What a user wrote. `what`: a GGUF type or file; None: the repository's safetensors."""

    repo: str
    revision: str = MAIN
    what: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{f':{self.what}' if self.what else ''}"

    def with_type(self, what: str) -> HubName:
        return HubName(self.repo, self.revision, what)


def parse(text: str) -> HubName | None:
    """The name, if `text` has the form of one and the hub could have it; it says nothing of whether it does."""
    match = _NAME.fullmatch(text) if len(text) <= 500 else None
    if match is None:
        return None
    repo, revision = match["repo"], match["revision"] or MAIN
    parts = repo.split("/")
    if "--" in repo or ".." in repo or any(part.endswith(("-", ".")) or len(part) > 96 for part in parts):
        return None
    if PurePosixPath(repo).suffix in (".gguf", ".safetensors", ".json", ".git"):  # a local file, misspelt
        return None
    if ".." in revision or "//" in revision or revision.endswith("/"):
        return None
    return HubName(repo, revision, match["what"])


def beside(files: Iterable[str]) -> list[str]:
    """Those of a repository's files that go with its safetensors: config, tokenizer, templates, the index."""
    return sorted(file for file in files if _is_any(file, BESIDE))


def check_model(name: HubName, files: Collection[str]) -> None:
    """UsageError if `files`, all of the repository's, are no model with safetensors weights and a tokenizer."""
    ggufs = _models(files)
    if not _top(files) and ggufs:
        types = sorted({_type(entry) for entry in ggufs})
        raise UsageError(
            f"{name} holds GGUF files of {len(types)} {'types' if len(types) > 1 else 'type'}, {_listed(types)}, "
            "and its name doesn't say which is meant.",
            hint=f"Name one, for instance {name.with_type(_usual(types))}",
        )
    if not _top(files):
        pickled = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt")))
        why = f"its weights are pickles ({pickled[0]}), which could run code" if pickled else "no weights are in it"
        raise UsageError(
            f"{name} has neither safetensors nor GGUF files: {why}.", hint="Look for a converted copy of the model."
        )
    if "config.json" not in files:
        raise UsageError(f"{name} has no config.json beside its weights, so it is no model that llmx reads.")
    if not has_tokenizer(files):
        raise UsageError(
            f"{name} has no tokenizer beside its weights.", hint="Adapters and parts of models are not read."
        )


def has_tokenizer(files: Iterable[str]) -> bool:
    return any(_is_any(file, TOKENIZERS) for file in files)


def weights(name: HubName, files: Collection[str], folder: Path) -> list[str]:
    """The safetensors files of the model: the single one, or the shards that the index in `folder` names.

    The same choice as `open_safetensors` makes; copies in other formats and precisions beside them are left out.
    """
    if "model.safetensors" in files:
        return ["model.safetensors"]
    if INDEX in files:
        placed = load_json(folder / INDEX).section("weight_map")
        return sorted({placed.text(key) for key in placed.data})
    found = [file for file in _top(files) if not _SHARD.fullmatch(file)]
    if len(found) != 1:
        raise UsageError(f"{name} has {len(_top(files))} safetensors files and no {INDEX} that says what is in each.")
    return found


def ggufs(name: HubName, files: Collection[str]) -> list[str]:
    """The GGUF file that `name.what` means, as a list of its parts in order; the first is the one to open."""
    what = name.what or ""
    all_of = _groups(files)
    if what.lower().endswith(".gguf"):
        found = [e for e, parts in all_of.items() if what in parts]
        found = found or [e for e, parts in all_of.items() if what in map(_base, parts)]
        models = sorted(all_of)
    else:
        found = [e for e in _models(files) if _type(e).upper() == what.upper()]
        models = sorted({_type(e) for e in _models(files)})
    if not all_of:
        also = f"Its safetensors are {HubName(name.repo, name.revision)}" if _top(files) else None
        raise UsageError(f"{name.repo} holds no GGUF files.", hint=also)
    if not found:
        kind = "file" if what.lower().endswith(".gguf") else "file of type"
        raise UsageError(
            f"{name.repo} has no GGUF {kind} {shown(what)}; it has {_listed(models)}.",
            hint=f"Name one, for instance {name.with_type(_usual(models))}" if models else None,
        )
    if len(found) > 1:
        raise UsageError(
            f"{name} could be any of {len(found)} files: {_listed(sorted(found))}.",
            hint=f"Name the file, for instance {name.with_type(sorted(found)[0])}",
        )
    return _whole(name, all_of[found[0]])


def _whole(name: HubName, parts: Sequence[str]) -> list[str]:
    match = _PART.fullmatch(parts[0])
    if match is None:
        return list(parts)
    wanted = [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, min(int(match[3]), len(parts) + 1) + 1)]
    if missing := [part for part in wanted or ["its first part"] if part not in parts]:
        raise UsageError(f"{name.repo} lacks {missing[0]}, a part of a split GGUF file.")
    return wanted


def _groups(files: Iterable[str]) -> dict[str, list[str]]:
    """All GGUF files: first part → all parts there are. A file that is not split is its own only part."""
    groups: dict[tuple[str, str], list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf"):
            match = _PART.fullmatch(file)
            groups.setdefault((match[1], match[3]) if match else (file, ""), []).append(file)
    return {parts[0]: parts for parts in groups.values()}


def _models(files: Iterable[str]) -> list[str]:
    """First parts of GGUF files that are models by their name: no image projectors, no importance matrices."""
    return [entry for entry in _groups(files) if not re.search("mmproj|imatrix", _base(entry), re.I)]


def _type(file: str) -> str:
    """The type that a file's name (or else its folder's) tells, in capitals: "Q4_K_M"; without one, the name itself."""
    match = _PART.fullmatch(file)
    path = PurePosixPath(match[1] if match else file[: -len(".gguf")])
    for text in (path.name, path.parent.name):
        if found := _TYPE.findall(text):
            return str(found[-1]).upper()
    return file


def _usual(types: Sequence[str]) -> str:
    return next((t for t in ("Q4_K_M", "Q4_0", "Q8_0") if t in types), types[0])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    if more > 0:
        return f"{', '.join(names[:LISTED])} and {more} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names) or "none"


def _top(files: Iterable[str]) -> list[str]:
    return sorted(file for file in files if "/" not in file and file.endswith(".safetensors"))


def _is_any(file: str, patterns: Iterable[str]) -> bool:
    return any(file.count("/") == pattern.count("/") and fnmatchcase(file, pattern) for pattern in patterns)


def _base(file: str) -> str:
    return file.rsplit("/", 1)[-1]
