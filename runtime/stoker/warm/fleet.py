"""Nodes as the proxy uses them: called when they sleep, asked when they are awake, given up when they are silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stoker.errors import ConnectionLostError, DeadlineError, StokerError, ThrottledError, TransientError, WireError
from stoker.fanout import Answer
from stoker.warm.connection import Connection, Reply
from stoker.warm.life import Contents, Life, State
from stoker.warm.node import LISTED_AT_ONCE
from stoker.warm.settings import WarmConfig
from stoker.warm.shard import ShardId
from stoker.warm.wake import Report, Task, Wake
from stoker.warm.wire import Head, Kind

__all__ = ["Invoke", "Node", "NodeParts", "deletions", "list_all", "listed_page"]

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.fanout.Executor.call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What all nodes of a proxy share.

    Attributes:
        config: the tier's settings.
        invoke: calls functions.
        proxy: makes the address, ``host:port``, and the certificate's fingerprint that nodes dial.
        spawn: runs something that ends by itself, in the proxy's task group.
        billed: is told what a call came to, and what it was for; None where no answer came.
        found: is told what a node holds, each time that it has greeted or was given up.
    """

    config: WarmConfig
    invoke: Invoke
    proxy: Callable[[], tuple[str, str]]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    billed: Callable[[Answer | None, Task], None]
    found: Callable[[Node, Contents], None]


