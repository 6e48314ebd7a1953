"""A host and a port: where a server listens, and what is connected to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker._stores.options import is_this_machine
from stoker.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - to be told from addresses that can be connected to


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: a name or an address.
        port: 0 to 65535; 0 is for listening only, on any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return what ``host:port`` or ``[v6]:port`` says.

        Raises:
            ConfigError: it says something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"{text!r:.80} is no HOST:PORT; write for example 10.0.0.5:7411 or [fd00::5]:7411")
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def is_local(self) -> bool:
        """Whether it is of this machine's loopback."""
        return is_this_machine(self.host)

    @property
    def is_everywhere(self) -> bool:
        """Whether it stands for all addresses of this machine: nobody can connect to it."""
        return self.host in _EVERYWHERE
