"""A tier that is the cache process of this machine: each super-sample is fetched once for all loaders there."""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from itertools import count

from stoker._base.machine import inspect_machine
from stoker._base.sizes import format_bytes
from stoker._base.threads import PerLoop, run_in_thread
from stoker._cache.index import NOT_FOUND, Found, name_of, size_of
from stoker._cluster.frames import Frame, FrameProtocol, Kind
from stoker._cluster.launch import NodeLink, connect
from stoker._cluster.spec import ClusterSpec
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, ConnectionLostError, StokerError

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 5.0, 300.0
"""Time from the first try to reach a process that could not be reached to the next, which doubles, up to a maximum."""
_CLOSE_SECONDS = 1.0
"""Time in which a process that takes none of the objects on their way is not waited for when a loader is closed."""
_UNSENT_BYTES, _MAX_COPIES = 64 << 20, 2
"""Bytes of objects on their way to the process, and number of objects that are not asked for yet, beyond which no more
are given to it."""
_SILENT_SECONDS = 0.5
"""Time after which a process that has not answered is not responsive, beside the time of bytes that were to be sent."""
_LEAST_BYTES_PER_SECOND = 50e6
"""Rate at which a process is expected to take bytes, at least."""
_SOON_SECONDS = 1.0
"""Time in which a connection is made, unless the process is frozen: it may have to be started."""

_log = logging.getLogger("stoker.cluster")


class ClusterTier:
    """A :class:`~stoker.abc.Tier` whose objects a process of this machine keeps in memory that its clients map.

    If two clients lack an object, one fetches it, and the other one waits for it, so a read may take as long as a fetch
    from the store.

    Args:
        text: setting ``cluster=``.
        is_shared: whether other clients need the same objects at about the same time; default False.

    Raises:
        ConfigError: the setting is malformed, or the limit is above the memory of the machine or container.
    """

    name = "cluster"

    def __init__(self, text: str, *, is_shared: bool = False) -> None:
        self._text, self._spec, self._is_shared = text, ClusterSpec.parse(text), is_shared
        if self._spec.path is None and self._spec.limit_bytes > (machine := inspect_machine()).memory_bytes:
            limited_by = f" ({machine.limited_by})" if machine.limited_by else ""
            raise ConfigError(
                f"cluster={text!r}: there are {format_bytes(machine.memory_bytes)} of memory here{limited_by}; lower "
                "limit=, or use disk:"
            )
        self._links = PerLoop(lambda: _LoopLink(self._spec, self._text))

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object into ``into``; return False if this client is to fetch it, or there is no room for it.

        Raises:
            ConnectionLostError: the connection ended meanwhile.
        """
        return await self._read(Kind.ASK, ref, into, number=int(self._is_shared))

    async def peek(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object into ``into``; return False if it is not here. This client will not give it.

        Raises:
            ConnectionLostError: the connection ended meanwhile.
        """
        return await self._read(Kind.PEEK, ref, into)

    async def find(self, ref: ObjectRef) -> Found:
        """Return an object's bytes in the memory of the process, or whether it has room for the object.

        A process that does not answer in time has none.

        Raises:
            ConnectionLostError: the connection ended meanwhile.
        """
        if ref.size_bytes > self._spec.limit_bytes:
            return NOT_FOUND
        connection = await self._links.get().connection(_SOON_SECONDS)
        return NOT_FOUND if connection is None else await connection.find(name_of(ref))

    async def _read(self, kind: Kind, ref: ObjectRef, into: memoryview, *, number: int = 0) -> bool:
        if self._is_too_large(ref):
            return False
        connection = await self._links.get().connection()
        return connection is not None and await connection.read(Frame(kind, 0, name_of(ref), number), into)

    def _is_too_large(self, ref: ObjectRef) -> bool:
        return ref.size_bytes > self._spec.limit_bytes and not self._is_shared

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Give an object to the process, if this client has fetched it for all, or the process still lacks it."""
        if not self._is_too_large(ref) and (connection := self._links.get().present) is not None:
            connection.give(name_of(ref), data)

    def decline(self, ref: ObjectRef) -> None:
        """Give nothing for an object that could not be fetched: the next client that waits fetches it."""
        if (connection := self._links.get().present) is not None:
            connection.release(name_of(ref))

    def is_responsive(self) -> bool:
        """Return whether the process has answered its requests, also those that wait for another client."""
        connection = self._links.get().present
        return connection is not None and connection.is_responsive()

    def reject(self, ref: ObjectRef) -> None:
        """Have the process forget an object whose bytes were wrong."""
        if (connection := self._links.get().present) is not None:
            connection.reject(name_of(ref))

    async def close(self) -> None:
        """End the running loop's connection. Idempotent."""
        if (link := self._links.pop()) is not None:
            await link.close()