class Node:
    """One function that holds shards. Lives on the proxy's event loop.

    Args:
        number: of the node, in the directory.
        parts: what it shares with others.
    """

    def __init__(self, number: int, parts: NodeParts) -> None:
        config = parts.config
        self.number, self.name = number, config.name_of(number)
        self.life = Life(fresh_seconds=config.fresh_seconds)
        self.contact_seconds = asyncio.get_running_loop().time()
        """When it was called or spoke last."""
        self.limit_bytes = 0
        self.failure: StokerError | None = None
        """Of the last call, if that failed."""
        self.saved_instance: str | None = None
        """Whose contents its second instance was given last."""
        self._parts = parts
        self._connection: Connection | None = None
        self._changed = asyncio.Event()
        self._waking: asyncio.Task[ConnectionLostError | None] | None = None
        self._silent_seconds = float("-inf")
        self._delivery_seconds = float("-inf")  # when it last delivered, or was found not to
        self._calm_seconds = float("-inf")
        self._failed_calls = 0  # in a row
        self._may_run = False
        self._waiting = 0  # for it to be awake
        self._asked = 0  # and not answered
        self._is_called_back = False
        self._changes = 0  # of what it holds
        self._is_closed = False
        self._peer: asyncio.Future[Connection] | None = None

    # What the proxy asks of it.

    async def request(
        self,
        kind: Kind,
        head: Head,
        *,
        body: Sequence[bytes | bytearray | memoryview] = (),
        into: memoryview | None = None,
        seconds: float,
    ) -> Reply:
        """Wake the node if need be, ask it, and return its answer.

        When the call ends, however it ends, nothing reads ``body`` or writes to ``into`` any more.

        Raises:
            TransientError: it could not be woken, did not answer in time, or failed.
        """
        end_seconds = asyncio.get_running_loop().time() + seconds
        try:
            return await self._ask(kind, head, body, into, end_seconds)
        except ConnectionLostError:
            if asyncio.get_running_loop().time() >= end_seconds:
                raise
            # Its instance was taken back, or the way to it broke. What can be asked can be asked twice.
            return await self._ask(kind, head, body, into, end_seconds)

    async def _ask(
        self,
        kind: Kind,
        head: Head,
        body: Sequence[bytes | bytearray | memoryview],
        into: memoryview | None,
        end_seconds: float,
    ) -> Reply:
        connection, instance = self._awake() or await self._ready_by(end_seconds)
        sent_seconds, is_change = asyncio.get_running_loop().time(), kind in (Kind.SET, Kind.DELETE)
        self._asked += 1
        try:
            reply = await connection.request(
                kind, head, body=body, into=into, timeout=max(0.0, end_seconds - sent_seconds)
            )
        except BaseException as error:
            if isinstance(error, DeadlineError):
                self._was_silent(sent_seconds)
                if kind is Kind.GET and connection is self._connection:
                    self._did_not_deliver(sent_seconds)
            if not connection.is_open:
                self.lost(connection)
            elif is_change and connection is self._connection:
                self.doubt()
            raise
        finally:
            self._asked -= 1
        if is_change and connection is not self._connection:
            raise ConnectionLostError(f"{self.name} has another connection than the one that answered")
        self._heard(instance)
        self._is_called_back = False
        if kind is Kind.GET and connection is self._connection:
            self._delivery_seconds = asyncio.get_running_loop().time()
            self.life.delivered()
        if is_change and reply.kind is Kind.STORED:
            self._noted(Report.parse(_without(reply.head, "evicted")))
        return reply

    async def keep_warm(self) -> None:
        """Call it, so that the platform keeps its instance; find out if that has lost what it held."""
        if self.life.state is not State.GONE:
            await self._call(Task.WARM)
            return
        # One that is gone is to greet: it is not believed before.
        self._changed.clear()
        self._parts.spawn(self._call(Task.SERVE))
        await self._has_changed(self._parts.config.wake_seconds)

    async def stop(self) -> None:
        """Tell it to return, unless it sleeps: it would find that on its socket when it is called next."""
        if self._connection is not None and self._connection.is_open and self.life.state is not State.SLEEPING:
            with suppress(StokerError):
                await self._connection.request(Kind.STOP, timeout=self._parts.config.ping_seconds)

    async def close(self) -> None:
        """Tell it to return, and end its connection; what it holds, it holds. Idempotent."""
        self._is_closed = True
        await self.stop()
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.wait([self._waking])
        if self._connection is not None:
            await self._connection.close()

    async def listed(self) -> list[ShardId] | None:
        """Return all that it holds; None if the instance that began to tell is not the node any more.

        Raises:
            TransientError: it could not be woken, did not answer in time, failed, or lists what cannot be.
        """
        while True:
            instance, changes = self.life.instance, self._changes
            listed = await self._list(instance)
            if listed is None or instance is None:
                return None
            if self._changes == changes:  # otherwise some of it came or went behind the page that would have told
                self.life.listed(instance)
                return listed

    async def _list(self, instance: str | None) -> list[ShardId] | None:
        config = self._parts.config

        async def ask(after: Head) -> Reply | None:
            reply = await self.request(Kind.INDEX, after, seconds=config.write_seconds)
            return reply if self.life.instance == instance else None

        return await list_all(self.name, ask, config.most_objects)

    async def forget(self) -> None:
        """Have it drop all that it holds.

        Raises:
            TransientError: it could not be woken, did not answer in time, or failed.
        """
        await self.request(Kind.PING, {}, seconds=self._parts.config.wake_seconds)  # so that it is known who is asked
        await self.request(Kind.PING, {}, seconds=self._parts.config.wake_seconds)
        while (held := await self.listed()) != []:
            if held is None:
                raise ConnectionLostError(f"another instance of {self.name} has come, which may hold something, too")
            for head in deletions(held):
                await self.request(Kind.DELETE, head, seconds=self._parts.config.write_seconds)

    @asynccontextmanager
    async def accompanied(self) -> AsyncIterator[Connection]:
        """Have a second instance beside the one that is awake, which is kept awake meanwhile; yield its connection.

        Raises:
            DeadlineError: there is none within ``wake_seconds``: the platform starts no more, or took the first one.
            ConnectionLostError: the node cannot be woken.
        """
        config, loop = self._parts.config, asyncio.get_running_loop()
        await self.request(Kind.PING, {}, seconds=config.wake_seconds)
        self._peer = peer = loop.create_future()
        staying = asyncio.ensure_future(self._stay_awake())
        try:
            self._parts.spawn(self._call_peer())
            try:
                async with asyncio.timeout(config.wake_seconds):
                    connection = await peer
            except TimeoutError:
                raise DeadlineError(f"{self.name} has no second instance after {config.wake_seconds:g} s") from None
            try:
                yield connection
            finally:
                self._parts.spawn(_dismissed(connection, config.ping_seconds))
        finally:
            self._peer = None
            staying.cancel()
            await asyncio.wait([staying])

    # What happens to it.

    def greeted(self, connection: Connection, greeting: Head) -> None:
        """An instance has connected and knows the secret."""
        report, task = Report.parse(_without(greeting, "task")), greeting.get("task")
        is_peer, contents = task == Task.BACKUP and report.instance != self.life.instance, None
        if is_peer and self._peer is not None and not self._peer.done():
            self._peer.set_result(connection)
            return
        if not is_peer:
            contents = self.life.greeted(report.instance, report.digest, asyncio.get_running_loop().time())
        if contents is None:
            self._parts.spawn(_dismissed(connection, self._parts.config.ping_seconds))
            return
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        if contents is Contents.DOUBTFUL:  # while the stranger is busy, the platform takes the known one for a call
            self._parts.spawn(self._call(Task.SERVE))
            self._touched()
            return
        self._connection, self.limit_bytes = connection, report.limit_bytes
        self._touched()
        self._parts.found(self, contents)

    def noticed(self, connection: Connection, kind: Kind, head: Head) -> None:
        """An instance says something unasked: that it is here again, or that it goes."""
        if connection is not self._connection:
            if kind is Kind.BYE:  # a stranger's: should it come again, it is to greet
                connection.abort()
            return
        report, now_seconds = Report.parse(head), asyncio.get_running_loop().time()
        if kind is Kind.BYE:
            self.life.said_bye(report.instance, now_seconds)
        else:
            self.life.heard(report.instance, now_seconds)
        self._noted(report)
        self._touched()

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self._connection and self.life.instance is not None:
            self.life.lost(self.life.instance)
            self._connection = None
            self._changed.set()  # which is no contact: whether the instance is there, the next call tells

    def doubt(self) -> None:
        """It may hold what nobody knows of, or not hold what it is believed to: have it say what it holds."""
        self._changes += 1
        self.life.doubted(str(self.life.instance))
        self._parts.found(self, Contents.UNKNOWN)

    # Waking it.

    def _awake(self) -> tuple[Connection, str] | None:
        """Return the connection of a node that has just spoken, and its instance."""
        if self._connection is None or not self.life.may_send(asyncio.get_running_loop().time()):
            return None
        return self._connection, str(self.life.instance)

    async def _ready_by(self, end_seconds: float) -> tuple[Connection, str]:
        """Return the connection of a node that is awake by then, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        try:
            async with asyncio.timeout_at(end_seconds):
                return await self._ready()
        except TimeoutError:
            raise ConnectionLostError(f"{self.name} was not awake in time") from None

    async def _ready(self) -> tuple[Connection, str]:
        """Return the connection of a node that is awake, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        is_ready = self.life.may_send(asyncio.get_running_loop().time())
        while not is_ready or self._connection is None:
            self._waiting += 1
            try:
                waking = self._rouse()
                # Whoever wants it waits for the same call; one that is cancelled leaves it to the others.
                await asyncio.wait([waking])
            finally:
                self._waiting -= 1
            error = ConnectionLostError(f"{self.name} was let go") if waking.cancelled() else waking.result()
            if error is not None:
                raise ConnectionLostError(str(error))
            is_ready = self.life.state is State.AWAKE
        return self._connection, str(self.life.instance)

    def _rouse(self) -> asyncio.Task[ConnectionLostError | None]:
        """Begin to wake it, unless that is under way."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._wake())
        return self._waking

    async def _wake(self) -> ConnectionLostError | None:
        """Do what it takes to hear of it, as long as somebody wants it; return the error if that fails."""
        loop, config = asyncio.get_running_loop(), self._parts.config
        begun_seconds = loop.time()
        while not (self.life.may_send(loop.time()) or self._is_awake_since(begun_seconds)):
            if self.life.state is State.GONE:
                return ConnectionLostError(f"{self.name} was called {self.life.tries} times and does not come")
            if self._is_closed or not (self._waiting or self._asked):
                return ConnectionLostError(f"{self.name} was let go")
            if self._connection is not None and (self._may_run or self.life.state is State.AWAKE):
                await self._ping(self._connection)
                continue
            self._changed.clear()
            pause_seconds = self._calm_seconds - loop.time() if self.life.must_invoke else 0.0
            if pause_seconds > 0.0:
                await self._has_changed(pause_seconds)
                continue
            if self.life.must_invoke:
                self._parts.spawn(self._call(Task.SERVE))
                await asyncio.sleep(0)
            if not await self._has_changed(config.wake_seconds):
                self._gave_up(self.life.silent())
        return None

    def _is_awake_since(self, begun_seconds: float) -> bool:
        return self.life.state is State.AWAKE and self.life.heard_seconds >= begun_seconds

    async def _has_changed(self, seconds: float) -> bool:
        """Wait until something happens to it; return whether that was in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _ping(self, connection: Connection) -> None:
        self._may_run = False
        sent_seconds, instance = asyncio.get_running_loop().time(), self.life.instance
        try:
            await connection.request(Kind.PING, timeout=self._parts.config.ping_seconds)
        except StokerError:
            if connection.is_open:
                self._was_silent(sent_seconds)
            else:
                self.lost(connection)
        else:
            self._heard(str(instance))

    async def _stay_awake(self) -> None:
        """Give it a reason to stay: while it runs, the platform takes another instance for another call."""
        with suppress(StokerError):
            while True:
                await self.request(Kind.PING, {}, seconds=self._parts.config.wake_seconds)
                await asyncio.sleep(self._parts.config.linger_seconds / 4)

    async def _call_peer(self) -> None:
        """Call the function while its instance is busy: that makes a second one."""
        with suppress(StokerError):
            answer = None
            try:
                answer = await self._parts.invoke(self.name, self._event(Task.BACKUP))
            finally:
                self._parts.billed(answer, Task.BACKUP)

    async def _call(self, task: Task) -> None:
        """Call the function and wait until it has returned."""
        self.contact_seconds = asyncio.get_running_loop().time()
        event = self._event(task)
        self.life.invoked()
        is_known = True
        try:
            answer = await self._parts.invoke(self.name, event)
        except ThrottledError as error:
            self._failed(error)
            self.life.throttled()
        except StokerError as error:
            self._failed(error)
            # If only the answer was lost, it runs on, and another call would start another instance beside it.
            self._may_run = isinstance(error, TransientError) and self.life.state is State.AWAKE
            self._parts.billed(None, task)
            self._gave_up(self.life.failed())
        except BaseException:
            self.life.failed()
            raise
        else:
            self.failure, self._failed_calls = None, 0
            self._parts.billed(answer, task)
            if task is Task.WARM:
                is_known = self._is_as_expected(answer)
            self._gave_up(self.life.returned())
        self._touched()
        if not is_known:
            with suppress(StokerError):
                await self._ready()  # so that it greets, and says what it holds
        elif task is Task.WARM and not self.life.is_listed:
            self._parts.found(self, Contents.UNKNOWN)  # nobody could find out so far

    def _event(self, task: Task) -> dict[str, Any]:
        proxy, fingerprint = self._parts.proxy()
        return Wake(
            node=self.name,
            proxy=proxy,
            fingerprint=fingerprint,
            task=task,
            linger_seconds=self._parts.config.linger_seconds,
            dial_anew=self._connection is None or self.life.tries > 0 or task is Task.BACKUP,
        ).to_event()

    def _failed(self, error: StokerError) -> None:
        """A call has failed: leave the platform alone for a while, each time longer."""
        self.failure = error
        least_seconds = self._parts.config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self._calm_seconds = asyncio.get_running_loop().time() + max(least_seconds, asked_seconds or 0.0)

    def _is_as_expected(self, answer: Answer) -> bool:
        try:
            report = Report.parse(answer.result)
        except WireError:
            return False
        is_known = self.life.heard(report.instance, asyncio.get_running_loop().time())
        return is_known and report.digest == self.life.expected

    def _heard(self, instance: str) -> None:
        now_seconds = asyncio.get_running_loop().time()
        if self.life.heard(instance, now_seconds):
            self.contact_seconds = now_seconds

    def _noted(self, report: Report) -> None:
        """Take note of a digest; answers to what was asked at the same time come in any order."""
        if report.digest.term >= self.life.expected.term:
            self._changes += report.digest != self.life.expected
            self.life.changed(report.instance, report.digest)

    def _was_silent(self, sent_seconds: float) -> None:
        """It has not answered what was sent then. Many requests that wait at once are one silence."""
        if max(self.life.heard_seconds, self._silent_seconds) < sent_seconds:
            self._silent_seconds = asyncio.get_running_loop().time()
            self._gave_up(self.life.silent())
            self._touched()

    def _did_not_deliver(self, sent_seconds: float) -> None:
        """It has not delivered the shard that it was asked for then. Many that it is asked for at once are one."""
        now_seconds = asyncio.get_running_loop().time()
        had_time = now_seconds - sent_seconds >= self._parts.config.read_seconds / 2  # to wake it took the rest
        if had_time and self._delivery_seconds <= sent_seconds:
            self._delivery_seconds = now_seconds
            self._gave_up(self.life.undelivered())

    def _gave_up(self, is_given_up: bool) -> None:
        if is_given_up:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None
            self._parts.found(self, Contents.NONE)

    def _touched(self) -> None:
        self.contact_seconds = asyncio.get_running_loop().time()
        self._changed.set()
        # What was asked while it said that it goes lies on its socket: it is answered when it is called again. One that
        # goes again before it has answered anything is left alone.
        is_cut_short = self._asked and self._connection is not None and self.life.state is State.SLEEPING
        if is_cut_short and not (self._is_called_back or self._is_closed):
            self._is_called_back = True
            self._rouse()


