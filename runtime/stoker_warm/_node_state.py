"""State machine of one node, as the proxy knows it: may it be sent to, must it be asked, or be called first?

A node is a function: nobody can connect to it. A call starts or thaws one of its **instances**, which dials out to the
proxy and greets with the version of its contents, so the proxy knows what it still holds (A. Wang et al., "InfiniCache"
(FAST 2020), sections 3.3 and 3.4: sleeping, active and maybe, a ping before a request, another call if it is not
answered; J. Zhang et al., "InfiniStore" (PVLDB 16, 2023): the expected state is compared, so that lost memory is
noticed).

A call changes no state: it is only counted. A refused event changes nothing: its source is not the node. A platform
that is called while an instance runs starts another one, and that must not pass for the node: as long as the known
instance is or may be running, another one with other contents is refused. So one late answer costs nothing of what the
node holds. When the known instance sleeps, a call should have woken it if it still were there, so then a stranger is
the node and what it does not hold is lost. But a platform may take another instance all the same. A stranger that holds
nothing is therefore believed at once only if the connection of the known one has broken. Otherwise the function is
called once more while the stranger runs, which leaves the platform the known one, if there is one; the instance that
greets then is the node. A call too many, with its cold start, costs some hundredths of moving what a full node held.

Messages of an instance other than the known one, or on a broken connection, are dropped before they get here.

An instance that answers with wrong shards gets a strike for each, which no right ones make up for. At the last one the
node is given up. When that instance greets again, nothing of what it lists is believed, and one more strike gives it up
again; with another instance the node begins anew.
"""

from __future__ import annotations

import enum
import math

from stoker.errors import ConfigError, StateError
from stoker_warm._shard import StoreVersion


class NodeState(enum.Enum):
    """What the proxy knows of a node.

    Attributes:
        SLEEPING: nothing of it runs, or not yet: calls may be under way.
        AWAKE: its instance is connected, and has not been silent since it spoke.
        MAYBE: it was awake, and its connection broke or it does not answer; it may still run and hold what it held.
        GONE: it was tried too often; what it held is lost. It comes back by greeting.
    """

    SLEEPING = "sleeping"
    AWAKE = "awake"
    MAYBE = "maybe"
    GONE = "gone"


class NodeEvent(enum.Enum):
    """What happens to a node."""

    GREETED = "an instance connected that is the known one or has the contents that are expected"
    GREETED_OTHER = "another instance connected, with other contents or none"
    GREETED_EMPTY = "another instance connected that holds nothing, and the known one, which does, may still be there"
    MESSAGE = "the known instance answered, or said that it was woken"
    LEAVING = "the known instance is about to return"
    DISCONNECTED = "the connection to the known instance broke"
    TIMED_OUT = "a deadline passed without a message of it"
    CALLS_ENDED = "the last call that was open ended, well or not"
    ATTEMPTS_EXHAUSTED = "it was tried as often as is sensible"
    NOTHING_DELIVERED = "it was asked for shards as often, and delivered none, whatever else it answers"
    WRONG_SHARDS = "it answered with wrong shards as often"


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
"""Every state with every event → the state after it; None is a refusal."""


class NodeContents(enum.Enum):
    """What a node that has greeted holds."""

    EXPECTED = "what it is believed to hold"
    UNKNOWN = "something else; ask for a list, and believe nothing that is not on it"
    NONE = "nothing; what it was believed to hold is lost"
    DOUBTFUL = "nothing, but this may not be the node"
    """Close the connection of the known instance, call the function once more while this one runs, and believe the
    instance that greets then."""


