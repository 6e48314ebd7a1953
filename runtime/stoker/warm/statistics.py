"""What a proxy has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ProxyStatistics", "ProxyTally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyStatistics:
    """A snapshot of a proxy.

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
        objects: that are known.
        held_bytes: that nodes are believed to hold, or are being sent.
        limit_bytes: that those nodes can hold that have said so.
        nodes: how many are in which state.
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
    objects: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ProxyTally:
    """The counts behind :class:`ProxyStatistics`; its fields are described there."""

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
