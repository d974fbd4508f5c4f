"""A tokenizer's files as transformers has them, and texts that show whether two tokenizers agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmx.report import write_whole
from llmx.tokenizer import Tokenizer
from llmx.tokenizer.library import to_library

# Texts on which tokenizers part that aren't the same.
LIKE_ANY = (
    "Hello world, it's 12345 o'clock and they'LL be here.", "  two spaces, then one ",
    " a\n\n\n  b\t\tc \r\n   \n d   ",
    "     ", "\n", "", "🧑‍🚀👩‍👩‍👧‍👦🏳️‍🌈 🫠🥹hi😀", "客单价是多少？龜の話。 한글",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "e\u0301\u0323 o\u0308 שלום مرحبا", "٣٤٥ ½ ⅷ 1,000,000.5", "a\x00b\x01 \ufffd \U0010ffff𝒳",
    "def f(x):\n    return x**2  # ≥ 0\n\n", "a▁b ▁▁c <0x41> <0xE2><0x82>", "aaaaaaaaaaaaaa  bbbbb         c",
    "<s> </s> <|im_start|>user\nHi<|im_end|>\n <start_of_turn>model\n<unk>", "HTTPServer camelCase snake_case x1y2",
)  # fmt: skip


def tokenizer_texts(tokenizer: Tokenizer, longest: int) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and the chat templates, by their names. longest: of a text, in tokens.

    The class is the plain one: transformers' classes by model build some parts anew, not as tokenizer.json has them.
    """
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.specials}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": longest}
    texts = {"tokenizer.json": to_library(tokenizer).to_str(pretty=True) + "\n"}
    if (template := tokenizer.template) is not None:
        texts["chat_template.jinja"] = template.source
        texts |= {f"additional_chat_templates/{name}.jinja": other.source for name, other in template.named.items()}
    texts["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return texts


def write_texts(texts: Mapping[str, str], folder: Path) -> None:
    """Each whole or not at all, by names that may have a folder before them."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, text)
