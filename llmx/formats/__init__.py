"""File formats, ignorant of models: safetensors, GGUF, typed fields, where a model name leads. No torch at import."""
