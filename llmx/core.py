"""What a request is, and what one step may do with it. Pure Python: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from llmx.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names, ranges and meanings are those of OpenAI's API and vLLM's extensions to it.

    `max_tokens=None` is as many as fit the context. `top_k=0` (or -1) is off. `seed=None` draws a new seed. `logprobs`
    and `prompt_logprobs` count the alternatives that are returned beside the chosen token (0: the chosen one alone).
    `grammar` is what the text must look like, as `llmx.grammar` writes it: `grammar=regex("[0-9]+")`.
    `visible_special_ids` are special tokens that the text shows although it skips the others.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    seed: int | None = None
    grammar: str | None = None
    visible_special_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check("n", self.n, 1, 128)
        self._check("temperature", self.temperature, 0.0, 100.0)
        self._check("top_k", self.top_k, -1, 2**31 - 1)
        self._check("top_p", self.top_p, 0.0, 1.0, above=True)
        self._check("min_p", self.min_p, 0.0, 1.0)
        self._check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        self._check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens, 1, 2**31 - 1)
            self._check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            self._check("logprobs", self.logprobs, 0, 20)
        if self.prompt_logprobs is not None:
            self._check("prompt_logprobs", self.prompt_logprobs, 0, 20)
        for _, bias in self.logit_bias:
            self._check("logit_bias", bias, -100.0, 100.0)
        if any(not text for text in self.stop):
            raise RequestError("A stop string may not be empty.", param="stop")

    def _check(self, name: str, value: float, low: float, high: float, above: bool = False) -> None:
        if not math.isfinite(value) or value < low or value > high or (above and value == low):
            bounds = f"above {low} and at most {high}" if above else f"between {low} and {high}"
            raise RequestError(f"{name} must be {bounds}, not {value}.", param=name)

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Request:
    """One prompt for the engine core: token ids, parameters whose `max_tokens` and `seed` are settled, end-of-text ids.

    `salt` is hashed in front of the prompt: requests with different salts share no cached block. `score_from`: the
    engine hands out the logits of the prompt's positions from this one on; it needs them computed: no prefix cache.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos: frozenset[int] = frozenset()
    salt: bytes = b""
    priority: int = 0
    score_from: int | None = None

    @cached_property
    def stops(self) -> frozenset[int]:
        """Token ids that end the text: the user's and, unless `ignore_eos`, the model's."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.eos

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "settled when the request was admitted"
        return self.params.max_tokens

    @property
    def seed(self) -> int:
        assert self.params.seed is not None, "settled when the request was admitted"
        return self.params.seed


@dataclass(frozen=True)
class Logprob:
    """The log-probability (natural, of the raw logits) of one token, with the likeliest alternatives, best first."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Emitted:
    """What one row gave: accepted drafts, then the target's own next token; empty where nothing was drawn."""

    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)  # by position
    drafted: int = 0  # draft nodes that were verified with it


class Constraint(Protocol):
    """What a text must look like, and how far it has come."""

    broken: str | None  # why the text can't go on

    def push(self, token: int) -> str | None:
        """The text's next token. "stop" if it is complete and nothing may follow, "abort" if it is `broken`."""
        ...

    def after(self, paths: SequenceOf[SequenceOf[int]]) -> list[Any]:
        """For each path of drafts a (vocab,) mask of the tokens that may follow it, or None where any may."""
        ...


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt.

    `computed` is the only counter: below it every layer's KV, the drafter's included, is final.
    """

    request: Request
    sibling: int
    arrival: int
    tokens: list[int]
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)  # per KV group: logical block -> block; 0: a window passed it
    digests: list[bytes] = field(default_factory=list)  # chained hash of each whole block of `tokens`, as far as needed
    published: int = 0  # leading blocks that were offered to the prefix cache
    unborn: list[Sequence] = field(default_factory=list)  # siblings that fork off before the prompt's last token
    flying: Row | None = None  # its newest row that was launched and not committed
    finish: str | None = None  # "stop", "length" or "abort"
    stopped_by: int | None = None  # the token id behind finish "stop"
    constraint: Constraint | None = None  # of a request with a grammar
    drawing: Any = None  # what the sampler keeps of it between steps
    cached: int = 0  # prompt tokens that the first admission found in the prefix cache
    started: float = 0.0  # time.monotonic() of the first admission
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def age(self) -> tuple[int, int, int]:
        return (self.request.priority, self.arrival, self.sibling)


@dataclass(frozen=True, eq=False)
class Row:
    """Tokens [start, start + count) of a sequence, then up to `room` draft nodes; the slots for all are reserved.

    A snapshot. `depth` bounds how deep a draft tree is worth going. `after` is the flying row that decides where this
    one starts and with which token; `start` is then the least that it can turn out to be.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool  # reaches the end of the known text, so a token is drawn: all that prefill and decode differ in
    room: int = 0
    depth: int = 0
    after: Row | None = None


@dataclass(frozen=True)
class Landed:
    """What one row added to a sequence when its step landed; the sequence's `finish` is set if that ended it."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[Logprob] | None
    prompt_logprobs: dict[int, Logprob]


@dataclass(frozen=True)
class Completion:
    """One of a request's `n` finished texts. `stop_reason`: the stop string or token id behind "stop"."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: int | str | None = None
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True)
class Output:
    """A finished request. `prompt_logprobs[0]` is None: nothing comes before the first token."""

    id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """What a stream adds to one of a request's `n` texts. `text` never ends inside a character or a stop string.

    `token_ids` are those completed since the last delta; `finish_reason` is set on the choice's last delta only.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[Logprob, ...] | None = None
