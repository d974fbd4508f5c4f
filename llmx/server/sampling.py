"""The fields that both generating endpoints share, and how they become `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from llmx.core import SamplingParams
from llmx.errors import RequestError
from llmx.server.structured import StructuredFields

MOST_STOPS = 16
LONGEST_STOP = 256  # characters
SAME_NAMES = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens", "seed"),
)
# These would change the answer and aren't built: better refused than quietly left out.
UNBUILT = (
    *("tools", "functions", "bad_words", "allowed_token_ids", "use_beam_search", "structural_tag", "guided_whitespace"),
    *("suffix", "best_of", "prompt_embeds", "chat_template", "documents", "audio"),
)
OFF: tuple[Any, ...] = (None, False, "", [], {}, {"type": "text"})

Stop = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage. continuous_usage_stats (vLLM): the usage so far in every chunk."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(StructuredFields):
    """OpenAI's names and vLLM's extensions. null is the default everywhere; unknown fields are kept aside."""

    model_config = ConfigDict(strict=True, extra="allow")
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wanted_tokens(self) -> int | None:
        """None: the request does not say."""
        return self.max_tokens

    @property
    def salt(self) -> bytes:
        return (self.cache_salt or "").encode()

    @property
    def unknown(self) -> list[str]:
        return sorted(self.model_extra or {})

    def sampling(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """Checked `SamplingParams`. `defaults` stand for what the request leaves out; `more` are fields that only one
        endpoint has. Raises RequestError. Slow where `structured`: see `text_grammar`.
        """
        self._check()
        given = {name: getattr(self, name) for name in SAME_NAMES if getattr(self, name) is not None}
        given |= {
            "max_tokens": defaults.get("max_tokens", self.default_max_tokens)
            if self.wanted_tokens is None
            else self.wanted_tokens,
            "stop": stop_strings(self.stop),
            "logit_bias": biases(self.logit_bias),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "grammar": self.text_grammar(),
        }
        return SamplingParams(**{**defaults, **given, **more})

    def fitted(self, params: SamplingParams, prompts: Sequence[Sequence[int]], context: int) -> SamplingParams:
        """`params` with no more tokens than fit beside the longest prompt, where the request doesn't say how many."""
        room = context - max(map(len, prompts))
        if self.wanted_tokens is not None or params.max_tokens is None or not 0 < room < params.max_tokens:
            return params
        return replace(params, max_tokens=room)

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options goes with stream: true only.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs can't be streamed.", param="prompt_logprobs")
        extra = self.model_extra or {}
        for name in UNBUILT:
            if extra.get(name) not in OFF and not (name == "best_of" and extra[name] == (self.n or 1)):
                raise RequestError(f"{name} is not supported by this server.", param=name, code="unsupported_parameter")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string, a list of strings or null, as a tuple of strings."""
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts[: MOST_STOPS + 1]):
        raise RequestError("stop must be a string, a list of strings or null.", param="stop")
    if len(texts) > MOST_STOPS:
        raise RequestError(f"stop holds {len(texts)} strings; at most {MOST_STOPS} are allowed.", param="stop")
    if longest := max((len(text) for text in texts if len(text) > LONGEST_STOP), default=0):
        raise RequestError(f"A stop string has {longest} characters; at most {LONGEST_STOP} are allowed.", param="stop")
    return tuple(texts)


def biases(logit_bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} as pairs."""
    for key in logit_bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("logit_bias must have token ids as its keys.", param="logit_bias")
    return tuple((int(key), bias) for key, bias in (logit_bias or {}).items())
