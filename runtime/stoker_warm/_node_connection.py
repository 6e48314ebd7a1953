"""Nodes as the proxy uses them: called when they sleep, asked when awake, given up when they are silent or lie.

What an instance holds, and what it is to let go, are lists of shards, page by page.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from stoker.errors import ConnectionLostError, DeadlineError, ServerError, StokerError, StoreError, WireError
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._events import Report, Task
from stoker_warm._frames import Head, Kind
from stoker_warm._invoker import Billed, Invoke, Invoker, NodeConnectionState
from stoker_warm._membership import Contents, Membership, State
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._requests import Reply
from stoker_warm._shard import ShardId, ShardMac

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What all nodes of a proxy share.

    Attributes:
        config: the tier's settings.
        mac: of shards.
        invoke: calls functions.
        proxy: makes the address, ``host:port``, and the certificate's fingerprint that nodes dial.
        spawn: runs something that ends by itself, in the proxy's task group.
        billed: is called after each call.
        found: is called with what a node holds, whenever it has greeted or was given up.
    """

    config: WarmConfig
    mac: ShardMac
    invoke: Invoke
    proxy: Callable[[], tuple[str, str]]
    spawn: Callable[[Coroutine[Any, Any, object]], object]
    billed: Billed
    found: Callable[[Node, Contents], None]


