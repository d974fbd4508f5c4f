"""Tokenizers and texts that the tests of tokenizers and detokenisers share, built here: tests are offline."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TORTURE = {
    "plain": "Hello world, it's 12345 o'clock and they'LL be here.",
    "leading space": "  two spaces, then one ",
    "whitespace runs": "a\n\n\n  b\t\tc \r\n   \n d   ",
    "only spaces": "     ",
    "zwj emoji": "🧑‍🚀👩‍👩‍👧‍👦🏳️‍🌈",
    "new emoji": "🫠🥹hi😀",
    "cjk": "客单价是多少？龜の話。",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "jamo": "\u1112\u1161\u11ab\u1100\u1173\u11af 한글",
    "combining": "e\u0301\u0323 o\u0308\u0304",
    "rtl": "שלום مرحبا",
    "numbers": "٣٤٥ ½ ⅷ 1,000,000.5",
    "nul": "a\x00b\x01",
    "replacement": "a\ufffdb",
    "high": "\U0010ffff\U000e0001 𝒳",
    "code": "def f(x):\n    return x**2  # ≥ 0\n\n",
    "specials inside": "x<|end|>y <s> </s><|begin|>",
    "metaspace itself": "a▁b ▁▁c",
    "byte names": "<0x41> <0xE2><0x82>",
    "empty": "",
}
CORPUS = [text for name, text in TORTURE.items() if name not in ("new emoji", "high", "zwj emoji")] * 4


def byte_level(bos: bool = True) -> tokenizers.Tokenizer:
    """Byte-level BPE as Llama 3 has it: BOS by the post-processor, two control tokens and one user-defined."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>é", special=False, normalized=False)])
    if bos:
        begin = ("<|begin|>", backend.token_to_id("<|begin|>"))
        backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    return backend


def llama2() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: spaces as ▁, one put in front, unknown characters as <0xNN> bytes."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:9], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """The same vocabulary behind the Metaspace pre-tokenizer and decoder."""
    backend = llama2()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def save(backend: tokenizers.Tokenizer, folder: Path, **files: dict[str, Any]) -> Path:
    """A model's folder with tokenizer.json, and each `name={...}` as name.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def merges(backend: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    return [(left, right) for left, right in json.loads(backend.to_str())["model"]["merges"]]


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """A byte-level tokenizer as the metadata of a GGUF file."""
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = backend.get_added_tokens_decoder()
    kinds = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges(backend)],
        "tokenizer.ggml.bos_token_id": vocab["<|begin|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.add_bos_token": True,
    } | {f"tokenizer.{key}": value for key, value in more.items()}


def random_ids(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    """Any tokens in any order, incomplete and impossible bytes included."""
    return [rng.randrange(vocab_size) for _ in range(count)]
