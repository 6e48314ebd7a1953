"""A faulty node: its answers are wrong, unrequested, forbidden or missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.errors import StoreError
from stoker_warm._events import NodeReport, WakeEvent
from stoker_warm._frames import Head, Kind
from stoker_warm._node import NodeServer
from stoker_warm._peer_connections import ReplyParts
from stoker_warm._shard import Shard, ShardId
from support.warm_wires import End

__all__ = ["NODE_FAULTS", "FaultyNode", "forge"]

NODE_FAULTS = (
    "bytes", "forged", "mac", "other shard", "short", "long", "missing", "failed", "other kind", "digest",
    "lists too much", "lists for ever", "lists nonsense", "evicts all", "evicts nonsense", "refuses", "forgets",
    "says bye", "is another", "is silent",
)  # fmt: skip


_POLYNOMIAL = (0x82F63B78 << 1 | 1).to_bytes(5, "little")
"""Polynomial of CRC-32C in reversed bit order: the lowest bit of each byte first."""


def forge(payload: bytearray | memoryview, start: int = 0) -> None:
    """Change five bytes without a change to any CRC-32C that covers them: the shard's, and its object's."""
    for at, bits in enumerate(_POLYNOMIAL[: len(payload) - start]):
        payload[start + at] ^= bits


class FaultyNode(NodeServer):
    """A node with a fault, or without one.

    Attributes:
        lie: kind of the fault; none if empty.
        instead: function that returns the shard to answer with, for the fault "instead".
    """

    fault = ""
    instead: Callable[[ShardId], Shard | None]

    @property
    def report(self) -> NodeReport:
        report = super().report
        if self.fault == "digest":
            digest = report.version._replace(hash=report.version.hash ^ 1)
            return NodeReport(
                instance=report.instance,
                version=digest,
                held_bytes=report.held_bytes,
                limit_bytes=report.limit_bytes,
            )
        return report

    async def run(self, wake: WakeEvent, available_seconds: float) -> dict[str, Any]:
        if self.fault == "is another":
            wake = WakeEvent.parse({**wake.to_event(), "node": "warm-0"})
        return await super().run(wake, available_seconds)

    def _handle_request(self, kind: Kind, head: Head, body: bytearray) -> ReplyParts:
        if self.fault == "is silent" and kind is not Kind.PING and self._connection is not None:
            end = self._connection._transport
            assert isinstance(end, End)
            end.freeze()  # until it is called again
        if self.fault == "failed":
            raise StoreError("no")
        if self.fault == "says bye" and self._connection is not None and self._connection.is_open:
            self._connection.notify(Kind.LEAVING, self.report.to_json())
        answer = super()._handle_request(kind, head, body)
        return self._falsify(answer, head) if self.fault else answer

    def _falsify(self, answer: ReplyParts, head: Head) -> ReplyParts:
        kind, said, parts = answer
        if kind is Kind.FOUND:
            return self._found(answer, head)
        if kind is Kind.LISTED:
            shards = said["shards"]
            assert isinstance(shards, list)
            if self.fault == "lists nonsense":
                return kind, {"shards": ["x", 1], "more": 1}, ()
            if self.fault == "lists for ever" and shards:
                return kind, {"shards": shards, "more": 1}, ()
            if self.fault == "lists too much" and shards:
                claimed = {ShardId.parse(each) for each in shards}
                claimed |= {ShardId(each.object, each.data, each.parity, 0) for each in claimed}
                return kind, {"shards": [each.to_text() for each in sorted(claimed)], "more": 0}, ()
        if kind is Kind.STORED and "evicted" in said:
            if self.fault == "forgets":
                for shard in self._store.list_ids():
                    self._store.delete(shard)
            if self.fault == "refuses":
                return Kind.REFUSED, {"reason": "too large"}, ()
            if self.fault == "evicts all":
                return kind, {**said, "evicted": [each.to_text() for each in self._store.list_ids()]}, ()
            if self.fault == "evicts nonsense":
                return kind, {**said, "evicted": [1, {}] if len(self._store) % 2 else 7}, ()
        return kind, said, parts

    def _found(self, answer: ReplyParts, head: Head) -> ReplyParts:
        kind, said, parts = answer
        payload = bytearray(b"".join(parts))
        if self.fault == "bytes" and payload:
            payload[-1] ^= 1
        elif self.fault == "forged":
            forge(payload)
        elif self.fault == "instead":
            other = self.instead(ShardId.parse(head["shard"]))
            if other is not None:
                payload, said = bytearray(other.payload), {"mac": other.mac}
        elif self.fault == "long":
            payload += b"x"
        elif self.fault == "short":
            del payload[len(payload) // 2 :]
        elif self.fault == "mac":
            mac = said["mac"]
            assert isinstance(mac, str)
            said = {"mac": mac[:-1] + ("0" if mac[-1] != "0" else "1")}
        elif self.fault == "missing":
            return Kind.MISSING, {}, ()
        elif self.fault == "other kind":
            return Kind.LISTED, {"shards": [], "more": 0}, ()
        elif self.fault == "other shard":
            wanted = ShardId.parse(head["shard"])
            others = [
                each for each in self._store.list_ids() if each.size_bytes == wanted.size_bytes and each != wanted
            ]
            if others and (found := self._store.get(others[0])) is not None:
                payload, said = bytearray(found.payload), {"mac": found.mac}
        return kind, said, (payload,)
