"""File formats, ignorant of models: safetensors, GGUF, typed fields, and where a model name leads. No torch at import."""