class _LoopLink:
    """The connection of one event loop, which is made at the first read, and again when it was lost."""

    def __init__(self, spec: ClusterSpec, text: str) -> None:
        self._spec, self._text = spec, text
        self._connecting: asyncio.Task[_Connection | None] | None = None
        self._begun_seconds, self._next_seconds, self._pause_seconds = 0.0, -math.inf, _RETRY_SECONDS
        self._problem = ""
        self.present: _Connection | None = None

    async def connection(self, within_seconds: float = math.inf) -> _Connection | None:
        """Return the connection; None if the process could not be reached, or not within a time of the first try."""
        if self.present is not None and not self.present.is_lost:
            return self.present
        self.present = None
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._next_seconds:
                return None
            self._begun_seconds, self._connecting = loop.time(), loop.create_task(self._connect())
        connecting, left_seconds = self._connecting, self._begun_seconds + within_seconds - loop.time()
        done, _ = await asyncio.wait([connecting], timeout=None if math.isinf(left_seconds) else max(0.0, left_seconds))
        return connecting.result() if done else None

    async def _connect(self) -> _Connection | None:
        loop = asyncio.get_running_loop()
        try:
            link = await run_in_thread(partial(connect, self._spec, self._text))
            self.present = await _open(link)
            self._pause_seconds, self._problem = _RETRY_SECONDS, ""
        except (StokerError, OSError) as error:
            self._next_seconds = loop.time() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_RETRY_SECONDS)
            if str(error) != self._problem:  # not again for each try
                _log.warning("objects are read from the bucket, without the cache of this machine: %s", error)
            self._problem = str(error)
        finally:
            self._connecting = None
        return self.present

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self.present is not None:
            await self.present.close()


async def _open(link: NodeLink) -> _Connection:
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Connection(link.arena), sock=link.connection
        )
    except BaseException:
        link.connection.close()
        raise
    connection.send(Frame(Kind.OPEN, number=int(link.arena is not None)))
    return connection


