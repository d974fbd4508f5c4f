"""llmx: one toolkit and one engine for the life of an open LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmx.core import SamplingParams
    from llmx.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams on first use: `import llmx` alone stays fast and free of torch."""
    if name == "LLM":
        from llmx.llm import LLM

        return LLM
    if name == "SamplingParams":
        from llmx.core import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
