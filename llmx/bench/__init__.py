"""What `llmx bench` measures: workloads, statistics, definitions, and the runs themselves, on top of `llmx.llm`."""
