"""What a proxy answers to clients that have no proxy of their own: trainers, and people at a terminal.

Memory is bounded however many they are and whatever they do. Objects are read into memory that is lent and used again;
whoever asks while all of it is lent waits for his turn. An object that several want is read from the nodes once. What
clients offer is received only if there is room for it, and refused otherwise.

Memory that is lent comes back by itself, once nobody refers to it any more. What is read for several clients at once is
sent to each at its own pace, and who will be the last to need it is not known before. The interpreter knows: views keep
what is behind them alive, and its end is noticed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVarTuple

import numpy as np

from stoker._base.checksum import crc32c
from stoker._cache.keeper import is_name, size_of
from stoker._memory.budget import ByteBudget
from stoker.errors import ConfigError, WireError
from stoker_warm._connection import Connection
from stoker_warm._frames import MAX_BODY_BYTES, Head, Kind
from stoker_warm._proxy import Proxy
from stoker_warm._requests import Answer

Ts = TypeVarTuple("Ts")

_LEAST_BYTES = 4096


class Lent(NamedTuple):
    """Memory of a pool.

    Attributes:
        memory: of whatever content.
        give_back: gives it back before its last view is gone, once nobody uses these any more: the frames of a task
            that was cancelled may be around for long. Idempotent.
    """

    memory: memoryview
    give_back: Callable[[], object]


class MemoryPool:
    """Lends memory of any size, and uses it again; belongs to one event loop.

    All that is lent out and kept for later is ``limit_bytes`` at most. Who asks for more waits, in order of arrival.

    Args:
        limit_bytes: of all memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)
        self._spare: list[bytearray] = []
        self._spare_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """What others have now; sizes are rounded up, by a quarter at most."""
        return self._budget.held

    @property
    def most_bytes(self) -> int:
        """The size of the largest memory that can be had."""
        return self._budget.limit

    async def take(self, size_bytes: int) -> Lent:
        """Return memory, after waiting for it. It is taken back when no view of it is left.

        Raises:
            BudgetError: there is never so much.
        """
        if not size_bytes:
            return Lent(memoryview(bytearray()), bytes)
        rounded = min(_rounded(size_bytes), max(size_bytes, self._budget.limit))
        await self._budget.acquire(rounded)
        memory = self._spare_of(rounded)
        array = np.frombuffer(memory, np.uint8, size_bytes)
        return Lent(array.data, _when_gone(array, self._back, memory))

    def _spare_of(self, size_bytes: int) -> bytearray:
        for place, memory in enumerate(self._spare):
            if len(memory) == size_bytes:
                self._spare_bytes -= size_bytes
                return self._spare.pop(place)
        while self._spare and self._budget.held + self._spare_bytes > self._budget.limit:
            self._spare_bytes -= len(self._spare.pop(0))
        return bytearray(size_bytes)

    def _back(self, memory: bytearray) -> None:
        self._spare.append(memory)
        self._spare_bytes += len(memory)
        self._budget.release(len(memory))


