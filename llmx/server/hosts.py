"""By which names the server may be called.

A web page can let its own name lead to 127.0.0.1 (DNS rebinding) and would then reach a local server as if it were the
page's own, past CORS. The browser still tells the page's name in `Host`, so that is looked at.
"""

from __future__ import annotations

import ipaddress
import re

from llmx.errors import RequestError

ANY = "*"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+?)\.?(?::\d{0,5})?")


class Hosts:
    """bound: what the server was told to listen on. address: what that is. allowed: further names; "*": any.

    Bound to loopback, the names of loopback and `bound` are good beside those; elsewhere, where its names are not
    known, any name is unless some are given.
    """

    def __init__(self, bound: str, address: str, allowed: tuple[str, ...]) -> None:
        own = (f"[{name}]" if ":" in name else name for name in (bound, address))
        self.names: frozenset[str] | None = frozenset(name.lower() for name in (*LOCAL, *own, *allowed))
        if ANY in allowed or not (allowed or ipaddress.ip_address(address.partition("%")[0]).is_loopback):
            self.names = None

    def check(self, host: str | None) -> None:
        """RequestError for a `Host` header that names none of ours. None at all (HTTP/1.0) comes from no browser."""
        if self.names is None or host is None or hostname(host) in self.names:
            return
        raise RequestError(
            f"This server is not called {host[:100]!r}.",
            status=403,
            code="host_not_allowed",
            hint="if it should be, start it with --allowed-hosts NAME",
        )


def hostname(host: str) -> str | None:
    """The name in a `Host` header, lower case, without the port and a final dot; None if it isn't one."""
    found = HOST.fullmatch(host.lower())
    return found["name"] if found else None
