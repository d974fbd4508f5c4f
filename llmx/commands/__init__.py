"""The commands, one file each: options, one call, a report. Modules stay light, so that `llmx --help` is quick."""
