"""Events and results of the warm tier's functions: what an invocation of a node receives and returns."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker._base.fields import JsonFields
from stoker.errors import EventError, WireError
from stoker_warm._shard import StoreVersion

_NODE = r"[a-z][a-z0-9-]{0,62}"
_ADDRESS = r"[^\s/@]{1,300}"
_INSTANCE = r"[0-9a-f]{16}"
MAX_LINGER_SECONDS = 900
_MAX_BYTES = 1 << 40


class NodeTask(enum.StrEnum):
    """Task of an invocation."""

    SERVE = "serve"
    """Answer requests until none arrives for ``linger_seconds``."""
    WARM = "warm"
    """Return the report at once; the call makes the platform keep the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeEvent:
    """Event of an invocation of a node.

    Attributes:
        node: Name of the invoked node.
        proxy: Address of the proxy, ``host:port``.
        fingerprint: SHA-256 of the proxy's certificate in hexadecimal digits; empty without TLS.
        task: Task of the invocation.
        linger_seconds: Time without requests after which the node returns, in seconds.
        must_reconnect: Whether to replace an earlier connection, because the proxy receives nothing on it.
    """

    node: str
    proxy: str
    fingerprint: str = ""
    task: NodeTask = NodeTask.SERVE
    linger_seconds: float = 0.25
    must_reconnect: bool = False

    def to_event(self) -> dict[str, Any]:
        """Return the event as JSON values."""
        return {
            "node": self.node,
            "proxy": self.proxy,
            "fingerprint": self.fingerprint,
            "task": str(self.task),
            "linger_milliseconds": round(1000 * self.linger_seconds),
            "dial_anew": int(self.must_reconnect),
        }

    @classmethod
    def parse(cls, event: object) -> WakeEvent:
        """Parse an event.

        Raises:
            EventError: A field is missing, unknown or invalid; the message names it.
        """
        fields = JsonFields(event, "warm node's event")
        wake = cls(
            node=fields.text("node", pattern=_NODE),
            proxy=fields.text("proxy", pattern=_ADDRESS),
            fingerprint=fields.text("fingerprint", pattern=r"(?:[0-9a-f]{64})?", default=""),
            task=NodeTask(fields.choice("task", [str(task) for task in NodeTask], default="serve")),
            linger_seconds=fields.integer("linger_milliseconds", max_value=1000 * MAX_LINGER_SECONDS, default=250)
            / 1000,
            must_reconnect=bool(fields.integer("dial_anew", max_value=1, default=0)),
        )
        fields.check_no_fields_left()
        return wake


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """State of an instance, which it sends in its greeting, its answers and its result.

    Attributes:
        instance: Random id of the instance, 16 hexadecimal digits.
        version: Version of its shard store.
        held_bytes: Bytes in its shard store.
        limit_bytes: Limit of its shard store, in bytes.
    """

    instance: str
    version: StoreVersion
    held_bytes: int
    limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; the 64-bit hash as text, because JSON numbers are not that precise."""
        return {
            "instance": self.instance,
            "term": self.version.change_count,
            "hash": f"{self.version.hash:016x}",
            "held_bytes": self.held_bytes,
            "limit_bytes": self.limit_bytes,
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> NodeReport:
        """Parse a report.

        Raises:
            WireError: A field is missing, unknown or invalid; the message names it.
        """
        try:
            fields = JsonFields(value, "report of a warm node")
            report = cls(
                instance=fields.text("instance", pattern=_INSTANCE),
                version=StoreVersion(fields.integer("term"), int(fields.text("hash", pattern="[0-9a-f]{16}"), 16)),
                held_bytes=fields.integer("held_bytes", max_value=_MAX_BYTES),
                limit_bytes=fields.integer("limit_bytes", max_value=_MAX_BYTES),
            )
            fields.check_no_fields_left()
        except EventError as error:
            raise WireError(str(error)) from None
        return report
