"""The tokens that a model is shown while it is quantized: somebody's text, or the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmx.config import EngineConfig
from llmx.errors import UsageError
from llmx.evals.dataset import fetch
from llmx.evals.protocol import HF, Protocol
from llmx.evals.scoring import Scorer
from llmx.evals.text import bos_of, generate, sha256_of
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.tokenizer import load_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """texts: token ids, none longer than was asked for. about: what the report says of them."""

    texts: Sequence[Sequence[int]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def read(name: str, located: Located, samples: int, length: int, say: Say) -> Calibration:
    """From a file here or of the hub: its tokens end to end, cut every `length`, each piece behind BOS if the model
    wants one. The last piece may be shorter. UsageError where there are none."""
    tokenizer = load_tokenizer(located)
    written = fetch(name, say, "--calib")
    ids = tokenizer.encode(written.content, add_special=False, parse_special=False)
    bos = bos_of(tokenizer)
    front = [] if bos is None else [bos]
    step = length - len(front)
    texts = [front + ids[low : low + step] for low in range(0, len(ids), step)][:samples]
    if not texts:
        raise UsageError(f"--calib {name} gives 0 usable tokens of {len(written.content)} characters.")
    about = {"source": written.source, "name": name, "sha256": written.sha256}
    return _calibration(texts, samples, about, say)


def write(located: Located, name: str, samples: int, length: int, seed: int, say: Say) -> Calibration:
    """Drawn from the model itself, seeded: no network, no file. Kept in the cache for the next time."""
    tokenizer = load_tokenizer(located) if _has_tokenizer(located) else None
    config = EngineConfig(model=name)
    with Scorer(config, Protocol(HF, length)) as scorer:
        text = generate(scorer, config, located, tokenizer, samples, seed, say)
    texts = [text.tokens[low : low + length] for low in range(0, len(text.tokens), length)]
    return _calibration(texts, samples, dict(text.about), say)


def _has_tokenizer(located: Located) -> bool:
    if located.kind == "gguf":
        return "tokenizer.ggml.model" in open_gguf(located.path).metadata
    return any((located.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _calibration(texts: Sequence[Sequence[int]], samples: int, about: dict[str, Any], say: Say) -> Calibration:
    made = Calibration(texts, about | {"tokens_sha256": sha256_of([token for text in texts for token in text])})
    about = made.about
    about["texts"], about["tokens"] = len(texts), made.tokens
    if len(texts) < samples:
        say(f"Note: the text fills {len(texts)} of the {samples} samples asked for.")
    return made
