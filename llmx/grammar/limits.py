"""What compiling a grammar, and each step of it, may take: llguidance's own limits, the same wherever it runs."""

from __future__ import annotations

from typing import Any


def limits() -> Any:
    """An `LLParserLimits`. Fuel is processor work, counted: a step ends with an error rather than late."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
