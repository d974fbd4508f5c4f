"""Chat templates: messages to a prompt's text."""

from __future__ import annotations

from llmx.templates.chat import ChatTemplate

__all__ = ["ChatTemplate"]
