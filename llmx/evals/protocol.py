"""How a text is cut into windows, and which of their positions are scored. Figures compare only within a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmx.errors import UsageError

LLAMA, HF = "llama.cpp", "hf"
DEFAULT_CTX = {LLAMA: 512, HF: 2048}


@dataclass(frozen=True)
class Protocol:
    """`llama.cpp` is llama-perplexity's, `hf` that of the GPTQ (2210.17323) and AWQ (2306.00978) papers.

    Both cut the tokens into windows of `ctx` that don't overlap and drop the rest. llama.cpp: BOS stands in place of
    each window's first token where the model adds one, and the second half is scored: position i predicts token i + 1
    for i from ctx/2 to ctx - 2. hf: windows stay as they are, and every position but the last predicts the next token.
    """

    name: str
    ctx: int

    def __post_init__(self) -> None:
        if self.name not in DEFAULT_CTX:
            raise UsageError(f"--protocol {self.name} is not known; there are {' and '.join(DEFAULT_CTX)}.")
        if self.ctx < 4:
            raise UsageError(f"--ctx must be at least 4, not {self.ctx}.")

    @property
    def first(self) -> int:
        """The first position whose prediction is scored."""
        return self.ctx // 2 if self.name == LLAMA else 0

    @property
    def scored(self) -> int:
        """Positions scored in each window."""
        return self.ctx - 1 - self.first

    def windows(self, tokens: Sequence[int], most: int | None) -> list[tuple[int, ...]]:
        """The windows of a text, at most `most`. UsageError where it doesn't fill one."""
        count = len(tokens) // self.ctx
        if count < 1:
            raise UsageError(
                f"The text has {len(tokens)} tokens; a window of {self.ctx} needs as many.",
                hint="give a longer text, or lower --ctx",
            )
        count = count if most is None else min(count, most)
        return [tuple(tokens[i * self.ctx : (i + 1) * self.ctx]) for i in range(count)]

    def prompt(self, window: Sequence[int], bos: int | None) -> tuple[int, ...]:
        """What the model reads of a window: all but the last token, behind which nothing is scored."""
        if self.name == LLAMA and bos is not None:
            return (bos, *window[1:-1])
        return tuple(window[:-1])
