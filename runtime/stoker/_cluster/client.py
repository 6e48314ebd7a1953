"""A tier that is the cache process of this machine and, in a job of several machines, those of the others.

Each super-sample is fetched from the store once for all loaders. In a job of several machines it has its place in one
process (:mod:`stoker._cluster.members`), whose clients are loaders of all machines: the first one that asks fetches it.
So a loader waits for another loader, which waits for the store, and processes wait for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from stoker._base.batch_read import ObjectPart
from stoker._base.checksum import crc32c
from stoker._base.machine import inspect_machine
from stoker._base.sizes import format_bytes
from stoker._base.task_group import task_group
from stoker._base.threads import PerLoop, run_in_thread
from stoker._cache.index import NOT_FOUND, Found, Presence, name_of
from stoker._cluster.connection import Connection
from stoker._cluster.frames import MAX_PARTS_BYTES, Frame, Kind, Need
from stoker._cluster.launch import connect
from stoker._cluster.link import Link
from stoker._cluster.members import Member, Registry
from stoker._cluster.peers import OpenPeer, Peers
from stoker._cluster.spec import ClusterSpec
from stoker._cluster.tcp import open_tcp
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, StoreError

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 5.0, 300.0
"""Time from the first try to reach a process that could not be reached to the next, which doubles, up to a maximum."""
_SOON_SECONDS = 1.0
"""Time in which a connection is made, unless the process is frozen: it may have to be started."""

_REQUEST_BYTES, _REQUEST_PARTS = 1 << 20, 4096
"""Maximum size, beyond one part, and maximum number of parts of one request."""
_PRESENCE: dict[int, Presence] = {
    Kind.HIT: Presence.COPIED,
    Kind.LACKING: Presence.LACKING,
    Kind.FULL: Presence.UNAVAILABLE,
}
PEEK_SECONDS = 0.5
"""Time in which the previous owner of an object has to answer, before the object is read from the store."""

OpenNode = Callable[[ClusterSpec, str], Awaitable[Connection]]
"""Connects to the process of this machine with a setting, and starts it if there is none.

Raises:
    StokerError: it cannot start, or does not answer.
    OSError: it cannot be reached.
