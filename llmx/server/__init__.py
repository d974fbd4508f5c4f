"""The HTTP server: OpenAI's API on top of `llmx.llm`. `app.build_app` makes the application, `run.serve` runs it."""
