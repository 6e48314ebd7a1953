"""What a warm tier is made of, and how hard it tries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stoker.errors import ConfigError
from stoker_warm._code import Code
from stoker_warm._directory import MAX_NODES
from stoker_warm._wake import MOST_LINGER_SECONDS
from stoker_warm._wire import MAX_SHARD_BYTES

_LEAST_LINGER_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmConfig:
    """The proxy's settings.

    Attributes:
        nodes: functions, called ``warm-0`` to ``warm-{nodes - 1}`` behind the deployment's prefix.
        code: how objects are cut; each shard is on a node of its own.
        linger_seconds: how long a node stays after the last request, and is billed.
        keep_warm_seconds: a node that had no other contact is called so often, so that the platform keeps it.
        ping_seconds: a node that may be awake has so long to say so, before it is called again.
        wake_seconds: a node that is called has so long to be there; a cold start is part of it.
        fresh_seconds: a node that has spoken is believed to be awake for so long.
        read_seconds: for an object, at most; then the bucket is asked.
        write_seconds: for a shard that is put away, its node's wake included.
        pending_bytes: copies of objects that wait to be written; more are not kept at all.
        writes: objects that are written at once.
        most_objects: that are known of; bounds the memory for it, about 100 bytes each.

    Raises:
        ConfigError: a figure is out of bounds, or there are fewer nodes than an object has shards.
    """

    nodes: int = 12
    code: Code = field(default_factory=Code)
    linger_seconds: float = 0.25
    keep_warm_seconds: float = 60.0
    ping_seconds: float = 0.25
    wake_seconds: float = 10.0
    fresh_seconds: float = 1.0
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    pending_bytes: int = 256 << 20
    writes: int = 8
    most_objects: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.code.shards <= self.nodes <= MAX_NODES:
            raise ConfigError(
                f"objects in {self.code} shards need {self.code.shards} to {MAX_NODES} nodes, not {self.nodes}: "
                "deploy more, or take a smaller code"
            )
        for name in ("pending_bytes", "writes", "most_objects"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, not {getattr(self, name)}")
        seconds = ("keep_warm_seconds", "ping_seconds", "wake_seconds", "read_seconds", "write_seconds")
        for name in seconds:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is a duration of more than 0 seconds, not {getattr(self, name)}")
        if not 0 <= self.fresh_seconds < math.inf:
            raise ConfigError(f"fresh_seconds is a duration in seconds, not {self.fresh_seconds}")
        if not _LEAST_LINGER_SECONDS <= self.linger_seconds <= MOST_LINGER_SECONDS:
            raise ConfigError(
                f"linger_seconds is {_LEAST_LINGER_SECONDS:g} to {MOST_LINGER_SECONDS:g}, not {self.linger_seconds}: a "
                "node stays until the first request has come to it, and no longer than a function may run"
            )

    @property
    def max_object_bytes(self) -> int:
        """Size of the largest object whose shards can be sent."""
        return self.code.data * MAX_SHARD_BYTES

    def name_of(self, node: int) -> str:
        """Return what a node is called."""
        return f"warm-{node}"