async def list_all(name: str, ask: Callable[[Head], Awaitable[Reply | None]], most: int) -> list[ShardId] | None:
    """Return all shards that somebody holds, in their order, asked for page by page.

    Args:
        name: what to call him in an error.
        ask: sends an INDEX with the head that it is given; None gives up.
        most: shards.

    Raises:
        WireError: a page is not as it should be, or there are too many shards.
    """
    listed = list[ShardId]()
    while (reply := await ask({"after": listed[-1].to_text()} if listed else {})) is not None:
        listed += listed_page(name, reply.head, listed, most)
        if not reply.head.get("more"):
            return listed
    return None


def deletions(shards: Sequence[ShardId]) -> Iterator[Head]:
    """Yield the heads of as many DELETE as it takes to name all shards."""
    for start in range(0, len(shards), LISTED_AT_ONCE):
        yield {"shards": [shard.to_text() for shard in shards[start : start + LISTED_AT_ONCE]]}


def listed_page(name: str, head: Head, before: Sequence[ShardId], most: int) -> list[ShardId]:
    """Return the shards of an answer to INDEX, behind those of the answers before.

    Raises:
        WireError: it is no such answer, has shards out of their order, or is one too many.
    """
    page = head.get("shards")
    if not isinstance(page, list) or (head.get("more") and not page):
        raise WireError(f"{name} lists {page!r:.40}, not shards")
    shards = [ShardId.parse(each) for each in page]
    if any(one >= other for one, other in pairwise([*before[-1:], *shards])):
        raise WireError(f"{name} lists shards that are not in their order")
    if len(before) + len(shards) > most:
        raise WireError(f"{name} lists more than {most} shards")
    return shards


def _without(head: Head, name: str) -> dict[str, Any]:
    return {key: value for key, value in head.items() if key != name}


async def _dismissed(connection: Connection, seconds: float) -> None:
    """Tell an instance that is not needed to return."""
    with suppress(StokerError):
        await connection.request(Kind.STOP, timeout=seconds)
    await connection.close()
