"""Addresses, host and port, to listen on or to connect to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker._stores.options import is_loopback
from stoker.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - recognised because clients cannot connect to them


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: Host name or IP address.
        port: TCP port, 0 to 65535; 0 is for listening only, and selects a free port.

    Example:
        >>> Address.parse("[fd00::5]:7411")
        Address(host='fd00::5', port=7411)
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``host:port`` or ``[v6]:port``.

        Raises:
            ConfigError: The text has another form.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"{text!r:.80} is not HOST:PORT; write for example 10.0.0.5:7411 or [fd00::5]:7411")
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def is_local(self) -> bool:
        """Whether the host is a loopback address."""
        return is_loopback(self.host)

    @property
    def is_everywhere(self) -> bool:
        """Whether the host is the wildcard address, which clients cannot connect to."""
        return self.host in _EVERYWHERE
