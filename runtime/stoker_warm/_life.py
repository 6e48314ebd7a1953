"""The life of a node, as the proxy knows it: whether it may be sent to, must be asked, or must be called first.

A node is a function: nobody can connect to it. A call starts or thaws one of its **instances**, which dials out to the
proxy and greets with its digest, so the proxy knows what it still holds (A. Wang et al., "InfiniCache" (FAST 2020),
sections 3.3 and 3.4: sleeping, active and maybe, a ping before a request, another call if it is not answered; J. Zhang
et al., "InfiniStore" (PVLDB 16, 2023): the expected state is compared, so that lost memory is noticed).

============== ======== ======== ======== =======
event          SLEEPING AWAKE    MAYBE    GONE
============== ======== ======== ======== =======
GREETED        AWAKE    AWAKE    AWAKE    AWAKE
GREETED_OTHER  AWAKE    refused  refused  AWAKE
CLAIMED        SLEEPING refused  refused  refused
HEARD          AWAKE    AWAKE    AWAKE    refused
BYE            SLEEPING SLEEPING SLEEPING refused
LOST           SLEEPING MAYBE    MAYBE    refused
SILENT         SLEEPING MAYBE    MAYBE    GONE
RETURNED       SLEEPING SLEEPING SLEEPING GONE
GIVEN_UP       GONE     refused  GONE     GONE
MUTE           refused  GONE     GONE     refused
============== ======== ======== ======== =======

A call changes no state: it is only counted. What is refused changes nothing: its source is not the node. A platform
that is called while an instance runs starts another one, and that must not pass for the node: as long as the known
instance is or may be running, whoever has other contents is refused. So one late answer costs nothing of what the node
holds. When the known instance sleeps, a call should have woken it if it still were there, so then a stranger is the
node and what it does not hold is lost. But a platform may take another instance all the same. A stranger that holds
nothing is therefore believed at once only if the connection of the known one has broken. Otherwise the function is
called once more while the stranger runs, which leaves the platform the known one, if there is one; whoever greets then
is the node. A call too many, with its cold start, costs some hundredths of moving what a full node held.

The words of an instance other than the known one, or on a broken connection, are dropped before they get here.

What is heard on a node's connection changes the state at once and waits for nothing. Whoever waits for a node to be
awake looks again whenever ``changed`` is set.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable

from stoker.errors import ConfigError, StateError
from stoker_warm._connection import Connection
from stoker_warm._settings import WarmConfig
from stoker_warm._shard import Digest
from stoker_warm._wake import Report


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
    """What happens to a node.

    Attributes:
        GREETED: an instance connected that is the known one or has the contents that are expected.
        GREETED_OTHER: another instance connected, with other contents or none.
        CLAIMED: another instance connected that holds nothing, and the known one, which does, may still be there.
        HEARD: the known instance answered, or said that it was woken.
        BYE: the known instance is about to return.
        LOST: the connection to the known instance broke.
        SILENT: a deadline passed with no word of it.
        RETURNED: the last call that was open ended, well or not.
        GIVEN_UP: it was tried as often as is sensible.
        MUTE: it was asked for shards as often, and delivered none, whatever else it answers.
    """

    GREETED = "greeted"
    GREETED_OTHER = "greeted by another"
    CLAIMED = "claimed by an empty one"
    HEARD = "heard"
    BYE = "bye"
    LOST = "lost"
    SILENT = "silent"
    RETURNED = "returned"
    GIVEN_UP = "given up"
    MUTE = "mute"


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
    }.items()
    for state, after in zip(State, row, strict=True)
}
"""Every state with every event → the state after it; None is a refusal."""


class Contents(enum.Enum):
    """What a node that has greeted holds.

    Attributes:
        EXPECTED: what it is believed to hold.
        UNKNOWN: something else; ask for a list, and believe nothing that is not on it.
        NONE: nothing; what it was believed to hold is lost.
        DOUBTFUL: nothing, but this may not be the node: close the connection of the known instance, call the function
            once more while this one runs, and believe whoever greets then.
    """

    EXPECTED = "expected"
    UNKNOWN = "unknown"
    NONE = "none"
    DOUBTFUL = "doubtful"


class Life:
    """One node's state. It decides and never waits; times are those of the caller's clock, in seconds.

    Invariants: AWAKE has a connection, GONE has none. ``expected`` is what the known instance last said that it holds;
    with no known instance it is the digest of nothing.

    Args:
        fresh_seconds: after its last word a node is believed to be awake for so long without being asked.
        tries: failed attempts in a row, with no word in between, after which it is given up.
    """

    def __init__(self, *, fresh_seconds: float = 1.0, tries: int = 3) -> None:
        if not 0 <= fresh_seconds < math.inf or tries < 1:
            raise ConfigError(f"a node needs fresh_seconds from 0 and tries from 1, not {fresh_seconds} and {tries}")
        self._fresh_seconds, self._most_tries = fresh_seconds, tries
        self.state = State.SLEEPING
        self.instance: str | None = None
        """The known instance: whose words count."""
        self.is_connected = False
        self.expected = Digest()
        """What the known instance holds."""
        self.is_listed = True
        """Whether the shards behind ``expected`` are known one by one."""
        self.calls = 0
        """Calls that have not ended."""
        self.tries = 0
        """Failed attempts since its last word."""
        self.heard_seconds = -math.inf
        """When its last word came."""
        self._is_answered = True
        self._is_patient = False
        self._debtor: str | None = None
        self._undelivered = 0

    def may_send(self, now_seconds: float) -> bool:
        """Return whether requests can go out at once."""
        return self.state is State.AWAKE and now_seconds - self.heard_seconds <= self._fresh_seconds

    @property
    def must_invoke(self) -> bool:
        """Whether it is to be called before it can be used.

        Not while a call is open that may yet bring a word: a second one would start a second instance. Wait for a
        greeting, a word, the end of the call or a deadline, whichever is first. Not when it is GONE either: readers do
        not wait for such a node; a call that is due to keep it warm may bring it back.
        """
        return self.state in (State.SLEEPING, State.MAYBE) and not self._is_patient

    def invoked(self) -> None:
        """A call was sent off."""
        self.calls += 1
        self._is_answered, self._is_patient = False, True

    def greeted(self, instance: str, digest: Digest, now_seconds: float) -> Contents | None:
        """An instance has connected and proved who it is.

        It takes the place of a connection that there was.

        Returns:
            What to think of the contents; None if it is not the node: tell it to stop.
        """
        is_expected = digest == self.expected
        if is_expected or instance == self.instance:
            event = Event.GREETED
        else:
            is_claim = digest == Digest() and self.is_connected and self.expected.hash
            event = Event.CLAIMED if is_claim else Event.GREETED_OTHER
        if not self._advance(event):
            return None
        if event is Event.CLAIMED:
            self.is_connected = self._is_patient = False
            return Contents.DOUBTFUL
        self.instance, self.is_connected, self.expected = instance, True, digest
        self._hear(now_seconds)
        if digest == Digest():
            contents = Contents.EXPECTED if is_expected else Contents.NONE
        else:
            contents = Contents.EXPECTED if is_expected and self.is_listed else Contents.UNKNOWN
        self.is_listed = contents is not Contents.UNKNOWN
        return contents

    def listed(self, instance: str) -> None:
        """The contents of an instance are known one by one; does nothing if it is not the known one any more."""
        self.is_listed |= instance == self.instance

    def heard(self, instance: str, now_seconds: float) -> bool:
        """An instance has answered, or says that it was woken; return whether it is the node's."""
        if not self._is_known(instance) or not self._advance(Event.HEARD):
            return False
        self._hear(now_seconds)
        return True

    def changed(self, instance: str, digest: Digest) -> None:
        """The known instance has put shards away or let them go, and says what it holds now."""
        if self._is_known(instance):
            self.expected = digest

    def doubted(self, instance: str) -> None:
        """An instance was told to put shards away or to let them go, and whether it did is not known.

        Its next word on a change covers this one, too, so digests alone would not tell: what it holds is unknown until
        it is :meth:`listed`, at its next greeting at the latest.
        """
        self.is_listed &= instance != self.instance

    def said_bye(self, instance: str, now_seconds: float) -> bool:
        """An instance is about to return; return whether it is the node's."""
        if not self._is_known(instance) or not self._advance(Event.BYE):
            return False
        self._hear(now_seconds)
        return True

    def lost(self, instance: str) -> bool:
        """The connection to an instance broke; return whether it is the node's."""
        if not self._is_known(instance) or not self._advance(Event.LOST):
            return False
        self.is_connected = False
        return True

    def silent(self) -> bool:
        """A ping, a request or a call has brought no word by its deadline.

        Returns:
            Whether the node is given up by this: what it held is lost, and its connection is to be closed.
        """
        self._is_patient = False
        self._advance(Event.SILENT)
        return self._count_try()

    def delivered(self) -> None:
        """The known instance has answered what it was asked for a shard."""
        self._undelivered = 0

    def undelivered(self) -> bool:
        """A deadline passed with no shard of the known instance, which may answer pings; return as :meth:`silent` does.

        An instance that was given up for that, and greets, is given up at the next one already, until it has delivered.
        """
        if self._debtor != self.instance:
            self._debtor, self._undelivered = self.instance, 0
        self._undelivered = min(self._undelivered + 1, self._most_tries)
        return self._undelivered == self._most_tries and self._advance(Event.MUTE) and self._forget()

    def returned(self) -> bool:
        """A call ended well; return as :meth:`silent` does. One that brought no word was a try."""
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
        self.instance, self.is_connected, self.expected, self.is_listed = None, False, Digest(), True
        return True

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
        return (
            f"<Life {self.state.value}, instance {self.instance}, {'' if self.is_connected else 'not '}connected, "
            f"term {self.expected.term}, {self.calls} calls, {self.tries} tries>"
        )


