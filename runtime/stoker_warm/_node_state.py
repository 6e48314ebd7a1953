"""State machine of one node, in the proxy: whether the proxy can send requests, or must ping or call the node first.

A node is a function, which does not accept connections. A call starts or resumes one of its **instances**, which
connects to the proxy and greets with the version of its contents, so the proxy knows which shards it still holds (A.
Wang et al., "InfiniCache" (FAST 2020), sections 3.3 and 3.4: states sleeping, active and maybe, a ping before a
request, another call if it fails; J. Zhang et al., "InfiniStore" (PVLDB 16, 2023): versions detect lost memory).

A call changes no state; it is only counted. A rejected event changes nothing: its source is not the node. If a platform
is called while an instance runs, it starts another one, which must not be taken for the node: as long as the known
instance runs or may run, another one with other contents is rejected. So one late answer loses no contents. If the
known instance sleeps, a call should have resumed it if it still existed, so another instance is the node then, and the
contents that it does not hold are lost. But the platform may choose another instance nevertheless. An empty other
instance is therefore accepted at once only if the connection of the known one has broken. Otherwise the function is
called once more while the other instance runs, so that the platform can only choose the known one, if it exists; the
instance that greets then is the node. A needless call costs a few hundredths of filling a node again.

The caller drops messages of instances other than the known one, and those on a broken connection.

Each wrong shard of an instance is counted; correct shards do not reset the count. At the maximum, the node becomes
GONE. If the same instance greets again, its list of shards is not trusted, and the next wrong shard makes the node GONE
again; another instance starts with a count of 0.
"""

from __future__ import annotations

import enum
import math

from stoker.errors import ConfigError, StateError
from stoker_warm._shard import StoreVersion


class NodeState(enum.Enum):
    """State of a node, as the proxy knows it.

    Attributes:
        SLEEPING: No instance runs, or none has connected yet; calls may be open.
        AWAKE: Its instance is connected, and no timeout has passed since its last message.
        MAYBE: It was awake, but its connection broke or it does not answer; it may still run and hold its contents.
        GONE: Too many attempts failed; its contents count as lost. It returns when an instance greets.
    """

    SLEEPING = "sleeping"
    AWAKE = "awake"
    MAYBE = "maybe"
    GONE = "gone"


class NodeEvent(enum.Enum):
    """Event in the life of a node."""

    GREETED = "the known instance connected, or another one with the expected contents"
    GREETED_OTHER = "another instance connected, with other contents or none"
    GREETED_EMPTY = "another, empty instance connected, while the known one, which is not empty, may still exist"
    MESSAGE = "the known instance answered, or sent that it was invoked again"
    LEAVING = "the known instance is about to return"
    DISCONNECTED = "the connection to the known instance broke"
    TIMED_OUT = "a timeout passed without a message of the known instance"
    CALLS_ENDED = "the last open call ended, successfully or not"
    ATTEMPTS_EXHAUSTED = "the maximum number of attempts has failed"
    NOTHING_DELIVERED = "the maximum number of requests for shards brought no shard, even if it answers pings"
    WRONG_SHARDS = "it sent the maximum number of wrong shards"


_SLEEPING, _AWAKE, _MAYBE, _GONE = NodeState

TRANSITIONS: dict[tuple[NodeState, NodeEvent], NodeState | None] = {
    (state, event): after
    for event, row in {
        NodeEvent.GREETED: (_AWAKE, _AWAKE, _AWAKE, _AWAKE),
        NodeEvent.GREETED_OTHER: (_AWAKE, None, None, _AWAKE),
        NodeEvent.GREETED_EMPTY: (_SLEEPING, None, None, None),
        NodeEvent.MESSAGE: (_AWAKE, _AWAKE, _AWAKE, None),
        NodeEvent.LEAVING: (_SLEEPING, _SLEEPING, _SLEEPING, None),
        NodeEvent.DISCONNECTED: (_SLEEPING, _MAYBE, _MAYBE, None),
        NodeEvent.TIMED_OUT: (_SLEEPING, _MAYBE, _MAYBE, _GONE),
        NodeEvent.CALLS_ENDED: (_SLEEPING, _SLEEPING, _SLEEPING, _GONE),
        NodeEvent.ATTEMPTS_EXHAUSTED: (_GONE, None, _GONE, _GONE),
        NodeEvent.NOTHING_DELIVERED: (None, _GONE, _GONE, None),
        NodeEvent.WRONG_SHARDS: (_GONE, _GONE, _GONE, None),
    }.items()
    for state, after in zip(NodeState, row, strict=True)
}
"""State and event → next state; None rejects the event."""


