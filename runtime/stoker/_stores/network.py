"""Connections from this machine: the proxy and the certificates of its environment, and the loop that they belong to.

Proxy and certificates are settled once for every connection of a store, so that bulk reads and the control plane cannot
disagree.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Callable
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stoker.errors import ConfigError

__all__ = ["check_endpoint", "is_this_machine", "lambda_region", "machine_vendor", "proxy_of", "trusted", "PerLoop"]

_VENDOR = Path("/sys/class/dmi/id/sys_vendor")
_LAMBDA_HOST = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws", re.ASCII)
_BUNDLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


def check_endpoint(url: str, name: str) -> None:
    """Raise ConfigError unless ``url`` is an endpoint; it may hold a secret and is not repeated, but for its ``name``.

    Credentials in it would be sent to whoever answers, and printed with every error.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # refuses labels that are empty or too long
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or set(url) & set(" \\"):
        raise ConfigError(f"{name} must be http:// or https:// and a host, as in https://host:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{name} holds a user, password, query or fragment; give credentials as options")


def proxy_of(url: str) -> str | None:
    """Return the proxy that ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` name for ``url``.

    This machine itself is never reached through one, whatever they say: it would be the proxy's own machine.

    Raises:
        ConfigError: it is not an HTTP proxy; it may hold a password and is not repeated.
    """
    parts = urlsplit(url)
    if is_this_machine(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"the proxy for {parts.hostname} is not an HTTP proxy; set HTTPS_PROXY=http://host:port")
    return proxy


def is_this_machine(host: str) -> bool:
    """Return whether a host is an address of this machine's loopback, or its name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lambda_region(url: str) -> str:
    """Return the region of a Lambda function from its URL; empty if it is not one's."""
    match = _LAMBDA_HOST.fullmatch(urlsplit(url).hostname or "")
    return match[1] if match else ""


def machine_vendor() -> str:
    """Return who made this machine, such as ``Google`` or ``Amazon EC2``; empty if it does not say."""
    try:
        return _VENDOR.read_text().strip()
    except OSError:
        return ""


def trusted(bundle: str | None = None) -> ssl.SSLContext:
    """Return what verifies certificates: ``bundle``, else ``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE``, else the system's.

    There is no way to leave verification out.

    Raises:
        ConfigError: there are no certificates in the file or folder that is named.
    """
    path = bundle or next(filter(None, map(os.environ.get, _BUNDLES)), None)
    if path is None:
        return _system_trust()
    try:
        if Path(path).is_dir():
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"no certificates can be read from {path!r} ({error}); check AWS_CA_BUNDLE, {', '.join(_BUNDLES)}"
        ) from error


@cache
def _system_trust() -> ssl.SSLContext:
    """Return the system's certificates, which take 10 to 30 ms to read."""
    return ssl.create_default_context()


_T = TypeVar("_T")

# What a forked child found in its memory. It is kept, not closed: closing would say goodbye on the parent's TLS
# connections and take its sockets out of the epoll set that the two processes share.
_inherited: list[object] = []


class PerLoop(Generic[_T]):
    """One value per event loop, made on first use in it; loops in several threads may use the same one."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._pid = os.getpid()
        # No lock: each entry is written only by its own loop's thread, and a lock may be held while forking.
        self._made: dict[asyncio.AbstractEventLoop, _T] = {}

    def get(self) -> _T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        self._drop_dead()
        if (value := self._made.get(loop)) is None:
            value = self._made[loop] = self._make()
        return value

    def any(self) -> _T | None:
        """Return a value that is there, of whatever loop; None if there is none."""
        return next(iter(tuple(self._made.values())), None)

    def take(self) -> _T | None:
        """Remove and return the running loop's value, for its end; None if there is none."""
        self._drop_dead()
        return self._made.pop(asyncio.get_running_loop(), None)

    def _drop_dead(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._made)
            self._made, self._pid = {}, os.getpid()
        for loop in [loop for loop in tuple(self._made) if loop.is_closed()]:
            self._made.pop(loop, None)
