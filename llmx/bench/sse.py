"""From what arrived of a streamed answer to a `Record`: events, tokens by ids or usage, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from llmx.bench.http import Exchange
from llmx.bench.records import Record

IDS, USAGE_SO_FAR, USAGE, RETOKENIZED = "ids", "usage_so_far", "usage", "retokenized"
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # what a chat's delta can hold


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(clock of its end, data) of each server-sent event. Comments and other fields are passed over."""
    rest, data, cut = b"", list[bytes](), False
    for clock, piece in pieces:
        if cut and piece.startswith(b"\n"):  # a line end that was cut in two
            piece = piece[1:]
        rest += piece
        cut = rest.endswith(b"\r")
        lines = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield clock, b"\n".join(data)
                data = []


def fill(record: Record, exchange: Exchange, told: bool = True) -> None:
    """Write what an exchange brought into its record. `told`: an answer without a number of tokens is a failure."""
    record.ended, record.error = exchange.ended, exchange.error
    if exchange.pieces:
        record.first_byte = exchange.pieces[0][0]
    if exchange.ended and exchange.status != 200 and exchange.error is None:
        record.error = refusal(exchange.status, exchange.body)
        return
    reader = Reader()
    for clock, data in events(exchange.pieces):
        if reader.done:
            break
        reader.read(clock, data)
    reader.write(record, told)
    if exchange.ended and record.error is None and not reader.finished:
        record.error = "the answer broke off"


def refusal(status: int, body: bytes) -> str:
    """`429: Too many requests.`"""
    try:
        said = json.loads(body)["error"]
        said = said if isinstance(said, str) else said["message"]
    except (ValueError, KeyError, TypeError):
        said = "no reason given"
    return f"{status}: {str(said)[:200]}"


def _only_role(choice: dict[str, Any]) -> bool:
    """The opening of a chat, which some servers send long before the first token."""
    delta = choice.get("delta") or {}
    return "role" in delta and not any(delta.get(name) for name in TEXTS) and not choice.get("token_ids")


class Reader:
    """What the events of one answer say. Of several choices all tokens count."""

    def __init__(self) -> None:
        self.done = self.finished = False
        self.error: str | None = None
        self.chunks: list[tuple[float, int | None, bool]] = []  # clock, tokens by ids, whether it holds text
        self.so_far: list[tuple[float, int]] = []  # clock, usage's tokens up to there
        self.usage: dict[str, Any] = {}
        self.text: list[str] = []

    def read(self, clock: float, data: bytes) -> None:
        """One event."""
        if data.strip() == b"[DONE]":
            self.done = self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.error = self.error or f"no JSON: {data[:60].decode(errors='replace')}"
            return
        if event.get("error"):
            said = event["error"]
            self.error = self.error or str(said.get("message") if isinstance(said, dict) else said)[:200]
            return
        choices = event.get("choices") or ()
        if isinstance(usage := event.get("usage"), dict):
            self.usage = usage
            if choices and not all(map(_only_role, choices)):
                self.so_far.append((clock, int(usage.get("completion_tokens") or 0)))
        for choice in choices:
            self._choice(clock, choice)

    def _choice(self, clock: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        said = [choice.get("text")] if not isinstance(delta, dict) else [delta.get(name) for name in TEXTS]
        self.text += [part for part in said if isinstance(part, str)]
        text = any(said)
        ids = choice.get("token_ids")
        self.finished = self.finished or bool(choice.get("finish_reason"))
        if text or ids:
            self.chunks.append((clock, len(ids) if isinstance(ids, list) else None, bool(text)))

    @property
    def source(self) -> str | None:
        """Where the number of tokens of each chunk is from; USAGE: only that of all of them is known."""
        if self.chunks and all(tokens is not None for _, tokens, text in self.chunks if text):
            return IDS
        if self.so_far and self.so_far[-1][1]:
            return USAGE_SO_FAR
        return USAGE if self.usage.get("completion_tokens") is not None else None

    def write(self, record: Record, must_tell: bool) -> None:
        """Arrivals and counts. Without per-chunk counts, one token a chunk holds where that makes the sum: a last one
        may be the end of text, which has no chunk."""
        record.error = record.error or self.error
        record.text = "".join(self.text)
        told = self.usage.get("completion_tokens")
        source, texts = self.source, [clock for clock, _, text in self.chunks if text]
        if source == IDS:
            record.arrivals = [(clock, tokens) for clock, tokens, _ in self.chunks if tokens]
            record.told = told
        elif source == USAGE_SO_FAR:
            before = 0
            for clock, tokens in self.so_far:
                if tokens > before:
                    record.arrivals.append((clock, tokens - before))
                    before = tokens
        else:
            record.arrivals = [(clock, 1) for clock in texts]
            record.sized = source == USAGE and told in (len(texts), len(texts) + 1)
            record.counted = int(told) if told is not None else None
            if source is None and texts and record.error is None and must_tell:
                record.error = "the server told no token count"
        if (prompt := self.usage.get("prompt_tokens")) is not None:
            record.input_len = int(prompt)
        details = self.usage.get("prompt_tokens_details") or {}
        record.cached = details.get("cached_tokens") if isinstance(details, dict) else None
