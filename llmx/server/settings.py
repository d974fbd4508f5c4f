"""What the server is run with, apart from the engine's own configuration."""

from __future__ import annotations

from dataclasses import dataclass

from llmx.errors import UsageError


@dataclass(frozen=True)
class ServerSettings:
    """host, port: where to listen (port 0: any free one). served_names: what clients may call the model; the first is
    what answers say; empty: the model as it was named. drain_seconds: how long running requests may go on once the
    server was asked to stop. max_body_bytes: a larger request is refused. log_requests: one line per request on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    max_body_bytes: int = 10 * 2**20
    log_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be between 0 and 65535, not {self.port}.")
        if not 0 <= self.drain_seconds <= 86400:
            raise UsageError(f"--drain-seconds must be between 0 and 86400, not {self.drain_seconds:g}.")
        if any(not name.strip() for name in self.served_names):
            raise UsageError("--served-model-name may not be empty.")
