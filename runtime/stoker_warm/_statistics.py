"""What a proxy has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

__all__ = ["ProxyStatistics", "ProxyTally"]


@dataclass(slots=True, kw_only=True)
class ProxyTally:
    """What a proxy counts.

    Attributes:
        hits: objects that were read.
        misses: objects that are not here.
        losses: objects that were here, and of which too many shards are lost.
        restored: hits for which lost or late data shards were computed from parity.
        late: shards that were not waited for, since others were first.
        corrupt: shards that arrived and are not what they should be.
        rebuilt: lost shards that were written again by a read of their object.
        put_back: lost shards that were written again from where the objects came from.
        backed_up: shards that were copied to a second instance.
        stored: objects that were put away.
        declined: objects that were offered and not taken: too many waited, there is no room, or nodes failed.
        evicted: objects that went for others.
        pending_bytes: copies that wait to be written.
    """

    hits: int = 0
    misses: int = 0
    losses: int = 0
    restored: int = 0
    late: int = 0
    corrupt: int = 0
    rebuilt: int = 0
    put_back: int = 0
    backed_up: int = 0
    stored: int = 0
    declined: int = 0
    evicted: int = 0
    pending_bytes: int = 0

    def snapshot(self, *, objects: int, held_bytes: int, limit_bytes: int, nodes: Mapping[str, int]) -> ProxyStatistics:
        """Return what has been counted, with what there is now."""
        return ProxyStatistics(
            **asdict(self),
            objects=objects,
            held_bytes=held_bytes,
            limit_bytes=limit_bytes,
            nodes=MappingProxyType(dict(nodes)),
        )


@dataclass(slots=True, kw_only=True)
class ProxyStatistics(ProxyTally):
    """A snapshot of a proxy: a copy of what it has counted, and what there is.

    Attributes:
        objects: that are known.
        held_bytes: that nodes are believed to hold, or are being sent.
        limit_bytes: that those nodes can hold that have said so.
        nodes: how many are in which state.
    """

    objects: int
    held_bytes: int
    limit_bytes: int
    nodes: Mapping[str, int]
