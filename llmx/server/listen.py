"""Taking the port. Imports next to nothing: it comes before the slow things."""

from __future__ import annotations

import errno
import socket

from llmx.errors import LlmxError, UsageError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow: a taken port shows at once, and early clients get an answer.

    Raises LlmxError where the port can't be had and UsageError where the host can't be.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is not an address of this machine.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_bind(host, port, error) from None
    return listener


def _cannot_bind(host: str, port: int, error: OSError) -> LlmxError:
    if error.errno == errno.EADDRINUSE:
        return LlmxError(f"Port {port} on {host} is taken.", "Choose another: --port N (0: any free one).")
    if error.errno == errno.EACCES:
        return LlmxError(f"Port {port} on {host} may not be opened by this user.", "Ports from 1024 on may: --port N.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"--host {host} is not an address of this machine.")
    return LlmxError(f"Port {port} on {host} can't be opened: {error.strerror}.")
