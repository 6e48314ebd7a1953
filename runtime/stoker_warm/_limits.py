"""What a connection of the warm tier may take, and what it has taken."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["ConnectionConfig", "ConnectionStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Limits of a connection.

    Attributes:
        open_requests: how many requests of ours may be without an answer; more wait for their turn.
        serving_requests: how many of the peer's are served at once before it is not read any more.
        serving_bytes: how many bytes their bodies may have; one body comes on top.
        handshake_seconds: how long the peer has to prove who it is.
        close_seconds: how long the peer has to take what was sent before a ``close``.
        piece_bytes: how much is sent at a time.
        stall_seconds: how long the peer may take nothing of what waits to be sent before the connection is given up.

    Raises:
        ConfigError: one of them is not positive.
    """

    open_requests: int = 64
    serving_requests: int = 64
    serving_bytes: int = 128 << 20
    handshake_seconds: float = 5.0
    close_seconds: float = 1.0
    piece_bytes: int = 1 << 20
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a connection is {getattr(self, name)}, and must be more than 0")


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """What a connection does and did.

    Attributes:
        sent_bytes: given to the transport.
        received_bytes: taken from it.
        open_requests: of ours, without an answer; cancelled ones too, until the peer has answered them.
        serving_requests: of the peer's, until their answers were given to the transport.
        serving_bytes: of the bodies of those.
        heard_seconds: when something was last received, in the loop's time.
    """

    sent_bytes: int
    received_bytes: int
    open_requests: int
    serving_requests: int
    serving_bytes: int
    heard_seconds: float