class Standing:
    """One node's state, on the proxy's event loop.

    Args:
        name: of the node.
        config: the tier's settings.
        found: is told what the node holds, each time that this is news.
        call_back: is called when the node sleeps and requests lie on its socket.

    Attributes:
        life: of the node.
        connection: to the known instance.
        contact_seconds: when it was called or spoke last.
        changed: is set when something has happened to it.
        asked: requests without an answer.
        changes: of what it holds.
        is_closed: it is let go: nobody calls it any more.
    """

    def __init__(
        self, name: str, config: WarmConfig, *, found: Callable[[Contents], None], call_back: Callable[[], object]
    ) -> None:
        self.name = name
        self.life = Life(fresh_seconds=config.fresh_seconds)
        self.connection: Connection | None = None
        self.contact_seconds = self._now()
        self.changed = asyncio.Event()
        self.asked = self.changes = 0
        self.is_closed = False
        self._read_seconds = config.read_seconds
        self._found, self._call_back = found, call_back
        self._silent_seconds = float("-inf")
        self._delivery_seconds = float("-inf")  # when it last delivered, or was found not to
        self._is_called_back = False

    # What is heard.

    def greeted(self, connection: Connection, report: Report) -> Contents | None:
        """An instance has connected; return what to think of it, as :meth:`Life.greeted` does."""
        contents = self.life.greeted(report.instance, report.digest, self._now())
        if contents is not None:
            if self.connection is not None:
                self.connection.abort()
            self.connection = None if contents is Contents.DOUBTFUL else connection
        return contents

    def heard(self, instance: str) -> None:
        """An instance has answered."""
        if self.life.heard(instance, self._now()):
            self.contact_seconds = self._now()

    def answered(self, instance: str, *, is_shard: bool) -> None:
        """The instance at the end of the connection has answered a request."""
        self.heard(instance)
        self._is_called_back = False
        if is_shard:
            self._delivery_seconds = self._now()
            self.life.delivered()

    def noticed(self, report: Report, *, is_bye: bool) -> None:
        """The instance at the end of the connection says that it is here again, or that it goes."""
        (self.life.said_bye if is_bye else self.life.heard)(report.instance, self._now())
        self.noted(report)
        self.touched()

    def is_as_expected(self, report: Report) -> bool:
        """Return whether a call was answered by the known instance, with what it is believed to hold."""
        return self.life.heard(report.instance, self._now()) and report.digest == self.life.expected

    def noted(self, report: Report) -> None:
        """Take note of a digest; answers to what was asked at the same time come in any order."""
        if report.digest.term >= self.life.expected.term:
            self.changes += report.digest != self.life.expected
            self.life.changed(report.instance, report.digest)

    def doubt(self) -> None:
        """It may hold what nobody knows of, or not hold what it is believed to: have it say what it holds."""
        self.changes += 1
        self.life.doubted(str(self.life.instance))
        self._found(Contents.UNKNOWN)

    # What is not heard.

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self.connection and self.life.instance is not None:
            self.life.lost(self.life.instance)
            self.connection = None
            self.changed.set()  # which is no contact: whether the instance is there, the next call tells

    def was_silent(self, sent_seconds: float) -> None:
        """It has not answered what was sent then. Many requests that wait at once are one silence."""
        if max(self.life.heard_seconds, self._silent_seconds) < sent_seconds:
            self._silent_seconds = self._now()
            self.gave_up(self.life.silent())
            self.touched()

    def did_not_deliver(self, sent_seconds: float) -> None:
        """It has not delivered the shard that it was asked for then. Many that it is asked for at once are one."""
        had_time = self._now() - sent_seconds >= self._read_seconds / 2  # to wake it took the rest
        if had_time and self._delivery_seconds <= sent_seconds:
            self._delivery_seconds = self._now()
            self.gave_up(self.life.undelivered())

    def gave_up(self, is_given_up: bool) -> None:
        """Close the connection of a node if it is given up: what it held is lost."""
        if is_given_up:
            if self.connection is not None:
                self.connection.abort()
                self.connection = None
            self.changed.set()
            self._found(Contents.NONE)

    def touched(self) -> None:
        """Something has happened to it, or was done to it."""
        self.contact_seconds = self._now()
        self.changed.set()
        # What was asked while it said that it goes lies on its socket: it is answered when it is called again. One that
        # goes again before it has answered anything is left alone.
        is_cut_short = self.asked and self.connection is not None and self.life.state is State.SLEEPING
        if is_cut_short and not (self._is_called_back or self.is_closed):
            self._is_called_back = True
            self._call_back()

    async def has_changed(self, seconds: float) -> bool:
        """Wait until something happens to it; return whether that was in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