class NodeStateMachine:
    """One node's state. It decides and never waits; times are those of the caller's clock, in seconds.

    Invariants: AWAKE has a connection, GONE has none. ``expected_version`` is what the known instance last said that it
        holds;
    with no known instance it is the version of nothing.

    Args:
        fresh_seconds: after its last message, in which a node is believed to be awake without being asked.
        max_attempts: failed attempts in a row, without a message in between, after which it is given up; wrong shards,
            too.
    """

    def __init__(self, *, fresh_seconds: float = 1.0, max_attempts: int = 3) -> None:
        if not 0 <= fresh_seconds < math.inf or max_attempts < 1:
            raise ConfigError(
                f"a node needs fresh_seconds from 0 and tries from 1, not {fresh_seconds} and {max_attempts}"
            )
        self._fresh_seconds, self._max_attempts = fresh_seconds, max_attempts
        self.state = NodeState.SLEEPING
        self.instance: str | None = None
        """The known instance: the messages of others are ignored."""
        self.is_connected = False
        self.expected_version = StoreVersion()
        """What the known instance holds."""
        self.has_shard_list = True
        """Whether the shards behind ``expected_version`` are known one by one.

        Set it when the known instance has listed them; unset it when that was sent shards or deletions, and whether it
        has carried them out is not known: its next word on a change covers these, too, so versions would not tell.
        """
        self.calls = 0
        """Calls that have not ended."""
        self.failed_attempts = 0
        """Failed attempts since its last word."""
        self.last_message_seconds = -math.inf
        """When its last word came."""
        self._has_call_message = True
        self._is_waiting_for_call = False
        self._shard_timeouts, self._wrong_shards = dict[str | None, int](), dict[str | None, int]()

    def can_send(self, now_seconds: float) -> bool:
        """Return whether requests can go out at once."""
        return self.state is NodeState.AWAKE and now_seconds - self.last_message_seconds <= self._fresh_seconds

    @property
    def must_invoke(self) -> bool:
        """Whether it is to be called before it can be used.

        Not while a call is open that may yet bring a message: a second one would start a second instance. Wait for a
        greeting, a message, the end of the call or a deadline, whichever is first. Not when it is GONE either: readers
        do not wait for such a node; a call that is due to keep it warm may bring it back.
        """
        return self.state in (NodeState.SLEEPING, NodeState.MAYBE) and not self._is_waiting_for_call

    def on_call_started(self) -> None:
        """A call was sent off."""
        self.calls += 1
        self._has_call_message, self._is_waiting_for_call = False, True

    def on_greeting(self, instance: str, version: StoreVersion, now_seconds: float) -> NodeContents | None:
        """An instance has connected and is authenticated.

        It takes the place of a connection that there was.

        Returns:
            What to think of the contents; None if it is not the node: tell it to stop.
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
        """An instance has answered, or says that it was woken; return whether it is the node's."""
        return self._apply_message(instance, NodeEvent.MESSAGE, now_seconds)

    def on_change(self, instance: str, version: StoreVersion) -> None:
        """The known instance has put shards away or let them go, and says what it holds now."""
        if self._is_known_instance(instance):
            self.expected_version = version

    def on_leaving(self, instance: str, now_seconds: float) -> bool:
        """An instance is about to return; return whether it is the node's."""
        return self._apply_message(instance, NodeEvent.LEAVING, now_seconds)

    def on_disconnected(self, instance: str) -> bool:
        """The connection to an instance broke; return whether it is the node's."""
        if not self._is_known_instance(instance) or not self._advance(NodeEvent.DISCONNECTED):
            return False
        self.is_connected = False
        return True

    def on_timeout(self) -> bool:
        """A ping, a request or a call has brought no message by its deadline.

        Returns:
            Whether the node is given up by this: what it held is lost, and its connection is to be closed.
        """
        self._is_waiting_for_call = False
        self._advance(NodeEvent.TIMED_OUT)
        return self._count_failed_attempt()

    def on_shard_answer(self) -> None:
        """The known instance has answered what it was asked for a shard."""
        self._shard_timeouts.clear()

    def on_shard_timeout(self) -> bool:
        """A deadline passed without a shard, though the instance may answer pings; return as :meth:`on_timeout` does.

        An instance that was given up for that, and greets, is given up at the next one already, until it has delivered.
        """
        self._shard_timeouts = _increment_count(self._shard_timeouts, self.instance)
        is_its_last = self._shard_timeouts[self.instance] >= self._max_attempts
        return is_its_last and self._advance(NodeEvent.NOTHING_DELIVERED) and self._reset()

    def on_wrong_shard(self, instance: str) -> bool:
        """The known instance has answered with a wrong shard; return as :meth:`on_timeout` does."""
        if instance != self.instance:
            return False
        self._wrong_shards = _increment_count(self._wrong_shards, instance)
        return self.is_distrusted and self._advance(NodeEvent.WRONG_SHARDS) and self._reset()

    @property
    def is_distrusted(self) -> bool:
        """Whether the known instance was given up for wrong shards, so that nothing of what it lists is believed."""
        return self._wrong_shards.get(self.instance, 0) >= self._max_attempts

    def on_call_returned(self) -> bool:
        """A call ended well; return as :meth:`on_timeout` does. One that brought no message was a try."""
        return self._end_call(is_failed_attempt=not self._has_call_message and self.calls == 1)

    def on_call_failed(self) -> bool:
        """A call ended with an error, or may have; return as :meth:`on_timeout` does."""
        return self._end_call(is_failed_attempt=True)

    def on_call_throttled(self) -> None:
        """A call was not carried out, since the platform runs too many: no fault of the node."""
        self._end_call(is_failed_attempt=False)

    def _end_call(self, *, is_failed_attempt: bool) -> bool:
        if not self.calls:
            raise StateError("a node's call has ended that was not under way")
        self.calls -= 1
        if not self.calls:
            self._is_waiting_for_call = False
            self._advance(NodeEvent.CALLS_ENDED)
        # An instance that is awake is not concerned by a call that failed beside it.
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
    """Return how often an instance has offended, this time included; with another one the count begins anew."""
    return {instance: counts.get(instance, 0) + 1}
