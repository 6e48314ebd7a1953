"""What an invocation of a node asks, and what it returns: the events of the warm tier's functions."""

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
    """What for."""

    SERVE = "serve"
    """Be there for requests until there are none."""
    WARM = "warm"
    """Return at once: this keeps the instance, and tells what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeEvent:
    """An invocation's event.

    Attributes:
        node: name of the node that is invoked.
        proxy: where the proxy listens, ``host:port``.
        fingerprint: of the proxy's certificate; empty without TLS.
        task: what for.
        linger_seconds: how long to stay when nothing is asked.
        must_reconnect: whether to give up a connection from before: the proxy hears nothing on it.
    """

    node: str
    proxy: str
    fingerprint: str = ""
    task: NodeTask = NodeTask.SERVE
    linger_seconds: float = 0.25
    must_reconnect: bool = False

    def to_event(self) -> dict[str, Any]:
        """Return the event, as JSON values."""
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
        """Return what an event asks.

        Raises:
            EventError: it is none of ours; names the field.
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
    """What an instance says of itself: when it greets, and when it returns.

    Attributes:
        instance: which one it is, drawn when its process began.
        version: of its shard store.
        held_bytes: in it.
        limit_bytes: of it.
    """

    instance: str
    version: StoreVersion
    held_bytes: int
    limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; the hash as a text, for it is larger than numbers of JSON may be."""
        return {
            "instance": self.instance,
            "term": self.version.change_count,
            "hash": f"{self.version.hash:016x}",
            "held_bytes": self.held_bytes,
            "limit_bytes": self.limit_bytes,
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> NodeReport:
        """Return what was said.

        Raises:
            WireError: it is not what an instance says of itself.
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