class Node:
    """One function that holds shards. Lives on the proxy's event loop.

    What it is asked raises a TransientError if it could not be woken, did not answer in time, or failed; only ``get``
    returns that.

    Args:
        number: of the node, in the directory.
        parts: what it shares with others.
    """

    def __init__(self, number: int, parts: NodeParts) -> None:
        config = parts.config
        self.number, self.name = number, config.name_of(number)
        self.limit_bytes = 0
        self._config, self._mac, self._spawn, self._found = config, parts.mac, parts.spawn, parts.found
        self._state = NodeConnectionState(
            self.name, config, found=partial(parts.found, self), call_back=lambda: self._invoker.rouse()
        )
        self._invoker = Invoker(self._state, config, parts.invoke, parts.proxy, parts.spawn, parts.billed)

    @property
    def membership(self) -> Membership:
        """Its state."""
        return self._state.membership

    @property
    def contact_seconds(self) -> float:
        """When it was called or spoke last."""
        return self._state.contact_seconds

    @property
    def failure(self) -> StokerError | None:
        """Of the last call, if that failed."""
        return self._invoker.failure

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
        except StoreError:
            return Got.NOTHING
        if reply.kind is Kind.MISSING:
            return Got.LACKING
        if reply.body_bytes == len(into) and self._mac.verify(shard, into, reply.head.get("mac")):
            return Got.RIGHT
        if is_given_up := self.membership.lied(instance):
            _log.warning(
                "%s answers with wrong shards, and nothing is read from its instance %s any more; its memory or the "
                "way to it is faulty, or somebody forges them: look at who may change the function, and deploy it anew",
                self.name,
                instance,
            )
        self._state.gave_up(is_given_up)
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
        self,
        kind: Kind,
        head: Head,
        *,
        body: Sequence[bytes | bytearray | memoryview] = (),
        into: memoryview | None = None,
        seconds: float,
    ) -> tuple[Reply, str]:
        """Wake the node if need be, ask it, and return its answer with the instance that gave it."""
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
    ) -> tuple[Reply, str]:
        state = self._state
        connection, instance = self._invoker.awake() or await self._invoker.ready_by(end_seconds)
        sent_seconds, is_change = asyncio.get_running_loop().time(), kind in (Kind.SET, Kind.DELETE)
        state.asked += 1
        try:
            reply = await connection.request(
                kind, head, body=body, into=into, timeout=max(0.0, end_seconds - sent_seconds)
            )
        except BaseException as error:
            self._has_failed(kind, connection, sent_seconds, is_late=isinstance(error, DeadlineError))
            raise
        finally:
            state.asked -= 1
        is_current = connection is state.connection
        if is_change and not is_current:
            raise ConnectionLostError(f"{self.name} has another connection than the one that answered")
        state.answered(instance, is_shard=is_current and kind is Kind.GET)
        if is_change and reply.kind is Kind.STORED:
            state.noted(Report.parse({key: value for key, value in reply.head.items() if key != "evicted"}))
        return reply, instance

    def _has_failed(self, kind: Kind, connection: Connection, sent_seconds: float, *, is_late: bool) -> None:
        """Draw conclusions from a request without an answer."""
        state = self._state
        is_current = connection is state.connection
        if is_late:
            state.was_silent(sent_seconds)
            if kind is Kind.GET and is_current:
                state.did_not_deliver(sent_seconds)
        if not connection.is_open:
            state.lost(connection)
        elif kind in (Kind.SET, Kind.DELETE) and is_current:
            state.doubt()

    async def keep_warm(self) -> None:
        """Call it, so that the platform keeps its instance; find out if that has lost what it held."""
        if self.membership.state is State.GONE:  # it is to greet: it is not believed before
            self._state.changed.clear()
            self._spawn(self._invoker.call(Task.SERVE))
            await self._state.has_changed(self._config.wake_seconds)
        elif not await self._invoker.call(Task.WARM):
            with suppress(StokerError):
                await self._invoker.ready()  # so that it greets, and says what it holds
        elif not self.membership.is_listed:
            self._found(self, Contents.UNKNOWN)  # it could not be found out so far

    async def stop(self) -> None:
        """Tell it to return, unless it sleeps: it would find that on its socket when it is called next."""
        connection = self._state.connection
        if connection is not None and connection.is_open and self.membership.state is not State.SLEEPING:
            with suppress(StokerError):
                await connection.request(Kind.STOP, timeout=self._config.ping_seconds)

    async def close(self) -> None:
        """Tell it to return, and end its connection; what it holds, it holds. Idempotent."""
        self._state.is_closed = True
        await self.stop()
        await self._invoker.close()
        if self._state.connection is not None:
            await self._state.connection.close()

    async def listed(self) -> list[ShardId] | None:
        """Return all that it holds; None if the instance that began to tell is not the node any more."""
        while True:
            instance, changes = self.membership.instance, self._state.changes
            listed = await self._list(instance)
            if listed is None or instance is None:
                return None
            if self._state.changes == changes:  # else some came or went behind the page that would have told
                self.membership.listed(instance)
                return listed

    async def _list(self, instance: str | None) -> list[ShardId] | None:
        shards = list[ShardId]()
        while True:
            after = {"after": shards[-1].to_text()} if shards else {}
            reply, _ = await self._request(Kind.INDEX, after, seconds=self._config.write_seconds)
            if self.membership.instance != instance:
                return None
            shards += listed_page(self.name, reply.head, shards, self._config.max_objects)
            if not reply.head.get("more"):
                return shards

    async def forget(self) -> None:
        """Have it drop all that it holds."""
        await self.ping()  # so that the instance is known
        await self.ping()
        while (held := await self.listed()) != []:
            if held is None:
                raise ConnectionLostError(f"another instance of {self.name} has come, which may hold something, too")
            await self.delete(held)

    # What happens to it.

    def greeted(self, connection: Connection, greeting: Head) -> None:
        """An instance has connected and knows the secret."""
        report = Report.parse(greeting)
        contents = self._state.greeted(connection, report)
        if contents is None:
            self._spawn(_dismissed(connection, self._config.ping_seconds))
            return
        if contents is Contents.DOUBTFUL:  # while the stranger is busy, the platform takes the known one for a call
            self._spawn(self._invoker.call(Task.SERVE))
        else:
            self.limit_bytes = report.limit_bytes
            self._found(self, contents)
        self._state.touched()  # those that wait for the node look only when the call has begun

    def noticed(self, connection: Connection, kind: Kind, head: Head) -> None:
        """An instance says something unasked: that it is here again, or that it goes."""
        if connection is self._state.connection:
            self._state.noticed(Report.parse(head), is_bye=kind is Kind.BYE)
        elif kind is Kind.BYE:  # a stranger's: should it come again, it is to greet
            connection.abort()

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        self._state.lost(connection)


async def _dismissed(connection: Connection, seconds: float) -> None:
    """Tell an instance that is not needed to return."""
    with suppress(StokerError):
        await connection.request(Kind.STOP, timeout=seconds)
    await connection.close()
