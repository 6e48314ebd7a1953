"""Nodes as the proxy uses them: called when they sleep, asked when awake, given up when they are silent or lie.

What an instance holds, and what it is to let go, are lists of shards, page by page.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from stoker.abc import Answer
from stoker.errors import (
    ConnectionLostError,
    DeadlineError,
    ServerError,
    StokerError,
    ThrottledError,
    TransientError,
    WireError,
)
from stoker_warm._config import WarmConfig
from stoker_warm._ends import ProxyEnd
from stoker_warm._events import Report, Task
from stoker_warm._frames import Buffer, Frame, Head, Kind
from stoker_warm._membership import Contents, Membership, State
from stoker_warm._shard import LISTED_AT_ONCE, ShardId, ShardMac

_log = logging.getLogger("stoker.warm.nodes")


class Got(enum.Enum):
    """What became of asking a node for a shard."""

    RIGHT = "it came, and its MAC is right"
    LACKING = "the node does not have it"
    WRONG = "something else came"
    NOTHING = "it cannot be had now"


def listed_page(name: str, head: Head, before: Sequence[ShardId], most: int) -> list[ShardId]:
    """Return the shards of an answer to INDEX, behind those of the answers before.

    Raises:
        WireError: it is no such answer, has shards out of their order, or is one too many.
    """
    shards = ShardId.parse_all(head.get("shards"))
    if head.get("more") and not shards:
        raise WireError(f"{name} lists no shards, and says that there are more")
    if any(one >= other for one, other in pairwise([*before[-1:], *shards])):
        raise WireError(f"{name} lists shards that are not in their order")
    if len(before) + len(shards) > most:
        raise WireError(f"{name} lists more than {most} shards")
    return shards


class Node:
    """One function that holds shards. Lives on the proxy's event loop.

    What it is asked raises a TransientError if it could not be woken, did not answer in time, or failed; only ``get``
    returns that.

    Args:
        number: of the node, in the directory.
        config: the tier's settings.
        mac: of shards.
        call: calls its function by its name, for a task, and says whether to give up a connection from before; returns
            and raises as :meth:`stoker.abc.Executor.call`.
        found: is called with what it holds, whenever it has greeted or was given up.
        spawn: runs something that ends by itself, in the proxy's task group.
    """

    def __init__(
        self,
        number: int,
        config: WarmConfig,
        mac: ShardMac,
        call: Callable[[str, Task, bool], Awaitable[Answer]],
        *,
        found: Callable[[Node, Contents], None],
        spawn: Callable[[Coroutine[Any, Any, object]], object],
    ) -> None:
        self.number, self.name = number, config.name_of(number)
        self.limit_bytes = 0
        self._now = asyncio.get_running_loop().time
        self.membership = Membership(fresh_seconds=config.fresh_seconds)
        """Its state."""
        self.contact_seconds = self._now()
        """When it was called or spoke last."""
        self.failure: StokerError | None = None
        """Of the last call, if that failed."""
        self._config, self._mac, self._spawn = config, mac, spawn
        self._invoke, self._found = partial(call, self.name), partial(found, self)
        self._connection: ProxyEnd | None = None  # to the known instance
        self._changed = asyncio.Event()  # something has happened to it
        self._asked = self._waiting = 0  # requests without an answer, and those that wait for it to wake
        self._changes = 0  # of what it holds
        self._failed_calls = 0  # in a row
        self._next_call_seconds = float("-inf")  # until which the platform is to be left alone
        self._is_closed = False  # it is not called any more
        self._silent_seconds = self._delivery_seconds = float("-inf")  # when it was silent; delivered, or did not
        self._is_called_back = False
        self._may_run = False  # an answer was lost, so the instance may run all the same, until it was asked
        self._waking_up: asyncio.Task[str] | None = None

    # What the proxy asks of it.

    async def get(self, shard: ShardId, into: memoryview) -> Got:
        """Fill ``into`` with a shard, if it can be had in time. A wrong one is a strike.

        When the call ends, however it ends, nothing writes to ``into`` any more.
        """
        head, seconds = {"shard": shard.to_text()}, self._config.read_seconds
        try:
            reply, instance = await self._request(Kind.GET, head, into=into, seconds=seconds)
        except ServerError:
            return Got.LACKING  # it has answered: that it cannot
        except StokerError:
            return Got.NOTHING
        if reply.kind is Kind.MISSING:
            return Got.LACKING
        if reply.body_bytes == len(into) and self._mac.verify(shard, into, reply.head.get("mac")):
            return Got.RIGHT
        self._lied(instance)
        return Got.WRONG

    async def set(self, shard: ShardId, payload: memoryview) -> list[ShardId] | None:
        """Have it keep a shard; return what went for it, None if it does not take it.

        When the call ends, however it ends, nothing reads ``payload`` any more.
        """
        head = {"shard": shard.to_text(), "mac": self._mac.make(shard, payload)}
        seconds = self._config.write_seconds
        reply, _ = await self._request(Kind.SET, head, body=(payload,), seconds=seconds)
        return ShardId.parse_all(reply.head.get("evicted")) if reply.kind is Kind.STORED else None

    async def delete(self, shards: Sequence[ShardId]) -> None:
        """Have it drop shards."""
        for start in range(0, len(shards), LISTED_AT_ONCE):
            head = {"shards": [shard.to_text() for shard in shards[start : start + LISTED_AT_ONCE]]}
            await self._request(Kind.DELETE, head, seconds=self._config.write_seconds)

    async def ping(self, seconds: float | None = None) -> None:
        """Wake it if need be, and have it answer within ``seconds``, else within those that a wake may take."""
        await self._request(Kind.PING, {}, seconds=self._config.wake_seconds if seconds is None else seconds)

    async def _request(
        self, kind: Kind, head: Head, *, body: Sequence[Buffer] = (), into: memoryview | None = None, seconds: float
    ) -> tuple[Frame, str]:
        """Wake the node if need be, ask it, and return its answer with the instance that gave it."""
        end_seconds = self._now() + seconds
        try:
            return await self._ask(kind, head, body, into, end_seconds)
        except ConnectionLostError:
            if self._now() >= end_seconds:
                raise
            # Its instance was taken back, or the way to it broke. What can be asked can be asked twice.
            return await self._ask(kind, head, body, into, end_seconds)

    async def _ask(
        self, kind: Kind, head: Head, body: Sequence[Buffer], into: memoryview | None, end_seconds: float
    ) -> tuple[Frame, str]:
        connection, instance = self._awake() or await self._ready(end_seconds)
        sent_seconds, is_change = self._now(), kind in (Kind.SET, Kind.DELETE)
        left_seconds = max(0.0, end_seconds - sent_seconds)
        self._asked += 1
        try:
            reply = await connection.request(kind, head, body=body, into=into, timeout=left_seconds)
        except BaseException as error:
            self._has_failed(kind, connection, sent_seconds, is_late=isinstance(error, DeadlineError))
            raise
        finally:
            self._asked -= 1
        is_current = connection is self._connection
        if is_change and not is_current:
            raise ConnectionLostError(f"{self.name} has another connection than the one that answered")
        self._heard(instance)
        self._is_called_back = False
        if is_current and kind is Kind.GET:
            self._delivery_seconds = self._now()
            self.membership.delivered()
        if is_change and reply.kind is Kind.STORED:
            self._noted(Report.parse({key: value for key, value in reply.head.items() if key != "evicted"}))
        return reply, instance

    def _has_failed(self, kind: Kind, connection: ProxyEnd, sent_seconds: float, *, is_late: bool) -> None:
        """Draw conclusions from a request without an answer."""
        is_current = connection is self._connection
        if is_late:
            self._was_silent(sent_seconds)
            if kind is Kind.GET and is_current:
                self._did_not_deliver(sent_seconds)
        if not connection.is_open:
            self.lost(connection)
        elif kind in (Kind.SET, Kind.DELETE) and connection is self._connection:
            # It may hold more or less than it is believed to: it is to list what it holds.
            self._changes += 1
            self.membership.is_listed = False
            self._found(Contents.UNKNOWN)

    async def keep_warm(self) -> None:
        """Call it, so that the platform keeps its instance; find out if that has lost what it held."""
        if self.membership.state is State.GONE:  # it is to greet: it is not believed before
            self._changed.clear()
            self._spawn(self._call(Task.SERVE))
            await self._has_changed(self._config.wake_seconds)
        elif not await self._call(Task.WARM):
            with suppress(StokerError):
                await self._ready()  # so that it greets, and says what it holds
        elif not self.membership.is_listed:
            self._found(Contents.UNKNOWN)  # it could not be found out so far

    async def close(self) -> None:
        """Tell it to return, and end its connection; what it holds, it holds. Idempotent."""
        self._is_closed = True
        connection = self._connection
        # One that sleeps would find on its socket that it is to return when it is called next.
        if connection is not None and connection.is_open and self.membership.state is not State.SLEEPING:
            with suppress(StokerError):
                await connection.request(Kind.STOP, timeout=self._config.ping_seconds)
        if self._waking_up is not None:
            self._waking_up.cancel()
            await asyncio.wait([self._waking_up])
        if self._connection is not None:
            await self._connection.close()

    async def listed(self) -> list[ShardId] | None:
        """Return all that it holds; None if the instance that began to tell is not the node any more."""
        instance, changes = self.membership.instance, -1
        while self._changes != changes:  # else some came or went behind the page that would have told
            changes, shards, has_more = self._changes, list[ShardId](), True
            while has_more:
                after = {"after": shards[-1].to_text()} if shards else {}
                reply, _ = await self._request(Kind.INDEX, after, seconds=self._config.write_seconds)
                if instance is None or self.membership.instance != instance:
                    return None
                shards += listed_page(self.name, reply.head, shards, self._config.max_objects)
                has_more = bool(reply.head.get("more"))
        self.membership.is_listed = True
        return shards

    async def forget(self) -> None:
        """Have it drop all that it holds."""
        await self.ping()  # so that the instance is known
        await self.ping()
        while (held := await self.listed()) != []:
            if held is None:
                raise ConnectionLostError(f"another instance of {self.name} has come, which may hold something, too")
            await self.delete(held)
        self._found(Contents.NONE)

    # Waking it.

    async def _call(self, task: Task) -> bool:
        """Call the function and wait until it has returned.

        Returns:
            False if its answer tells that what the node holds is not what it is believed to.
        """
        membership, is_as_expected = self.membership, True
        self.contact_seconds = self._now()
        dial_anew = self._connection is None or membership.tries > 0
        membership.invoked()
        try:
            answer = await self._invoke(task, dial_anew)
        except StokerError as error:
            self._leave_alone(error)
            if isinstance(error, ThrottledError):
                membership.throttled()
            else:
                # If only the answer was lost, it runs on, and another call would start another instance beside it.
                self._may_run = isinstance(error, TransientError) and membership.state is State.AWAKE
                self._gave_up(membership.failed())
        except BaseException:
            membership.failed()
            raise
        else:
            self.failure, self._failed_calls = None, 0
            is_as_expected = task is not Task.WARM or self._is_as_expected(answer)
            self._gave_up(membership.returned())
        self._touched()
        return is_as_expected

    def _leave_alone(self, error: StokerError) -> None:
        """Leave the platform alone for a while after a call that has failed, each time longer."""
        self.failure = error
        least_seconds = self._config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self._next_call_seconds = self._now() + max(least_seconds, asked_seconds or 0.0)

    def _is_as_expected(self, answer: Answer) -> bool:
        try:
            report = Report.parse(answer.result)
        except WireError:
            return False
        return self.membership.heard(report.instance, self._now()) and report.version == self.membership.expected

    def _awake(self) -> tuple[ProxyEnd, str] | None:
        """Return the connection of a node that has just spoken, and its instance."""
        self._received()
        if self._connection is None or not self.membership.may_send(self._now()):
            return None
        return self._connection, str(self.membership.instance)

    async def _ready(self, end_seconds: float | None = None) -> tuple[ProxyEnd, str]:
        """Wake it if need be, and return the connection to it and its instance; a ConnectionLostError says why not."""
        is_ready = self.membership.may_send(self._now())
        while not is_ready or self._connection is None:
            self._waiting += 1
            try:
                waking = self._rouse()
                async with asyncio.timeout_at(end_seconds):
                    # All wait for the same call; one that is cancelled leaves it to the others.
                    await asyncio.wait([waking])
            except TimeoutError:
                raise ConnectionLostError(f"{self.name} was not awake in time") from None
            finally:
                self._waiting -= 1
            if why := "was let go" if waking.cancelled() else waking.result():
                raise ConnectionLostError(f"{self.name} {why}")
            is_ready = self.membership.state is State.AWAKE
        return self._connection, str(self.membership.instance)

    def _rouse(self) -> asyncio.Task[str]:
        """Begin to wake it, unless that is under way."""
        if self._waking_up is None or self._waking_up.done():
            self._waking_up = asyncio.ensure_future(self._wake())
        return self._waking_up

    async def _wake(self) -> str:
        """Ping or call it until it answers, as long as a request waits for it; return why that failed, if it did."""
        membership, begun_seconds = self.membership, self._now()
        while not membership.may_send(self._now()):
            if membership.state is State.AWAKE and membership.heard_seconds >= begun_seconds:
                break
            if membership.state is State.GONE:
                return f"was called {membership.tries} times and does not come"
            if self._is_closed or not (self._waiting or self._asked):
                return "was let go"
            if self._connection is not None and (self._may_run or membership.state is State.AWAKE):
                await self._ping(self._connection)
                continue
            self._changed.clear()
            pause_seconds = self._next_call_seconds - self._now() if membership.must_invoke else 0.0
            if pause_seconds > 0.0:
                await self._has_changed(pause_seconds)
                continue
            if membership.must_invoke:
                self._spawn(self._call(Task.SERVE))
                await asyncio.sleep(0)
            if not await self._has_changed(self._config.wake_seconds):
                self._gave_up(membership.silent())
        return ""

    async def _ping(self, connection: ProxyEnd) -> None:
        self._may_run = False
        sent_seconds, instance = self._now(), self.membership.instance
        try:
            await connection.request(Kind.PING, timeout=self._config.ping_seconds)
        except StokerError:
            if connection.is_open:
                self._was_silent(sent_seconds)
            else:
                self.lost(connection)
        else:
            self._heard(str(instance))

    # What is heard of it.

    def greeted(self, connection: ProxyEnd, greeting: Head) -> None:
        """An instance has connected and knows the secret."""
        report = Report.parse(greeting)
        contents = self.membership.greeted(report.instance, report.version, self._now())
        if contents is None:
            self._spawn(_dismissed(connection, self._config.ping_seconds))
            return
        if self._connection is not None:
            self._connection.abort()
        if contents is Contents.DOUBTFUL:  # while the stranger is busy, the platform takes the known one for a call
            self._connection = None
            self._spawn(self._call(Task.SERVE))
        else:
            self._connection, self.limit_bytes = connection, report.limit_bytes
            self._found(contents)
        self._touched()  # those that wait for the node look only when the call has begun

    def noticed(self, connection: ProxyEnd, kind: Kind, head: Head) -> None:
        """An instance says something unasked: that it is here again, or that it goes."""
        if connection is self._connection:
            report = Report.parse(head)
            (self.membership.said_bye if kind is Kind.LEAVING else self.membership.heard)(report.instance, self._now())
            self._noted(report)
            self._touched()
        elif kind is Kind.LEAVING:  # a stranger's: should it come again, it is to greet
            connection.abort()

    def _heard(self, instance: str) -> None:
        """An instance has answered."""
        if self.membership.heard(instance, self._now()):
            self.contact_seconds = self._now()

    def _received(self) -> None:
        """Count bytes of the known instance as a sign of life while it is awake: shards may be thrown away as late."""
        received_seconds = self._connection.received_seconds if self._connection is not None else float("-inf")
        if self.membership.state is State.AWAKE and received_seconds > self.membership.heard_seconds:
            self.membership.heard(str(self.membership.instance), received_seconds)

    def _noted(self, report: Report) -> None:
        """Take note of the version of what it holds; those of requests at the same time come in any order."""
        if report.version.term >= self.membership.expected.term:
            self._changes += report.version != self.membership.expected
            self.membership.changed(report.instance, report.version)

    def _touched(self) -> None:
        """Something has happened to it, or was done to it."""
        self.contact_seconds = self._now()
        self._changed.set()
        # What was asked while it said that it goes lies on its socket: it is answered when it is called again. One that
        # goes again before it has answered anything is left alone.
        is_cut_short = self._asked and self._connection is not None and self.membership.state is State.SLEEPING
        if is_cut_short and not (self._is_called_back or self._is_closed):
            self._is_called_back = True
            self._rouse()

    async def _has_changed(self, seconds: float) -> bool:
        """Wait until something happens to it; return whether that was in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        return False

    # What is not heard of it.

    def lost(self, connection: ProxyEnd) -> None:
        """A connection has ended."""
        if connection is self._connection and self.membership.instance is not None:
            instance, self._connection = self.membership.instance, None
            self.membership.lost(instance)
            self._changed.set()  # which is no contact: whether the instance is there, the next call tells
            if isinstance(connection.failure, WireError):  # what it sent makes no sense: a shard that is too long, say
                self._lied(instance)

    def _was_silent(self, sent_seconds: float) -> None:
        """It has not answered what was sent then. Many requests that wait at once are one silence.

        An instance that has sent anything since is not silent: its answer may stand behind shards that are late.
        """
        self._received()
        if max(self.membership.heard_seconds, self._silent_seconds) < sent_seconds:
            self._silent_seconds = self._now()
            self._gave_up(self.membership.silent())
            self._touched()

    def _did_not_deliver(self, sent_seconds: float) -> None:
        """It has not delivered the shard that it was asked for then. Many that it is asked for at once are one."""
        had_time = self._now() - sent_seconds >= self._config.read_seconds / 2  # to wake it took the rest
        if had_time and self._delivery_seconds <= sent_seconds:
            self._delivery_seconds = self._now()
            self._gave_up(self.membership.undelivered())

    def _lied(self, instance: str) -> None:
        """An instance has sent what it was not to send."""
        if is_given_up := self.membership.lied(instance):
            _log.warning(
                "%s answers with wrong shards, and nothing is read from its instance %s any more; its memory or the "
                "way to it is faulty, or somebody forges them: look at who may change the function, and deploy it anew",
                self.name,
                instance,
            )
        self._gave_up(is_given_up)

    def _gave_up(self, is_given_up: bool) -> None:
        """Close the connection of a node if it is given up: what it held is lost."""
        if is_given_up:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None
            self._changed.set()
            self._found(Contents.NONE)


async def _dismissed(connection: ProxyEnd, seconds: float) -> None:
    """Tell an instance that is not needed to return."""
    with suppress(StokerError):
        await connection.request(Kind.STOP, timeout=seconds)
    await connection.close()
