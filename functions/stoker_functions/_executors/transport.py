"""HTTP to functions: one request that may be silent for an hour, over a connection that is kept alive meanwhile."""

from __future__ import annotations

import socket

import aiohttp
from aiohappyeyeballs import AddrInfoType

from stoker._stores.network import proxy_of, trusted

__all__ = ["open_session"]

_CONNECT_SECONDS = 10.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 4}
"""Gateways forget a connection without traffic, AWS's after 350 s. What a system does not know is left out; macOS calls
the first by the second's name."""


def open_session(url: str, *, timeout_seconds: float, ca_bundle: str | None = None) -> aiohttp.ClientSession:
    """Return a session for calls below ``url`` in the running loop, through the environment's proxy.

    It makes as many connections as there are calls: their number is the caller's business.

    Raises:
        ConfigError: the environment names a proxy or certificates that cannot be used.
    """
    verify = trusted(ca_bundle) if url.startswith("https://") else True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify, socket_factory=_kept_alive),
        proxy=proxy_of(url),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds),
    )


def _kept_alive(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
