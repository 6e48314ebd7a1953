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
from stoker_warm._shard import Version


class State(enum.Enum):
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


class Event(enum.Enum):
    """What happens to a node."""

    GREETED = "an instance connected that is the known one or has the contents that are expected"
    GREETED_OTHER = "another instance connected, with other contents or none"
    CLAIMED = "another instance connected that holds nothing, and the known one, which does, may still be there"
    HEARD = "the known instance answered, or said that it was woken"
    BYE = "the known instance is about to return"
    LOST = "the connection to the known instance broke"
    SILENT = "a deadline passed without a message of it"
    RETURNED = "the last call that was open ended, well or not"
    GIVEN_UP = "it was tried as often as is sensible"
    MUTE = "it was asked for shards as often, and delivered none, whatever else it answers"
    LIED = "it answered with wrong shards as often"


_SLEEPING, _AWAKE, _MAYBE, _GONE = State

TRANSITIONS: dict[tuple[State, Event], State | None] = {
    (state, event): after
    for event, row in {
        Event.GREETED: (_AWAKE, _AWAKE, _AWAKE, _AWAKE),
        Event.GREETED_OTHER: (_AWAKE, None, None, _AWAKE),
        Event.CLAIMED: (_SLEEPING, None, None, None),
        Event.HEARD: (_AWAKE, _AWAKE, _AWAKE, None),
        Event.BYE: (_SLEEPING, _SLEEPING, _SLEEPING, None),
        Event.LOST: (_SLEEPING, _MAYBE, _MAYBE, None),
        Event.SILENT: (_SLEEPING, _MAYBE, _MAYBE, _GONE),
        Event.RETURNED: (_SLEEPING, _SLEEPING, _SLEEPING, _GONE),
        Event.GIVEN_UP: (_GONE, None, _GONE, _GONE),
        Event.MUTE: (None, _GONE, _GONE, None),
        Event.LIED: (_GONE, _GONE, _GONE, None),
    }.items()
    for state, after in zip(State, row, strict=True)
}
"""Every state with every event → the state after it; None is a refusal."""


class Contents(enum.Enum):
    """What a node that has greeted holds."""

    EXPECTED = "what it is believed to hold"
    UNKNOWN = "something else; ask for a list, and believe nothing that is not on it"
    NONE = "nothing; what it was believed to hold is lost"
    DOUBTFUL = "nothing, but this may not be the node"
    """Close the connection of the known instance, call the function once more while this one runs, and believe the
    instance that greets then."""


