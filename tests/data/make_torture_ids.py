"""Writes torture_ids.json: what llama.cpp's server makes of each of tests/torture.py's texts, with tiny vocabularies.

Eight hexadecimal digits for each text: see `digest`. A list for each kind of pre-tokenizer, and for SentencePiece.

Run by hand with llama.cpp's tool: python tests/data/make_torture_ids.py .../llama-server
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DIGITS = 8


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:DIGITS]


def cases() -> dict[str, dict[str, Any]]:
    """Name -> the tokenizer's metadata. Pre-tokenizers that are the same under several names are here once."""
    import vocabularies
    from torture import TEXTS

    from llmx.tokenizer.splits import SPLITS

    kinds: dict[Any, str] = {}
    for name, split in SPLITS.items():
        kinds.setdefault(split, name)
    made = {name: vocabularies.byte_level(name, TEXTS) for name in kinds.values()}
    return made | {f"spm {prefix}": vocabularies.spm(prefix) for prefix in (True, False)}


def main() -> None:
    sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent), str(HERE.parents[1])]
    from _llama_cpp import llama_server
    from gguf_tokens import theirs, write_model
    from torture import TEXTS

    from llmx.formats.gguf_write import encode

    found = {}
    for name, metadata in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            pairs = {key: encode(value) for key, value in metadata.items()}
            write_model(path, pairs, len(metadata["tokenizer.ggml.tokens"]))
            with llama_server(sys.argv[1], str(path), 1) as url:
                found[name] = " ".join(digest(theirs(url, text, False, True)) for text in TEXTS)
        print(name)
    (HERE / "torture_ids.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
