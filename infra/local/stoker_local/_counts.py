"""What the bucket has done: counters that tests and the demo read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Counters since the start or the last reset.

    Attributes:
        requests: by S3 operation (``GetObject`` …); malformed requests count as ``Malformed``.
        statuses: answers by HTTP status.
        faults: injected faults by kind; ``tail`` counts GETs delayed by the shape's tail.
        bytes_in: body bytes received.
        bytes_out: body bytes sent or, of the answers under way, about to be.
        connections: open now.
        connections_opened: in all.
        peak_connections: most that were open at once.
    """

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    connections_opened: int = 0
    peak_connections: int = 0

    def opened(self) -> None:
        """Count a new connection."""
        self.connections += 1
        self.connections_opened += 1
        self.peak_connections = max(self.peak_connections, self.connections)

    def closed(self) -> None:
        """Count a connection that has ended."""
        self.connections -= 1

    def reset(self) -> None:
        """Start again from zero; open connections stay counted as open."""
        self.requests.clear()
        self.statuses.clear()
        self.faults.clear()
        self.bytes_in = self.bytes_out = self.connections_opened = 0
        self.peak_connections = self.connections

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as JSON-ready values."""
        return {
            "requests": dict(self.requests),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "faults": dict(self.faults),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "connections": self.connections,
            "connections_opened": self.connections_opened,
            "peak_connections": self.peak_connections,
        }