class Membership:
    """One node's state. It decides and never waits; times are those of the caller's clock, in seconds.

    Invariants: AWAKE has a connection, GONE has none. ``expected`` is what the known instance last said that it holds;
    with no known instance it is the version of nothing.

    Args:
        fresh_seconds: after its last message, in which a node is believed to be awake without being asked.
        tries: failed attempts in a row, without a message in between, after which it is given up; wrong shards, too.
    """

    def __init__(self, *, fresh_seconds: float = 1.0, tries: int = 3) -> None:
        if not 0 <= fresh_seconds < math.inf or tries < 1:
            raise ConfigError(f"a node needs fresh_seconds from 0 and tries from 1, not {fresh_seconds} and {tries}")
        self._fresh_seconds, self._most_tries = fresh_seconds, tries
        self.state = State.SLEEPING
        self.instance: str | None = None
        """The known instance: the messages of others are ignored."""
        self.is_connected = False
        self.expected = Version()
        """What the known instance holds."""
        self.is_listed = True
        """Whether the shards behind ``expected`` are known one by one.

        Set it when the known instance has listed them; unset it when that was sent shards or deletions, and whether it
        has carried them out is not known: its next word on a change covers these, too, so versions would not tell.
        """
        self.calls = 0
        """Calls that have not ended."""
        self.tries = 0
        """Failed attempts since its last word."""
        self.heard_seconds = -math.inf
        """When its last word came."""
        self._is_answered = True
        self._is_patient = False
        self._undelivered, self._strikes = dict[str | None, int](), dict[str | None, int]()

    def may_send(self, now_seconds: float) -> bool:
        """Return whether requests can go out at once."""
        return self.state is State.AWAKE and now_seconds - self.heard_seconds <= self._fresh_seconds

    @property
    def must_invoke(self) -> bool:
        """Whether it is to be called before it can be used.

        Not while a call is open that may yet bring a message: a second one would start a second instance. Wait for a
        greeting, a message, the end of the call or a deadline, whichever is first. Not when it is GONE either: readers
        do not wait for such a node; a call that is due to keep it warm may bring it back.
        """
        return self.state in (State.SLEEPING, State.MAYBE) and not self._is_patient

    def invoked(self) -> None:
        """A call was sent off."""
        self.calls += 1
        self._is_answered, self._is_patient = False, True

    def greeted(self, instance: str, version: Version, now_seconds: float) -> Contents | None:
        """An instance has connected and is authenticated.

        It takes the place of a connection that there was.

        Returns:
            What to think of the contents; None if it is not the node: tell it to stop.
        """
        is_expected = version == self.expected
        if is_expected or instance == self.instance:
            event = Event.GREETED
        else:
            is_claim = version == Version() and self.is_connected and self.expected.hash
            event = Event.CLAIMED if is_claim else Event.GREETED_OTHER
        if not self._advance(event):
            return None
        if event is Event.CLAIMED:
            self.is_connected = self._is_patient = False
            return Contents.DOUBTFUL
        self.instance, self.is_connected, self.expected = instance, True, version
        self._hear(now_seconds)
        if version == Version():
            contents = Contents.EXPECTED if is_expected else Contents.NONE
        else:
            contents = Contents.EXPECTED if is_expected and self.is_listed else Contents.UNKNOWN
        self.is_listed = contents is not Contents.UNKNOWN
        return contents

    def heard(self, instance: str, now_seconds: float) -> bool:
        """An instance has answered, or says that it was woken; return whether it is the node's."""
        return self._spoke(instance, Event.HEARD, now_seconds)

    def changed(self, instance: str, version: Version) -> None:
        """The known instance has put shards away or let them go, and says what it holds now."""
        if self._is_known(instance):
            self.expected = version

    def said_bye(self, instance: str, now_seconds: float) -> bool:
        """An instance is about to return; return whether it is the node's."""
        return self._spoke(instance, Event.BYE, now_seconds)

    def lost(self, instance: str) -> bool:
        """The connection to an instance broke; return whether it is the node's."""
        if not self._is_known(instance) or not self._advance(Event.LOST):
            return False
        self.is_connected = False
        return True

    def silent(self) -> bool:
        """A ping, a request or a call has brought no message by its deadline.

        Returns:
            Whether the node is given up by this: what it held is lost, and its connection is to be closed.
        """
        self._is_patient = False
        self._advance(Event.SILENT)
        return self._count_try()

    def delivered(self) -> None:
        """The known instance has answered what it was asked for a shard."""
        self._undelivered.clear()

    def undelivered(self) -> bool:
        """A deadline passed with no shard of the known instance, which may answer pings; return as :meth:`silent` does.

        An instance that was given up for that, and greets, is given up at the next one already, until it has delivered.
        """
        self._undelivered = _with_one_more(self._undelivered, self.instance)
        is_its_last = self._undelivered[self.instance] >= self._most_tries
        return is_its_last and self._advance(Event.MUTE) and self._forget()

    def lied(self, instance: str) -> bool:
        """An instance has answered with a wrong shard; return as :meth:`silent` does. Not if it is not the node's."""
        if instance != self.instance:
            return False
        self._strikes = _with_one_more(self._strikes, instance)
        return self.is_distrusted and self._advance(Event.LIED) and self._forget()

    @property
    def is_distrusted(self) -> bool:
        """Whether the known instance was given up for wrong shards, so that nothing of what it lists is believed."""
        return self._strikes.get(self.instance, 0) >= self._most_tries

    def returned(self) -> bool:
        """A call ended well; return as :meth:`silent` does. One that brought no message was a try."""
        return self._end_call(is_try=not self._is_answered and self.calls == 1)

    def failed(self) -> bool:
        """A call ended with an error, or may have; return as :meth:`silent` does."""
        return self._end_call(is_try=True)

    def throttled(self) -> None:
        """A call was not carried out, since the platform runs too many: no fault of the node."""
        self._end_call(is_try=False)

    def _end_call(self, *, is_try: bool) -> bool:
        if not self.calls:
            raise StateError("a node's call has ended that was not under way")
        self.calls -= 1
        if not self.calls:
            self._is_patient = False
            self._advance(Event.RETURNED)
        # An instance that is awake is not concerned by a call that failed beside it.
        return is_try and self.state is not State.AWAKE and self._count_try()

    def _count_try(self) -> bool:
        self.tries += 1
        if self.tries < self._most_tries or self.state is State.GONE:
            return False
        return self._advance(Event.GIVEN_UP) and self._forget()

    def _forget(self) -> bool:
        self.instance, self.is_connected, self.expected, self.is_listed = None, False, Version(), True
        return True

    def _spoke(self, instance: str, event: Event, now_seconds: float) -> bool:
        is_its_word = self._is_known(instance) and self._advance(event)
        if is_its_word:
            self._hear(now_seconds)
        return is_its_word

    def _is_known(self, instance: str) -> bool:
        return self.is_connected and instance == self.instance

    def _hear(self, now_seconds: float) -> None:
        self.heard_seconds, self.tries, self._is_answered = now_seconds, 0, True
        self._is_patient = self.calls > 0

    def _advance(self, event: Event) -> bool:
        after = TRANSITIONS[self.state, event]
        if after is None:
            return False
        self.state = after
        return True

    def __repr__(self) -> str:
        connected = "connected" if self.is_connected else "not connected"
        state = f"{self.state.value}, instance {self.instance}, {connected}, term {self.expected.term}"
        return f"<Membership {state}, {self.calls} calls, {self.tries} tries>"


def _with_one_more(offences: dict[str | None, int], instance: str | None) -> dict[str | None, int]:
    """Return how often an instance has offended, this time included; with another one the count begins anew."""
    return {instance: offences.get(instance, 0) + 1}
