"""Prompts out of the rows of a data set: lines as vLLM has them, chats, Spec-Bench's questions, ShareGPT's talks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmx.bench.workload import Messages
from llmx.errors import UsageError
from llmx.formats.rows import Row

COLUMNS = ("prompt", "messages", "turns", "conversations", "output_tokens")
ROLES = ("system", "developer", "user", "assistant", "tool")
HUMANS, SYSTEMS = ("human", "user"), ("system",)  # ShareGPT's words


@dataclass(frozen=True)
class Entry:
    """What one row asks. `output_len` None: the row doesn't say. `answer`: the one it tells, to be as long as."""

    prompt: str | Messages
    output_len: int | None = None
    answer: str | None = None


def entry(row: Row) -> Entry | None:
    """{"prompt", "output_tokens"?}, {"messages": [..], "output_tokens"?}, Spec-Bench's {"turns": [..]}, or ShareGPT's
    {"conversations": [{"from", "value"}, ..]}. Of several turns the first is asked: others need answers.

    None for a talk that no person begins, which ShareGPT's files have many of. UsageError for anything else.
    """
    data = row.data
    if data is None:
        raise UsageError(f"{row.where} is not a JSON object.")
    length = data.get("output_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise UsageError(f"{row.where}: output_tokens must be a whole number of at least 1, not {length!r}.")
    if isinstance(data.get("prompt"), str) and data["prompt"]:
        return Entry(data["prompt"], length)
    if isinstance(turns := data.get("turns"), list) and turns and isinstance(turns[0], str) and turns[0]:
        return Entry(({"role": "user", "content": turns[0]},), length)
    if isinstance(messages := data.get("messages"), list) and messages and all(map(_is_message, messages)):
        return Entry(tuple({"role": m["role"], "content": m["content"]} for m in messages), length)
    if isinstance(talk := data.get("conversations"), list) and all(map(_is_said, talk)):
        return _talk(talk, length)
    raise UsageError(
        f"{row.where} has no prompt: a text `prompt`, `messages` of role and content, Spec-Bench's `turns` or "
        "ShareGPT's `conversations`."
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )  # fmt: skip


def _is_said(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)


def _talk(turns: list[Mapping[str, str]], length: int | None) -> Entry | None:
    """What is said before the first answer, and that answer."""
    start = 1 if turns and turns[0]["from"] in SYSTEMS else 0
    if len(turns) <= start or turns[start]["from"] not in HUMANS or not turns[start]["value"].strip():
        return None
    said = [{"role": "system", "content": turns[0]["value"]}] if start else []
    said.append({"role": "user", "content": turns[start]["value"]})
    answer = turns[start + 1]["value"] if len(turns) > start + 1 and turns[start + 1]["from"] not in HUMANS else ""
    return Entry(tuple(said), length, answer or None)
