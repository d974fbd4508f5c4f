"""The engine: the step (`engine`), the core behind messages (`service`), and where it runs (`launch`, `worker`)."""
