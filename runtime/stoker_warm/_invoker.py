"""Invocation of one node's function: what is heard of the node, calls of it, and making sure that it is awake.

A node that has just answered is awake, one that may be is pinged, and one that sleeps is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from stoker.abc import Answer
from stoker.errors import ConnectionLostError, FunctionError, StokerError, ThrottledError, TransientError, WireError
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._events import Report, Task, Wake
from stoker_warm._frames import Kind
from stoker_warm._membership import Contents, Membership, State

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

Billed = Callable[[Answer | None, Task], None]
"""Is called with the answer of each call, None if there was none, and the task of the call."""

_MAY_HAVE_RUN = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""


class NodeConnectionState:
    """One node's state, on the proxy's event loop.

    Args:
        name: of the node.
        config: the tier's settings.
        found: is called with what the node holds, whenever that changes.
        call_back: is called when the node sleeps and requests lie on its socket.

    Attributes:
        membership: of the node.
        connection: to the known instance.
        contact_seconds: when it was called or spoke last.
        changed: is set when something has happened to it.
        asked: requests without an answer.
        changes: of what it holds.
        is_closed: it is not called any more.
    """

    def __init__(
        self, name: str, config: WarmConfig, *, found: Callable[[Contents], None], call_back: Callable[[], object]
    ) -> None:
        self.name = name
        self.membership = Membership(fresh_seconds=config.fresh_seconds)
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
        """An instance has connected; return what to think of it, as :meth:`Membership.greeted` does."""
        contents = self.membership.greeted(report.instance, report.version, self._now())
        if contents is not None:
            if self.connection is not None:
                self.connection.abort()
            self.connection = None if contents is Contents.DOUBTFUL else connection
        return contents

    def heard(self, instance: str) -> None:
        """An instance has answered."""
        if self.membership.heard(instance, self._now()):
            self.contact_seconds = self._now()

    def received(self) -> None:
        """Count bytes of the known instance as a sign of life while it is awake: shards may be thrown away as late."""
        received_seconds = self.connection.received_seconds if self.connection is not None else float("-inf")
        if self.membership.state is State.AWAKE and received_seconds > self.membership.heard_seconds:
            self.membership.heard(str(self.membership.instance), received_seconds)

    def answered(self, instance: str, *, is_shard: bool) -> None:
        """The instance at the end of the connection has answered a request."""
        self.heard(instance)
        self._is_called_back = False
        if is_shard:
            self._delivery_seconds = self._now()
            self.membership.delivered()

    def noticed(self, report: Report, *, is_bye: bool) -> None:
        """The instance at the end of the connection says that it is here again, or that it goes."""
        (self.membership.said_bye if is_bye else self.membership.heard)(report.instance, self._now())
        self.noted(report)
        self.touched()

    def is_as_expected(self, report: Report) -> bool:
        """Return whether a call was answered by the known instance, with what it is believed to hold."""
        return self.membership.heard(report.instance, self._now()) and report.version == self.membership.expected

    def noted(self, report: Report) -> None:
        """Take note of the version of what it holds; those of requests at the same time come in any order."""
        if report.version.term >= self.membership.expected.term:
            self.changes += report.version != self.membership.expected
            self.membership.changed(report.instance, report.version)

    def doubt(self) -> None:
        """It may hold more or less than it is believed to: have it list what it holds."""
        self.changes += 1
        self.membership.doubted(str(self.membership.instance))
        self._found(Contents.UNKNOWN)

    # What is not heard.

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self.connection and self.membership.instance is not None:
            self.membership.lost(self.membership.instance)
            self.connection = None
            self.changed.set()  # which is no contact: whether the instance is there, the next call tells

    def was_silent(self, sent_seconds: float) -> None:
        """It has not answered what was sent then. Many requests that wait at once are one silence.

        An instance that has sent anything since is not silent: its answer may stand behind shards that are late.
        """
        self.received()
        if max(self.membership.heard_seconds, self._silent_seconds) < sent_seconds:
            self._silent_seconds = self._now()
            self.gave_up(self.membership.silent())
            self.touched()

    def did_not_deliver(self, sent_seconds: float) -> None:
        """It has not delivered the shard that it was asked for then. Many that it is asked for at once are one."""
        had_time = self._now() - sent_seconds >= self._read_seconds / 2  # to wake it took the rest
        if had_time and self._delivery_seconds <= sent_seconds:
            self._delivery_seconds = self._now()
            self.gave_up(self.membership.undelivered())

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
        is_cut_short = self.asked and self.connection is not None and self.membership.state is State.SLEEPING
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


class Invoker:
    """Calls one node, and wakes it for all requests that wait for it. Lives on the proxy's event loop.

    Args:
        state: of the connection to the node.
        config: the tier's settings.
        invoke: calls functions.
        proxy: makes the address, ``host:port``, and the certificate's fingerprint that nodes dial.
        spawn: runs a call, which may last longer than the requests that wait for it.
        billed: is called after each call.

    Attributes:
        failure: of the last call, if that failed.
    """

    def __init__(
        self,
        state: NodeConnectionState,
        config: WarmConfig,
        invoke: Invoke,
        proxy: Callable[[], tuple[str, str]],
        spawn: Callable[[Coroutine[Any, Any, object]], object],
        billed: Billed,
    ) -> None:
        self._state, self._config, self._spawn = state, config, spawn
        self._invoke, self._proxy, self._billed = invoke, proxy, billed
        self.failure: StokerError | None = None
        self._failed_calls = 0  # in a row
        self._next_call_seconds = float("-inf")
        self._may_run = False  # an answer was lost, so the instance may run all the same, until it was asked
        self._waiting = 0
        self._waking_up: asyncio.Task[ConnectionLostError | None] | None = None

    async def call(self, task: Task) -> bool:
        """Call the function and wait until it has returned.

        Returns:
            False if its answer tells that what the node holds is not what it is believed to.
        """
        state, membership = self._state, self._state.membership
        state.contact_seconds = asyncio.get_running_loop().time()
        event = self._event(task)
        membership.invoked()
        is_as_expected = True
        try:
            answer = await self._invoke(state.name, event)
        except ThrottledError as error:
            self._failed(error)
            membership.throttled()
        except StokerError as error:
            self._failed(error)
            # If only the answer was lost, it runs on, and another call would start another instance beside it.
            self._may_run = isinstance(error, TransientError) and membership.state is State.AWAKE
            if isinstance(error, _MAY_HAVE_RUN):
                self._billed(None, task)
            state.gave_up(membership.failed())
        except BaseException:
            membership.failed()
            raise
        else:
            self.failure, self._failed_calls = None, 0
            self._billed(answer, task)
            if task is Task.WARM:
                is_as_expected = self._is_as_expected(answer)
            state.gave_up(membership.returned())
        state.touched()
        return is_as_expected

    def awake(self) -> tuple[Connection, str] | None:
        """Return the connection of a node that has just spoken, and its instance."""
        state = self._state
        state.received()
        if state.connection is None or not state.membership.may_send(asyncio.get_running_loop().time()):
            return None
        return state.connection, str(state.membership.instance)

    async def ready_by(self, end_seconds: float) -> tuple[Connection, str]:
        """Return the connection of a node that is awake by then, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        try:
            async with asyncio.timeout_at(end_seconds):
                return await self.ready()
        except TimeoutError:
            raise ConnectionLostError(f"{self._state.name} was not awake in time") from None

    async def ready(self) -> tuple[Connection, str]:
        """Return the connection of a node that is awake, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        state = self._state
        is_ready = state.membership.may_send(asyncio.get_running_loop().time())
        while not is_ready or state.connection is None:
            self._waiting += 1
            try:
                waking = self.rouse()
                # All wait for the same call; one that is cancelled leaves it to the others.
                await asyncio.wait([waking])
            finally:
                self._waiting -= 1
            error = ConnectionLostError(f"{state.name} was let go") if waking.cancelled() else waking.result()
            if error is not None:
                raise ConnectionLostError(str(error))
            is_ready = state.membership.state is State.AWAKE
        return state.connection, str(state.membership.instance)

    def rouse(self) -> asyncio.Task[ConnectionLostError | None]:
        """Begin to wake it, unless that is under way."""
        if self._waking_up is None or self._waking_up.done():
            self._waking_up = asyncio.ensure_future(self._wake())
        return self._waking_up

    async def close(self) -> None:
        """Wake it no more."""
        if self._waking_up is not None:
            self._waking_up.cancel()
            await asyncio.wait([self._waking_up])

    def _event(self, task: Task) -> dict[str, Any]:
        state, (proxy, fingerprint) = self._state, self._proxy()
        return Wake(
            node=state.name,
            proxy=proxy,
            fingerprint=fingerprint,
            task=task,
            linger_seconds=self._config.linger_seconds,
            dial_anew=state.connection is None or state.membership.tries > 0,
        ).to_event()

    def _failed(self, error: StokerError) -> None:
        """A call has failed: leave the platform alone for a while, each time longer."""
        self.failure = error
        least_seconds = self._config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self._next_call_seconds = asyncio.get_running_loop().time() + max(least_seconds, asked_seconds or 0.0)

    def _is_as_expected(self, answer: Answer) -> bool:
        try:
            return self._state.is_as_expected(Report.parse(answer.result))
        except WireError:
            return False

    async def _wake(self) -> ConnectionLostError | None:
        """Ping or call it until it answers, as long as a request waits for it; return the error if that fails."""
        state, membership, loop = self._state, self._state.membership, asyncio.get_running_loop()
        begun_seconds = loop.time()
        while not (membership.may_send(loop.time()) or self._is_awake_since(begun_seconds)):
            if membership.state is State.GONE:
                return ConnectionLostError(f"{state.name} was called {membership.tries} times and does not come")
            if state.is_closed or not (self._waiting or state.asked):
                return ConnectionLostError(f"{state.name} was let go")
            if state.connection is not None and (self._may_run or membership.state is State.AWAKE):
                await self._ping(state.connection)
                continue
            state.changed.clear()
            pause_seconds = self._next_call_seconds - loop.time() if membership.must_invoke else 0.0
            if pause_seconds > 0.0:
                await state.has_changed(pause_seconds)
                continue
            if membership.must_invoke:
                self._spawn(self.call(Task.SERVE))
                await asyncio.sleep(0)
            if not await state.has_changed(self._config.wake_seconds):
                state.gave_up(membership.silent())
        return None

    def _is_awake_since(self, begun_seconds: float) -> bool:
        membership = self._state.membership
        return membership.state is State.AWAKE and membership.heard_seconds >= begun_seconds

    async def _ping(self, connection: Connection) -> None:
        self._may_run = False
        sent_seconds, instance = asyncio.get_running_loop().time(), self._state.membership.instance
        try:
            await connection.request(Kind.PING, timeout=self._config.ping_seconds)
        except StokerError:
            if connection.is_open:
                self._state.was_silent(sent_seconds)
            else:
                self._state.lost(connection)
        else:
            self._state.heard(str(instance))
