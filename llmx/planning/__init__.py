"""Memory and speed of a model on some hardware, from its config or its GGUF header alone. No torch, no weights."""