class MemoryAccount:
    """Makes memory that is counted for as long as it exists; belongs to one event loop.

    Args:
        limit_bytes: of all memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory, None if it would be too much in all."""
        if self.held_bytes + size_bytes > self._limit_bytes:
            return None
        self.held_bytes += size_bytes
        made = _Counted(size_bytes)
        _when_gone(made, self._gone, size_bytes)
        return made

    def _gone(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


class _Counted(bytearray):
    """Memory whose end can be noticed, which that of a bytearray cannot."""


def _when_gone(thing: object, call: Callable[[*Ts], None], *args: *Ts) -> Callable[[], object]:
    """Call something from the running loop once nothing refers to a thing any more, or what is returned was called.

    That may come to pass in a thread, or in the middle of anything; what is called is called between two things.
    """
    loop = asyncio.get_running_loop()

    def gone() -> None:
        with suppress(RuntimeError):  # the loop is closed, and what it served with it
            loop.call_soon_threadsafe(call, *args)

    finalizer = weakref.finalize(thing, gone)
    finalizer.atexit = False
    return finalizer


def _rounded(size_bytes: int) -> int:
    """Return the size rounded up to a quarter of a power of two, so that few sizes are in use."""
    step = max(_LEAST_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step


_LEAVE_SECONDS = 0.1
"""Between the answer that all is shut down and the end of the proxy, with which the answer must not be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits of what clients take up.

    Attributes:
        read_bytes: of objects that were read for them and are not with them yet; a larger one is never found.
        offer_bytes: of objects that they offer, from the first byte on until they are with nodes.

    Raises:
        ConfigError: one is not positive.
    """

    read_bytes: int = 256 << 20
    offer_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("read_bytes", "offer_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a proxy's server is at least 1, not {getattr(self, name)}")


class ProxyServer:
    """Answers clients of one proxy; on its event loop.

    Args:
        proxy: of the objects.
        config: limits.
    """

    def __init__(self, proxy: Proxy, config: ServerConfig | None = None) -> None:
        self._proxy, self._config = proxy, config or ServerConfig()
        self._memory = MemoryPool(self._config.read_bytes)
        self._offers = MemoryAccount(self._config.offer_bytes)
        self._flights: dict[str, _Flight] = {}
        # What was read stays of use until it is with the last client that wanted it.
        self._recent: weakref.WeakValueDictionary[str, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
        self.is_down = asyncio.Event()
        """Is set once a client has asked for the tier to be shut down, and nodes have been told."""

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory for an object that is offered; None if there is none now."""
        return self._offers.room(size_bytes)

    async def answer(self, connection: Connection, kind: Kind, head: Head, body: bytearray) -> Answer:
        """Answer a request of a client.

        Raises:
            WireError: it makes no sense.
        """
        match kind:
            case Kind.READ:
                return await self._read(_object(head))
            case Kind.OFFER:
                return self._take(_object(head), body)
            case Kind.STATUS:
                status = await self._proxy.status(wakes=head.get("wake") == 1)
                return Kind.LISTED, status | {"lent_bytes": self._memory.lent_bytes}, ()
            case Kind.DOWN:
                problems = await self._proxy.down(forgets=head.get("forget") == 1)
                asyncio.get_running_loop().call_later(_LEAVE_SECONDS, self.is_down.set)
                return Kind.BYE, {"problems": problems}, ()
        raise WireError(f"{kind.name} is not asked of a proxy")

    async def _read(self, name: str) -> Answer:
        if size_of(name) > min(MAX_BODY_BYTES, self._memory.most_bytes):
            return Kind.MISSING, {}, ()
        array, flight = self._recent.get(name), self._flights.get(name)
        if array is not None:
            self._proxy.delivered(len(array))
            return Kind.FOUND, {}, (array.data,)
        is_first = flight is None
        if flight is None:
            if self._proxy.lacks(name):
                return Kind.MISSING, {}, ()
            flight = self._flights[name] = _Flight(asyncio.ensure_future(self._fetched(name)))
            flight.task.add_done_callback(lambda _: self._landed(name, flight))
        flight.waiting += 1
        try:
            memory = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._landed(name, flight)  # who comes now must not wait for what is being cancelled
                flight.task.cancel()
        if memory is None:
            return Kind.MISSING, {}, ()
        if not is_first:
            self._proxy.delivered(len(memory))
        return Kind.FOUND, {}, (memory,)

    def _landed(self, name: str, flight: _Flight) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]

    async def _fetched(self, name: str) -> memoryview | None:
        memory, give_back = await self._memory.take(size_of(name))
        is_read = False
        try:
            is_read = await self._proxy.read(name, memory)
        finally:
            if not is_read:
                give_back()
        if not is_read:
            return None
        if isinstance(memory.obj, np.ndarray):
            self._recent[name] = memory.obj
        return memory

    def _take(self, name: str, body: bytearray) -> Answer:
        if len(body) != size_of(name):
            return Kind.REFUSED, {"reason": "its name tells another size" if body else "no room"}, ()
        if crc32c(body) != int(name[:8], 16):
            return Kind.REFUSED, {"reason": "damaged"}, ()
        return (Kind.STORED, {}, ()) if self._proxy.take(name, body) else (Kind.REFUSED, {"reason": "no room"}, ())


@dataclass(slots=True)
class _Flight:
    """A read of nodes, and how many wait for it."""

    task: asyncio.Future[memoryview | None]
    waiting: int = 0


def _object(head: Head) -> str:
    name = head.get("object")
    if not isinstance(name, str) or not is_name(name):
        raise WireError(f"{name!r:.60} is no name of an object")
    return name
