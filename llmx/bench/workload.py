"""Seeded random requests: ids drawn from the vocabulary without its special ones, lengths from ranges or log-normal."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from llmx.core import SamplingParams
from llmx.errors import UsageError


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included: all equally often, or log-normally about a `median`.

    sigma: the standard deviation of the natural logarithm, before lengths are cut at `low` and `high`.
    """

    low: int
    high: int
    median: int | None = None
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median}:{self.sigma:g}:{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        if self.median is None:
            return rng.randint(self.low, self.high)
        return min(max(round(rng.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Job:
    """One request of a workload: its prompt, token ids where they are known, and most tokens to give.

    `exact`: it is made to give just as many (`ignore_eos`). Requests with different salts share no cached prefix.
    prompt_len: tokens of a text, where they were counted here.
    """

    prompt: tuple[int, ...] | str | Messages
    output_len: int
    exact: bool = True
    salt: str = ""
    prompt_len: int | None = None

    @property
    def input_len(self) -> int:
        """In tokens; 0 where only the server knows."""
        return len(self.prompt) if isinstance(self.prompt, tuple) and _is_ids(self.prompt) else 0


def _is_ids(prompt: Sequence[object]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def parse_span(text: str, flag: str) -> Span:
    """`"128"`, `"32:512"` or `"lognormal:MEDIAN:SIGMA:MOST"`; a UsageError that names `flag` for anything else."""
    if text.strip().startswith("lognormal"):
        return _parse_lognormal(text.strip(), flag)
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"{flag} must be a length, a range like 32:512 or lognormal:MEDIAN:SIGMA:MOST, not {text!r}.")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if low < 1 or high < low:
        raise UsageError(f"{flag} must begin at 1 or more and not end before it begins, not {text!r}.")
    return Span(low, high)


def _parse_lognormal(text: str, flag: str) -> Span:
    match = re.fullmatch(r"lognormal:(\d{1,9}):(\d{1,3}(?:\.\d{1,6})?):(\d{1,9})", text, re.ASCII)
    if match is None:
        raise UsageError(
            f"{flag} must be lognormal:MEDIAN:SIGMA:MOST, not {text!r}.",
            "For example lognormal:24:1.3:512: half below 24, two thirds within e^±1.3 times that, none beyond 512.",
        )
    median, sigma, most = int(match[1]), float(match[2]), int(match[3])
    if not 1 <= median <= most:
        raise UsageError(f"{flag} must have a median from 1 to its most, not {text!r}.")
    return Span(1, most, median, sigma)


def vocabulary(size: int, special: Container[int]) -> list[int]:
    """The ids that random prompts are made of."""
    return [token for token in range(size) if token not in special] or list(range(size))


def random_prompt(ids: Sequence[int], length: int, seed: str) -> tuple[int, ...]:
    """`length` ids drawn independently. The same seed gives the same prompt on every machine."""
    return tuple(random.Random(f"prompt/{seed}").choices(ids, k=length))


def mixed_lengths(count: int, prompt: Span, output: Span, seed: int) -> list[tuple[int, int]]:
    """`count` pairs (prompt length, output length) drawn from the spans; they don't depend on the vocabulary."""
    rng = random.Random(f"lengths/{seed}")
    return [(prompt.draw(rng), output.draw(rng)) for _ in range(count)]


def mixed_jobs(ids: Sequence[int], count: int, prompt: Span, output: Span, seed: int) -> list[Job]:
    """`count` requests with distinct random prompts (a cold prefix cache stays cold) and mixed lengths."""
    lengths = mixed_lengths(count, prompt, output, seed)
    return [Job(random_prompt(ids, n_in, f"{seed}/{i}"), n_out) for i, (n_in, n_out) in enumerate(lengths)]


def forced(tokens: int, exact: bool = True) -> SamplingParams:
    """Greedy, and exactly `tokens` tokens: the end of the text is ignored. Not `exact`: at most so many."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=exact)