class _Connection(FrameProtocol):
    """The client's side of a connection.

    Args:
        arena: memory of the process; None if objects are sent.
    """

    def __init__(self, arena: memoryview | None) -> None:
        super().__init__()
        self._arena, self._numbers = arena, count(1)
        self._reads: dict[int, tuple[memoryview | None, asyncio.Future[Frame]]] = {}
        self._unanswered: dict[int, float] = {}
        self._leases: set[str] = set()
        self._copies: dict[str, tuple[int, bytes]] = {}  # with the request for a lease
        self._places: dict[str, int] = {}  # objects that were found: each keeps its place
        self._refused: set[str] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    async def read(self, asked: Frame, into: memoryview) -> bool:
        """Ask for an object, and copy it; return False if the process does not have it."""
        answer = await self._request(asked, into)
        if answer.kind is Kind.HIT and self._arena is not None:
            into[:] = self._arena[answer.number : answer.number + len(into)]
        return answer.kind in (Kind.HIT, Kind.PASS)

    async def find(self, name: str) -> Found:
        """Return an object's memory, or whether there is room for it; neither if it is not mapped, or in no answer."""
        if self._arena is None or name in self._refused:
            return NOT_FOUND
        place = self._places.get(name)
        if place is None:
            if not self.is_responsive():
                return NOT_FOUND
            try:
                async with asyncio.timeout(self._patience_seconds()):
                    answer = await self._request(Frame(Kind.PEEK, name=name))
            except TimeoutError:
                return NOT_FOUND
            if answer.kind is not Kind.HIT:
                if answer.kind is Kind.FULL:
                    self._refused.add(name)
                return Found(None, has_room=answer.kind is Kind.LACKING)
            place = self._places[name] = answer.number
        return Found(self._arena[place : place + size_of(name)])

    async def _request(self, asked: Frame, into: memoryview | None = None) -> Frame:
        """Send a request and return the answer, whose body, if it has one, is then in ``into``."""
        if self.is_lost:
            raise ConnectionLostError("the connection to the cache process has ended")
        request, name = next(self._numbers), asked.name
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._reads[request] = into, answer
        self._unanswered[request] = asyncio.get_running_loop().time()
        self.send(asked._replace(request=request))
        try:
            return await answer
        except asyncio.CancelledError:
            came = None if answer.cancelled() or answer.exception() else answer.result()  # with the cancellation
            if came is not None and came.kind is Kind.LEASE:
                self.release(name)
            raise
        finally:
            if self._reads.pop(request, None) is not None:  # cancelled: a lease that comes now is given back
                self.skip_body(request)
                self.send(Frame(Kind.CANCEL, request, name))

    def give(self, name: str, data: memoryview) -> None:
        """Give an object for which this client has a lease; else ask for one first."""
        if self.is_lost or self.transport is None:
            return
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes and unsent_bytes + len(data) > _UNSENT_BYTES:
            self.release(name)
        elif name in self._leases:
            self._leases.discard(name)
            self.send(Frame(Kind.GIVE, 0, name), bytes(data))
        elif name not in self._copies and len(self._copies) < _MAX_COPIES:
            request = next(self._numbers)
            self._copies[name] = request, bytes(data)
            self.send(Frame(Kind.ASK, request, name))

    def release(self, name: str) -> None:
        """Give back a lease, if there is one."""
        if name in self._leases:
            self._leases.discard(name)
            self.send(Frame(Kind.RELEASE, 0, name))

    def reject(self, name: str) -> None:
        """Have the process forget an object, whose place may be damaged: it is not looked for there again."""
        self._places.pop(name, None)
        self._refused.add(name)
        self.send(Frame(Kind.REJECT, 0, name))

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        self._unanswered.pop(frame.request, None)
        if frame.kind is Kind.WAIT:
            return 0, None
        into, answer = self._reads.get(frame.request, (None, None))
        number, copy = self._copies.get(frame.name, (0, b""))
        if number == frame.request:
            del self._copies[frame.name]
        if frame.kind is Kind.LEASE:
            if number == frame.request:
                self.send(Frame(Kind.GIVE, 0, frame.name), copy)
            elif answer is None or answer.done():  # nobody waits for it any more
                self.send(Frame(Kind.RELEASE, 0, frame.name))
            else:
                self._leases.add(frame.name)
        elif frame.kind is Kind.PASS or (frame.kind is Kind.HIT and self._arena is None):
            return size_of(frame.name), into
        elif frame.kind not in (Kind.HIT, Kind.FULL, Kind.LACKING):
            raise ValueError(f"the process sent {frame.kind.name}")
        self.body_received(frame)
        return 0, None

    def body_received(self, frame: Frame) -> None:
        _, answer = self._reads.pop(frame.request, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def is_responsive(self) -> bool:
        """Return whether the process has answered the requests that it has had time for."""
        oldest = min(self._unanswered.values(), default=math.inf)
        return not self.is_lost and asyncio.get_running_loop().time() - oldest < self._patience_seconds()

    def _patience_seconds(self) -> float:
        """Return how long an answer may take: it comes behind what is sent before the request."""
        unsent_bytes = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return _SILENT_SECONDS + unsent_bytes / _LEAST_BYTES_PER_SECOND

    async def close(self) -> None:
        """End the connection, once what was given has arrived."""
        transport = self.transport
        if transport is not None and not self.is_lost:
            self.end()
            before_bytes, unsent_bytes = math.inf, transport.get_write_buffer_size()
            while not self._ended.done() and unsent_bytes < before_bytes:
                await asyncio.wait([self._ended], timeout=_CLOSE_SECONDS)
                before_bytes, unsent_bytes = unsent_bytes, transport.get_write_buffer_size()
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_lost = True
        self._copies.clear()
        self._leases.clear()
        self._ended.set_result(None)
        reads, self._reads = self._reads, {}
        for _, answer in reads.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError("the cache process of this machine has ended"))
