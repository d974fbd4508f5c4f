"""uvicorn as we run it: our protocol, bounds and time-outs, and what it may say on stderr."""

from __future__ import annotations

from typing import Any

import uvicorn
from starlette.types import ASGIApp

from llmx.server.protocol import HEAD_BYTES, Protocol

GRACE_SECONDS = 5  # for streams that were told to end to say so


def configuration(app: ASGIApp) -> uvicorn.Config:
    """For `app` on sockets that are open already."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Protocol,
        h11_max_incomplete_event_size=HEAD_BYTES,
        lifespan="off",
        ws="none",
        log_config=_logging(),
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def _logging() -> dict[str, Any]:
    """Everything to stderr; requests only where asked for. uvicorn's own news (started, stopping) is ours to tell."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "talk": {"format": "%(levelname)s: %(message)s"},
            "access": {"format": "%(asctime)s %(message)s"},
        },
        "handlers": {
            "talk": {"class": "logging.StreamHandler", "formatter": "talk", "stream": "ext://sys.stderr"},
            "access": {"class": "logging.StreamHandler", "formatter": "access", "stream": "ext://sys.stderr"},
        },
        "loggers": {
            "llmx.server": {"handlers": ["talk"], "level": "WARNING", "propagate": False},
            "uvicorn": {"handlers": ["talk"], "level": "WARNING", "propagate": False},
            "llmx.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        },
    }
