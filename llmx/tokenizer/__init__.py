"""Text to token ids and back: from a Hugging Face directory's tokenizer.json, or from a GGUF file's metadata."""

from __future__ import annotations

from llmx.tokenizer.loading import load_tokenizer
from llmx.tokenizer.pieces import Stream
from llmx.tokenizer.tokenizer import Tokenizer

__all__ = ["Stream", "Tokenizer", "load_tokenizer"]
