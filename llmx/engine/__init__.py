"""The engine: the step (`engine`), the core behind messages (`service`), and where the core runs (`launch`)."""
