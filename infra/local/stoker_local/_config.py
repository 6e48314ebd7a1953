"""The local bucket's configuration, and its way to another process as JSON."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker_local._faults import Fault, FaultKind, FaultPlan
from stoker_local._s3.model import BucketSpec
from stoker_local._s3.signature import KeyPair
from stoker_local._shape import Shape

__all__ = ["WELL_KNOWN", "BucketConfig", "is_this_machine"]

WELL_KNOWN = KeyPair(access_key="stoker", secret_key="stoker-secret")  # noqa: S106  (not a secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """What the local bucket serves, to whom, how fast and how badly.

    Attributes:
        host: address to listen on. Beyond this machine, nobody is let in without a key that is not well known.
        port: 0 takes a free one.
        region: the endpoint's, and that of buckets which name none.
        keys: who may sign requests; the first one is in :meth:`LocalBucket.environment`.
        buckets: that exist from the start.
        max_object_bytes: a longer request body is refused.
        max_connections: one more is dropped.
        request_seconds: a connection ends if its next request has not arrived whole after so long.
    """

    host: str = "127.0.0.1"
    port: int = 0
    region: str = "us-east-1"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN,)
    buckets: tuple[BucketSpec, ...] = (BucketSpec(name="stoker"),)
    shape: Shape = field(default_factory=Shape)
    faults: FaultPlan = field(default_factory=FaultPlan)
    max_object_bytes: int = 1 << 30
    max_connections: int = 1024
    request_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} is not within [0, 65535]")
        if self.max_object_bytes < 0:
            raise ValueError(f"max_object_bytes={self.max_object_bytes} is negative")
        if not (self.max_connections > 0 and self.request_seconds > 0):
            raise ValueError(
                f"max_connections={self.max_connections} and request_seconds={self.request_seconds} must be positive"
            )
        if not is_this_machine(self.host) and any(key.secret_key == WELL_KNOWN.secret_key for key in self.keys):
            raise ValueError(f"host={self.host!r} is open to other machines; give keys of your own")
        if not is_this_machine(self.host) and any(bucket.anonymous for bucket in self.buckets):
            raise ValueError(f"host={self.host!r} is open to other machines; an anonymous bucket would be public")
        _refuse_repeats("access key", (key.access_key for key in self.keys))
        _refuse_repeats("bucket", (bucket.name for bucket in self.buckets))

    def to_json(self) -> str:
        """Return it as one line of JSON, secrets included: for a pipe, not for a log."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BucketConfig:
        """Return what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        plan = values["faults"]
        plan["script"] = tuple(fault and _fault(fault) for fault in plan["script"])
        plan["probabilities"] = {FaultKind(kind): p for kind, p in plan["probabilities"].items()}
        plan["operations"] = tuple(plan["operations"])
        values["faults"] = FaultPlan(**plan)
        values["shape"] = Shape(**values["shape"])
        values["buckets"] = tuple(BucketSpec(**bucket) for bucket in values["buckets"])
        values["keys"] = tuple(_key(key) for key in values["keys"])
        return cls(**values)


def is_this_machine(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``; any name but localhost might lead elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_repeats(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if len(set(listed)) < len(listed):
        raise ValueError(f"a {what} is named twice: {listed}")


def _fault(values: dict[str, Any]) -> Fault:
    return Fault(**{**values, "kind": FaultKind(values["kind"])})


def _key(values: dict[str, Any]) -> KeyPair:
    buckets = values["buckets"]
    return KeyPair(**{**values, "buckets": None if buckets is None else tuple(buckets)})
