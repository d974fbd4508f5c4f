"""The engine core's interface: plain data in a fixed schema, as JSON between processes. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from llmx.config import EngineConfig, EngineInfo, Metrics
from llmx.core import Logprob, Request, SamplingParams


@dataclass(frozen=True)
class Start:
    """To a core in a process of its own, first of all."""

    config: EngineConfig


@dataclass(frozen=True)
class Follow:
    """To a further rank, first of all: which one it is, and where rank 0 keeps the group's store (a loopback port)."""

    config: EngineConfig
    rank: int
    port: int


@dataclass(frozen=True)
class Present:
    """From a further rank: its files are good, and it joins the group now."""


@dataclass(frozen=True)
class Step:
    """To a further rank: what rank 0 has taken since its last step, and that it steps now."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Add:
    request: Request


@dataclass(frozen=True)
class Abort:
    """End a request, or one of its choices, where it is. Nothing more is sent of it."""

    id: str
    choice: int | None = None


@dataclass(frozen=True)
class Ask:
    """Ask for `Measured`. `token` comes back with the answer."""

    token: int


@dataclass(frozen=True)
class Progress:
    """While a model loads: bytes done and in all."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True)
class Tokens:
    """What a step added to one choice.

    cached: prompt tokens found in the prefix cache. started: when the request left the queue, by `time.monotonic()`,
    which the processes of one machine share.
    """

    id: str
    choice: int
    tokens: tuple[int, ...]
    cached: int
    finish: str | None = None
    stopped_by: int | None = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[tuple[int, Logprob], ...] = ()
    started: float = 0.0


@dataclass(frozen=True)
class Refused:
    """A request that can't run: the fields of a RequestError."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


@dataclass(frozen=True)
class Measured:
    token: int
    metrics: Metrics


@dataclass(frozen=True)
class Failed:
    """The core can't go on. `exit_code` as in LlmxError."""

    message: str
    hint: str | None = None
    exit_code: int = 1


Message = Start | Follow | Present | Step | Add | Abort | Ask | Progress | Ready | Tokens | Refused | Measured | Failed
KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}
NESTED: dict[str, type] = {"config": EngineConfig, "info": EngineInfo, "metrics": Metrics}


def encode(messages: Sequence[Message]) -> bytes:
    """One JSON array, UTF-8, without a newline. Of Tokens, of which a step sends many, only the fields, in order."""
    return json.dumps([_body(message) for message in messages], separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict, not copied: `asdict` takes milliseconds for a long prompt."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _body(message: Message) -> dict[str, Any] | list[Any]:
    if isinstance(message, Tokens):
        return list(vars(message).values())
    if isinstance(message, Step):
        return {"kind": "Step", "messages": [_body(inner) for inner in message.messages]}
    body = _plain(message)
    if isinstance(message, Add):
        request = message.request
        body["request"] = _plain(request) | {"eos": sorted(request.eos), "salt": request.salt.hex()}
    return {"kind": type(message).__name__} | body


def decode(data: bytes) -> list[Message]:
    """The inverse. A message that doesn't fit the schema is a bug, and raises ValueError or TypeError."""
    return [_message(body) for body in json.loads(data)]


def _message(body: dict[str, Any] | list[Any]) -> Message:
    if isinstance(body, list):
        return _tokens(*body)
    kind = KINDS[body.pop("kind")]
    if kind is Step:
        return Step(tuple(_message(inner) for inner in body["messages"]))
    if kind is Add:
        return Add(_request(body["request"]))
    for name, nested in NESTED.items():
        if name in body:
            body[name] = nested(**{k: _frozen(v) for k, v in body[name].items()})
    if set(body) != {field.name for field in fields(kind)}:
        raise ValueError(f"{kind.__name__} has not the fields {sorted(body)}")
    message: Message = kind(**body)
    return message


def _tokens(
    id: str,
    choice: int,
    tokens: list[int],
    cached: int,
    finish: str | None,
    stopped_by: int | None,
    logprobs: list[Any] | None,
    prompt_logprobs: list[Any],
    started: float,
) -> Tokens:
    own = None if logprobs is None else tuple(_logprob(x) for x in logprobs)
    prompt = tuple((at, _logprob(x)) for at, x in prompt_logprobs)
    return Tokens(id, choice, tuple(tokens), cached, finish, stopped_by, own, prompt, started)


def _request(body: dict[str, Any]) -> Request:
    params = SamplingParams(**{k: _frozen(v) for k, v in body["params"].items()})
    salt, priority = bytes.fromhex(body["salt"]), body["priority"]
    eos, score_from = frozenset(body["eos"]), body["score_from"]
    return Request(body["id"], tuple(body["prompt"]), params, eos, salt, priority, score_from)


def _logprob(body: dict[str, Any]) -> Logprob:
    return Logprob(body["token"], body["value"], _frozen(body["top"]))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value