class NodeContents(enum.Enum):
    """Contents of a node that has greeted."""

    EXPECTED = "the shards that the directory has for it"
    UNKNOWN = "other shards; request the list of shards, and replace the node's contents by it"
    NONE = "nothing; the shards that the directory has for it are lost"
    DOUBTFUL = "nothing, but this may not be the node"
    """Disconnect the known instance, call the function while this one runs, and accept the instance that greets."""


class NodeStateMachine:
    """State machine of one node. It does no I/O and never waits; times are those of the caller's clock, in seconds.

    Invariants: AWAKE has a connection, GONE has none. ``expected_version`` is the version that the known instance last
    reported; without a known instance it is the version of an empty store.

    Args:
        fresh_seconds: Time after its last message in which a node counts as awake without a ping.
        max_attempts: Maximum number of consecutive failed attempts, and of wrong shards, at which the node is GONE.
    """

    def __init__(self, *, fresh_seconds: float = 1.0, max_attempts: int = 3) -> None:
        if not 0 <= fresh_seconds < math.inf or max_attempts < 1:
            raise ConfigError(
                f"fresh_seconds must be at least 0 and tries at least 1, not {fresh_seconds} and {max_attempts}"
            )
        self._fresh_seconds, self._max_attempts = fresh_seconds, max_attempts
        self.state = NodeState.SLEEPING
        self.instance: str | None = None
        """Id of the known instance; messages of other instances are ignored."""
        self.is_connected = False
        self.expected_version = StoreVersion()
        """Version of the known instance's contents."""
        self.has_shard_list = True
        """Whether the directory has exactly the shards of version ``expected_version``.

        Set it when the known instance has listed its shards. Unset it when the outcome of a write or deletion is
        unknown: the next version that the instance reports includes it, so comparing versions would not detect it.
        """
        self.calls = 0
        """Number of open calls."""
        self.failed_attempts = 0
        """Number of failed attempts since its last message."""
        self.last_message_seconds = -math.inf
        """Time of its last message."""
        self._has_call_message = True
        self._is_waiting_for_call = False
        self._shard_timeouts, self._wrong_shards = dict[str | None, int](), dict[str | None, int]()

    def can_send(self, now_seconds: float) -> bool:
        """Return whether requests can be sent at once."""
        return self.state is NodeState.AWAKE and now_seconds - self.last_message_seconds <= self._fresh_seconds

    @property
    def must_invoke(self) -> bool:
        """Whether the node must be called before requests can be sent.

        False while an open call may still bring a message, because a second call would start a second instance: wait
        for a greeting, a message, the end of the call or a timeout, whichever is first. False if the node is GONE, too:
        readers do not wait for such a node, but a heartbeat call may bring it back.
        """
        return self.state in (NodeState.SLEEPING, NodeState.MAYBE) and not self._is_waiting_for_call

    def on_call_started(self) -> None:
        """Record that a call has started."""
        self.calls += 1
        self._has_call_message, self._is_waiting_for_call = False, True

    def on_greeting(self, instance: str, version: StoreVersion, now_seconds: float) -> NodeContents | None:
        """Record the greeting of an authenticated instance, which replaces an earlier connection.

        Returns:
            Contents of the node; None if the instance is not the node, and should be stopped.
        """
        is_expected = version == self.expected_version
        if is_expected or instance == self.instance:
            event = NodeEvent.GREETED
        else:
            is_claim = version == StoreVersion() and self.is_connected and self.expected_version.hash
            event = NodeEvent.GREETED_EMPTY if is_claim else NodeEvent.GREETED_OTHER
        if not self._advance(event):
            return None
        if event is NodeEvent.GREETED_EMPTY:
            self.is_connected = self._is_waiting_for_call = False
            return NodeContents.DOUBTFUL
        self.instance, self.is_connected, self.expected_version = instance, True, version
        self._record_message(now_seconds)
        if version == StoreVersion():
            contents = NodeContents.EXPECTED if is_expected else NodeContents.NONE
        else:
            contents = NodeContents.EXPECTED if is_expected and self.has_shard_list else NodeContents.UNKNOWN
        self.has_shard_list = contents is not NodeContents.UNKNOWN
        return contents

    def on_message(self, instance: str, now_seconds: float) -> bool:
        """Record that an instance has answered or was invoked again; return whether it is the known one."""
        return self._apply_message(instance, NodeEvent.MESSAGE, now_seconds)

    def on_change(self, instance: str, version: StoreVersion) -> None:
        """Record the version that an instance reports after its contents have changed."""
        if self._is_known_instance(instance):
            self.expected_version = version

    def on_leaving(self, instance: str, now_seconds: float) -> bool:
        """Record that an instance is about to return; return whether it is the known one."""
        return self._apply_message(instance, NodeEvent.LEAVING, now_seconds)

    def on_disconnected(self, instance: str) -> bool:
        """Record that the connection to an instance broke; return whether it is the known one."""
        if not self._is_known_instance(instance) or not self._advance(NodeEvent.DISCONNECTED):
            return False
        self.is_connected = False
        return True

    def on_timeout(self) -> bool:
        """Record that a ping, a request or a call has brought no message before its timeout.

        Returns:
            Whether this makes the node GONE: its contents are lost, and the caller must close its connection.
        """
        self._is_waiting_for_call = False
        self._advance(NodeEvent.TIMED_OUT)
        return self._count_failed_attempt()

    def on_shard_answer(self) -> None:
        """Record that the known instance has answered a request for a shard."""
        self._shard_timeouts.clear()

    def on_shard_timeout(self) -> bool:
        """Record a timeout without a shard, even if the instance answers pings; returns as :meth:`on_timeout`.

        If an instance became GONE by this and greets again, its next such timeout suffices, until it delivers a shard.
        """
        self._shard_timeouts = _increment_count(self._shard_timeouts, self.instance)
        is_its_last = self._shard_timeouts[self.instance] >= self._max_attempts
        return is_its_last and self._advance(NodeEvent.NOTHING_DELIVERED) and self._reset()

    def on_wrong_shard(self, instance: str) -> bool:
        """Record a wrong shard of an instance, if it is the known one; returns as :meth:`on_timeout`."""
        if instance != self.instance:
            return False
        self._wrong_shards = _increment_count(self._wrong_shards, instance)
        return self.is_distrusted and self._advance(NodeEvent.WRONG_SHARDS) and self._reset()

    @property
    def is_distrusted(self) -> bool:
        """Whether the known instance has sent too many wrong shards, so that its list of shards is not trusted."""
        return self._wrong_shards.get(self.instance, 0) >= self._max_attempts

    def on_call_returned(self) -> bool:
        """Record that a call returned; without a message, it is a failed attempt. Returns as :meth:`on_timeout`."""
        return self._end_call(is_failed_attempt=not self._has_call_message and self.calls == 1)

    def on_call_failed(self) -> bool:
        """Record that a call failed, or may have failed; returns as :meth:`on_timeout`."""
        return self._end_call(is_failed_attempt=True)

    def on_call_throttled(self) -> None:
        """Record that the platform throttled a call, which is no failed attempt of the node."""
        self._end_call(is_failed_attempt=False)

    def _end_call(self, *, is_failed_attempt: bool) -> bool:
        if not self.calls:
            raise StateError("a call of a node has ended, but none is open")
        self.calls -= 1
        if not self.calls:
            self._is_waiting_for_call = False
            self._advance(NodeEvent.CALLS_ENDED)
        # The failure of another call does not concern an instance that is awake.
        return is_failed_attempt and self.state is not NodeState.AWAKE and self._count_failed_attempt()

    def _count_failed_attempt(self) -> bool:
        self.failed_attempts += 1
        if self.failed_attempts < self._max_attempts or self.state is NodeState.GONE:
            return False
        return self._advance(NodeEvent.ATTEMPTS_EXHAUSTED) and self._reset()

    def _reset(self) -> bool:
        self.instance, self.is_connected, self.expected_version, self.has_shard_list = None, False, StoreVersion(), True
        return True

    def _apply_message(self, instance: str, event: NodeEvent, now_seconds: float) -> bool:
        is_its_word = self._is_known_instance(instance) and self._advance(event)
        if is_its_word:
            self._record_message(now_seconds)
        return is_its_word

    def _is_known_instance(self, instance: str) -> bool:
        return self.is_connected and instance == self.instance

    def _record_message(self, now_seconds: float) -> None:
        self.last_message_seconds, self.failed_attempts, self._has_call_message = now_seconds, 0, True
        self._is_waiting_for_call = self.calls > 0

    def _advance(self, event: NodeEvent) -> bool:
        after = TRANSITIONS[self.state, event]
        if after is None:
            return False
        self.state = after
        return True

    def __repr__(self) -> str:
        connected = "connected" if self.is_connected else "not connected"
        state = f"{self.state.value}, instance {self.instance}, {connected}, term {self.expected_version.change_count}"
        return f"<Membership {state}, {self.calls} calls, {self.failed_attempts} tries>"


def _increment_count(counts: dict[str | None, int], instance: str | None) -> dict[str | None, int]:
    """Return the count of an instance, increased by one; the counts of other instances are dropped."""
    return {instance: counts.get(instance, 0) + 1}