"""

_log = logging.getLogger("stoker.cluster")


class ClusterTier:
    """A :class:`~stoker.abc.Tier` whose objects cache processes keep: in memory that clients on the machine map.

    If two clients lack an object, one fetches it, and the other one waits for it, so a read may take as long as a fetch
    from the store.

    Args:
        text: setting ``cluster=``.
        is_shared: whether other clients need the same objects at about the same time; default False.
        passes: whether objects get no place, and are dropped when newer ones need room; default False.
        registry: where the machines of the job find each other; default None: the job has one machine.
        open_node: connects to the process of this machine.
        open_peer: connects to that of another machine.

    Raises:
        ConfigError: the setting is malformed, or the limit is above the memory of the machine or container.
    """

    name = "cluster"

    def __init__(
        self,
        text: str,
        *,
        is_shared: bool = False,
        passes: bool = False,
        registry: Registry | None = None,
        open_node: OpenNode | None = None,
        open_peer: OpenPeer | None = None,
    ) -> None:
        self._spec = ClusterSpec.parse(text)
        self._need = Need.SHARED | Need.PASSING if passes else Need.SHARED if is_shared else Need(0)
        if self._spec.path is None and self._spec.limit_bytes > (machine := inspect_machine()).memory_bytes:
            limited_by = f" ({machine.limited_by})" if machine.limited_by else ""
            raise ConfigError(
                f"cluster={text!r}: there are {format_bytes(machine.memory_bytes)} of memory here{limited_by}; lower "
                "limit=, or use disk:"
            )
        open_this_node, tls = partial(open_node or open_local, self._spec, text), self._spec.tls
        connect_peer = open_peer or partial(open_tcp, tls=tls)
        self._links = PerLoop(
            lambda: _LoopLink(open_this_node, None if registry is None else Peers(registry, connect_peer, tls=tls))
        )

    async def connect(self) -> bool:
        """Wait for the process of this machine, and until the others are known; return whether it is reached."""
        link = self._links.get()
        is_reached = await link.connection() is not None
        await link.settle()
        return is_reached

    def place(self, ref: ObjectRef) -> str:
        """Return the address of the process that has the place of an object; empty for that of this machine."""
        owner = self._links.get().owner(name_of(ref))
        return "" if owner is None else str(owner.address)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object into ``into``; return False if this client is to fetch it, or there is no room for it.

        Raises:
            StoreError: the connection ended meanwhile.
        """
        link, name = self._links.get(), name_of(ref)
        need = self._need
        passing = Frame(Kind.ASK, 0, name, need | Need.PASSING)
        await link.settle()
        owner, node = link.owner(name), await link.connection()
        if self._is_too_large(ref, owner):
            return False
        if owner is None:
            return await self._read_from_owner(link, node, ref, need, into)
        # If others of this machine need it, too, one of them asks the owner.
        if node is not None and self._need and await node.read(passing, into):
            return True
        is_here = await self._read_from_owner(link, await link.connection_to(owner), ref, need, into)
        if is_here and node is not None and node.has_lease(name):
            link.give(node, name, into)
        return is_here

    async def _read_from_owner(
        self, link: _LoopLink, owner: Connection | None, ref: ObjectRef, need: Need, into: memoryview
    ) -> bool:
        """Copy an object from its owner, or from the one that would own it if members had not joined or left."""
        name = name_of(ref)
        if owner is None:
            return False
        if await owner.read(Frame(Kind.ASK, 0, name, need), into):
            return True
        if not owner.has_lease(name):
            return False
        try:
            is_here = await self._read_from_earlier(link, ref, into)
        except BaseException:
            owner.release(name)
            raise
        if is_here:
            link.give(owner, name, into)
        return is_here

    async def _read_from_earlier(self, link: _LoopLink, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object from a member that had its place before."""
        name = name_of(ref)
        for earlier in link.earlier_owners(name):
            try:
                async with asyncio.timeout(PEEK_SECONDS):
                    connection = await link.connection_to(earlier)
                    if connection is None or not connection.is_responsive():
                        continue
                    if await connection.read(Frame(Kind.PEEK, 0, name), into) and crc32c(into) == ref.crc32c:
                        return True
            except (TimeoutError, StoreError):
                continue
        return False

    async def peek(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object into ``into``; return False if it is not here. This client will not give it.

        Raises:
            StoreError: the connection ended meanwhile.
        """
        link, name = self._links.get(), name_of(ref)
        connection = await link.connection_to(link.owner(name))
        return connection is not None and await connection.read(Frame(Kind.PEEK, 0, name), into)

    async def find(self, ref: ObjectRef) -> Found:
        """Return an object's bytes in the memory of this machine's process, or whether it has room for the object.

        A process that does not answer in time has none.

        Raises:
            StoreError: the connection ended meanwhile.
        """
        link, name = self._links.get(), name_of(ref)
        await link.settle()
        connection = await link.connection(_SOON_SECONDS)
        owner = link.owner(name)
        if ref.size_bytes > self._limit_bytes(owner):
            return NOT_FOUND
        if owner is not None or (connection is not None and not connection.is_mapped):
            return Found(None, is_remote=True)
        return NOT_FOUND if connection is None else await connection.find(name)

    async def read_parts(self, parts: Sequence[ObjectPart], into: memoryview) -> Sequence[Presence]:
        """Copy parts of objects that are not mapped: each process gets one request, or several for many bytes.

        When the call ends in any way, nothing writes to ``into`` any more.
        """
        link = self._links.get()
        found = [Presence.UNAVAILABLE] * len(parts)
        owners: dict[str, Member | None] = {}
        asked: dict[str, tuple[Member | None, list[int]]] = {}
        for number, (ref, part) in enumerate(parts):
            if ref.key not in owners:
                owners[ref.key] = link.owner(name_of(ref))
            if part.size_bytes <= MAX_PARTS_BYTES:
                owner = owners[ref.key]
                asked.setdefault("" if owner is None else owner.label, (owner, []))[1].append(number)

        async def read(owner: Member | None, numbers: Sequence[int]) -> None:
            connection = await link.connection_to(owner, PEEK_SECONDS)
            for some in split_request(numbers, parts):
                if connection is None or not connection.is_responsive():
                    return
                try:
                    found_there = await _read_parts(connection, [parts[number] for number in some], into)
                except StoreError:  # others are asked, and the store is
                    return
                for number, presence in zip(some, found_there, strict=True):
                    found[number] = presence

        async with task_group() as group:
            for owner, numbers in asked.values():
                group.create_task(read(owner, numbers))
        return found

    def _limit_bytes(self, owner: Member | None) -> int:
        return self._spec.limit_bytes if owner is None else owner.limit_bytes

    def _is_too_large(self, ref: ObjectRef, owner: Member | None) -> bool:
        return ref.size_bytes > self._limit_bytes(owner) and not self._need

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Give an object to its owner, if this client has fetched it for all, or the owner still lacks it."""
        link, name = self._links.get(), name_of(ref)
        owner = link.owner(name)
        present = link.present_of(owner)
        for connection in link.connections():  # whose clients wait for it: of this machine, or of its owner before
            if connection is not present and connection.has_lease(name):
                link.give(connection, name, data)
        if present is not None and not self._is_too_large(ref, owner):
            link.give(present, name, data, self._need if self._need & Need.PASSING else 0)

    def decline(self, ref: ObjectRef) -> None:
        """Give nothing for an object that could not be fetched: the next client that waits fetches it."""
        for connection in self._links.get().connections():
            connection.release(name_of(ref))

    def is_responsive(self, ref: ObjectRef) -> bool:
        """Return whether an object's owner has answered its requests, also those that wait for another client."""
        link = self._links.get()
        connection = link.present_of(link.owner(name_of(ref)))
        return not link.is_settled or (connection is not None and connection.is_responsive())

    def reject(self, ref: ObjectRef) -> None:
        """Have the processes forget an object whose bytes were wrong."""
        for connection in self._links.get().connections():
            connection.reject(name_of(ref))

    async def close(self) -> None:
        """End the running loop's connections. Idempotent."""
        if (link := self._links.pop()) is not None:
            await link.close()


def split_request(numbers: Sequence[int], parts: Sequence[ObjectPart]) -> Iterator[list[int]]:
    """Yield the numbers of parts that one request may have: of a size that takes little time and memory."""
    some: list[int] = []
    size_bytes = 0
    for number in numbers:
        size_bytes += parts[number].part.size_bytes
        if some and (size_bytes > _REQUEST_BYTES or len(some) == _REQUEST_PARTS):
            yield some
            some, size_bytes = [], parts[number].part.size_bytes
        some.append(number)
    yield some


async def _read_parts(connection: Connection, parts: Sequence[ObjectPart], into: memoryview) -> list[Presence]:
    """Copy parts of objects of one process.

    Raises:
        StoreError: the connection has ended, or the answer makes no sense.
    """
    kinds, data = await connection.read_parts([(name_of(ref), part.start, part.end) for ref, part in parts])
    found = [_PRESENCE.get(kind, Presence.UNAVAILABLE) for kind in kinds]
    copied = [part for (_, part), presence in zip(parts, found, strict=True) if presence is Presence.COPIED]
    sizes = [part.size_bytes for part in copied]
    if sum(sizes) != len(data):
        raise StoreError(f"{len(data)} bytes for parts of {sum(sizes)} bytes came from a cache process")
    position = 0
    for part in copied:
        into[part.offset : part.offset + part.size_bytes] = data[position : position + part.size_bytes]
        position += part.size_bytes
    return found


class _LoopLink:
    """The connections of one event loop; each is made at its first use, and again when it was lost.

    Args:
        open_node: connects to the process of this machine.
        peers: the other machines; None if there are none.
    """

    def __init__(self, open_node: Callable[[], Awaitable[Connection]], peers: Peers | None) -> None:
        self._peers, self._open_node = peers, open_node
        self._node = Link(self._open, _warn_of_node, retry_seconds=_RETRY_SECONDS, max_retry_seconds=_MAX_RETRY_SECONDS)

    @property
    def present(self) -> Connection | None:
        """The connection to this machine's process, if there is one."""
        return self._node.present

    async def connection(self, within_seconds: float = math.inf) -> Connection | None:
        """Return the connection to this machine's process; see :meth:`Link.connection`."""
        return await self._node.connection(within_seconds)

    async def _open(self) -> Connection:
        connection = await self._open_node()
        if self._peers is not None:
            self._peers.enter(connection)
        return connection

    # The owners of objects: None is this machine's process.

    @property
    def is_settled(self) -> bool:
        """Whether the machines of the job are known, or were waited for."""
        return self._peers is None or self._peers.is_settled

    async def settle(self) -> None:
        """Wait until the machines of the job are known, for a limited time."""
        if self._peers is None or self._peers.is_settled:
            return
        if await self.connection(_SOON_SECONDS) is not None:
            await self._peers.settle()

    def owner(self, name: str) -> Member | None:
        """Return the member that has the place of an object."""
        return next(iter(self._owners(name)), None)

    def earlier_owners(self, name: str) -> Sequence[Member | None]:
        """Return the members that had the place of an object if others have joined or come back since, latest first."""
        owners = self._owners(name)
        return [*owners[1:], *([None] if owners and None not in owners else [])]

    def _owners(self, name: str) -> list[Member | None]:
        peers = self._peers
        return [] if peers is None else [None if peers.is_own(each) else each for each in peers.owners(name)]

    async def connection_to(self, owner: Member | None, within_seconds: float = math.inf) -> Connection | None:
        """Return the connection to an owner, which is made if need be; None if it is not reached in time."""
        if owner is None or self._peers is None:
            return await self.connection(within_seconds)
        return await self._peers.connection(owner, within_seconds)

    def present_of(self, owner: Member | None) -> Connection | None:
        """Return the connection to an owner, if there is one."""
        return self.present if owner is None or self._peers is None else self._peers.present(owner)

    def connections(self) -> list[Connection]:
        """Return all present connections."""
        own = [] if self.present is None else [self.present]
        return own if self._peers is None else own + self._peers.connections()

    def give(self, connection: Connection, name: str, data: memoryview, need: int = 0) -> None:
        """Give an object to a process, if the memory of objects on their way to all of them allows."""
        others = sum(each.held_bytes for each in self.connections() if each is not connection)
        connection.give(name, data, need=need, other_bytes=others)

    async def close(self) -> None:
        """End all connections."""
        if self._peers is not None:
            await self._peers.close()
        await self._node.close()


def _warn_of_node(problem: str) -> None:
    _log.warning("objects are read from the bucket, without the cache of this machine: %s", problem)


async def open_local(spec: ClusterSpec, text: str) -> Connection:
    """Connect to the process of this machine; see :data:`OpenNode`."""
    link = await run_in_thread(partial(connect, spec, text))
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(link.arena), sock=link.connection
        )
    except BaseException:
        link.connection.close()
        raise
    connection.send(Frame(Kind.OPEN, number=int(link.arena is not None)))
    return connection
