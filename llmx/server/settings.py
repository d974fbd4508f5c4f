"""What the server is run with, apart from the engine's own configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmx.errors import UsageError
from llmx.server.hosts import ANY, hostname
from llmx.server.keys import Key
from llmx.server.tools import check_name

ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?")

MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}  # what stands around thoughts


def check_parser(name: str) -> None:
    """UsageError if it is neither a name in `MARKS` nor "auto" nor "off"."""
    if name not in ("auto", "off", *MARKS):
        known = ", ".join(["auto", "off", *MARKS])
        raise UsageError(f"--reasoning-parser {name[:80]!r} does not exist; there are {known}.")


@dataclass(frozen=True)
class ServerSettings:
    """host, port: where to listen (port 0: any free one). served_names: what clients may call the model; the first is
    what answers say; empty: the model as it was named. drain_seconds: how long running requests may go on once the
    server was asked to stop. max_body_bytes: a larger request is refused. log_requests: one line per request on stderr.
    keys: who may ask; empty: anyone. origins: web pages that may (CORS); "*": any. queued_requests: texts that may wait
    for a free sequence; queued_tokens: tokens of prompts that may wait; None: by the engine's size. defaults:
    SamplingParams that stand for what a request leaves out. keep_alive_seconds: between comments in a silent stream.
    queue_seconds: how long a request may wait for its first step; request_seconds: and how long it may take in all;
    None: for ever. allowed_hosts: names by which clients may call the server (`hosts.Hosts`). share_cache: whether
    requests with different keys may share cached prefixes. tool_call_parser, reasoning_parser: how the model writes
    calls and thoughts: "auto" as its chat template tells, "off", or a name (a file in `server/tools`; `MARKS`).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    max_body_bytes: int = 10 * 2**20
    log_requests: bool = False
    keys: tuple[Key, ...] = field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    queued_requests: int | None = None
    queued_tokens: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keep_alive_seconds: float = 10.0
    queue_seconds: float | None = None
    request_seconds: float | None = None
    allowed_hosts: tuple[str, ...] = ()
    share_cache: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be between 0 and 65535, not {self.port}.")
        if not 0 <= self.drain_seconds <= 86400:
            raise UsageError(f"--drain-seconds must be between 0 and 86400, not {self.drain_seconds:g}.")
        if any(not name.strip() for name in self.served_names):
            raise UsageError("--served-model-name may not be empty.")
        check_name(self.tool_call_parser)
        check_parser(self.reasoning_parser)
        for flag, least, value in (
            ("--max-num-queued-reqs", 0, self.queued_requests),
            ("--max-num-queued-tokens", 1, self.queued_tokens),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag} must be at least {least}, not {value}.")
        for flag, seconds in (("--queue-timeout", self.queue_seconds), ("--request-timeout", self.request_seconds)):
            if seconds is not None and not 0 < seconds <= 86400:
                raise UsageError(f"{flag} must be above 0 and at most 86400 seconds, not {seconds:g}.")
        for name in self.allowed_hosts:
            if name != ANY and hostname(name) != name.lower():
                raise UsageError(
                    f"--allowed-hosts {name[:100]} is no host name.",
                    hint="write a name or an address without a port, such as llm.example.org, or * for any",
                )
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"--allowed-origins {origin[:100]} is no origin.", hint="write https://example.org, or * for any"
                )
