"""Which objects a cache process has, and who fetches those that it lacks: decisions only, no I/O.

The first client that asks for an object gets a **lease**: it fetches the object from the bucket as it would without the
cache, and gives it to the process. Others that ask meanwhile wait for it. So each object is fetched once, with the
client's own credentials, retries and hedges. If the lease ends early, by a lost client or a time limit, the client that
has waited longest gets the next one.

An object keeps its place for the life of the process: clients read it from memory that they share. Once all places are
taken, an object that several clients need at the same time **passes**: it has memory of its own, and is dropped when
newer ones need room.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker._cache.index import size_of

_ALIGNMENT_BYTES = 4096

Client = Hashable


class Decision(enum.Enum):
    """Answer to a client that asks for an object."""

    HIT = enum.auto()
    """The object is here."""
    LEASE = enum.auto()
    """The client fetches the object, and gives it."""
    LACKING = enum.auto()
    """The object is not here, and the client is not to give it, since it has only peeked. There is room for it."""
    FULL = enum.auto()
    """The object is not here, and there is no room for it."""


class Reply(NamedTuple):
    """An answer to be sent.

    Attributes:
        client: client that asked.
        request: number of its request.
        decision: the answer.
        place: where the object is, if it is here: an offset, or its own memory if it passes.
    """

    client: Client
    request: int
    decision: Decision
    place: int | bytearray = 0


@dataclass(slots=True, eq=False)
class _Object:
    """An object with a place.

    Attributes:
        place: its offset in memory, or memory of its own, empty until it arrives.
        is_here: whether its bytes are there.
        owner: client with the lease; None if nobody has it.
        lease: number of the lease.
        is_arriving: whether the owner is giving it.
        waiting: requests that wait for it, with their clients, the oldest first.
    """

    place: int | bytearray
    is_here: bool = False
    owner: Client | None = None
    lease: int = 0
    is_arriving: bool = False
    waiting: dict[tuple[Client, int], None] = field(default_factory=dict)


class Catalog:
    """The objects of a cache process.

    Args:
        limit_bytes: size of its memory.
        passing_bytes: maximum size of objects that pass, beside that and those that arrive; default 0: none passes.

    Attributes:
        used_bytes: bytes of the memory that objects have.
        hits: number of requests for objects that were here.
    """

    def __init__(self, limit_bytes: int, passing_bytes: int = 0) -> None:
        self._limit_bytes, self._passing_bytes = limit_bytes, passing_bytes
        self._objects: dict[str, _Object] = {}
        self._passing: dict[str, int] = {}  # sizes, the oldest first
        self._leases = 0
        self.used_bytes = self.hits = 0

    def ask(
        self, client: Client, request: int, name: str, *, is_shared: bool = False, passes: bool = False
    ) -> Reply | None:
        """Answer a request; None if it waits for a lease, of another client or of an earlier request.

        ``is_shared`` says that other clients need the object at about the same time, ``passes`` that it gets no place.
        """
        found = self._objects.get(name)
        if found is None:
            found = None if passes else self._place(name)
            found = found or (self._let_pass(name) if is_shared and self._passing_bytes else None)
            if found is None:
                return Reply(client, request, Decision.FULL)
        if found.is_here:
            self.hits += 1
            return Reply(client, request, Decision.HIT, found.place)
        if found.owner is None:
            return self._grant(found, client, request)
        found.waiting[client, request] = None
        return None

    def peek(self, client: Client, request: int, name: str) -> Reply:
        """Answer a request that gets no lease and does not wait; an object that passes is not here."""
        found = self._objects.get(name)
        if name in self._passing:
            return Reply(client, request, Decision.FULL)
        if found is not None and found.is_here:
            self.hits += 1
            return Reply(client, request, Decision.HIT, found.place)
        has_room = found is not None or self.used_bytes + _place_bytes(name) <= self._limit_bytes
        return Reply(client, request, Decision.LACKING if has_room else Decision.FULL)

    def lease_of(self, client: Client, name: str) -> int | None:
        """Return the number of a client's lease; None if it has none."""
        found = self._objects.get(name)
        return None if found is None or found.owner is not client else found.lease

    def begin(self, client: Client, name: str) -> int | bytearray | None:
        """Return the place for an object that a client begins to give; None if the client has no lease for it."""
        found = self._objects.get(name)
        if found is None or found.owner is not client:
            return None
        found.is_arriving = True
        if name in self._passing:
            size_bytes = size_of(name)
            self._make_room(size_bytes)
            del self._passing[name]  # now it is the newest
            self._passing[name] = size_bytes
            found.place = bytearray(size_bytes)
        return found.place

    def complete(self, client: Client, name: str) -> list[Reply]:
        """Record that an object has arrived; return the replies to those who wait for it."""
        found = self._objects[name]
        found.is_here, found.is_arriving, found.owner = True, False, None
        waiting, found.waiting = found.waiting, {}
        self.hits += len(waiting)
        return [Reply(other, request, Decision.HIT, found.place) for other, request in waiting]

    def release(self, client: Client, name: str) -> list[Reply]:
        """End a client's lease, unless it is giving the object; return the reply to the next one that waits."""
        found = self._objects.get(name)
        if found is None or found.owner is not client or found.is_arriving:
            return []
        return list(self._pass_on(name, found))

    def is_arriving(self, name: str) -> bool:
        """Return whether a client is giving an object."""
        found = self._objects.get(name)
        return found is not None and found.is_arriving

    def cancel(self, client: Client, request: int, name: str) -> None:
        """Remove a request that waits."""
        found = self._objects.get(name)
        if found is not None:
            found.waiting.pop((client, request), None)

    def stop_adding(self, name: str) -> list[Reply]:
        """Give no more places: the system has no memory for this object. Return the replies to those that wait."""
        self._limit_bytes = self.used_bytes
        return [Reply(client, request, Decision.FULL) for client, request in self._objects.pop(name).waiting]

    def reject(self, name: str) -> None:
        """Remove an object whose bytes are wrong; its place is for the same object."""
        found = self._objects.get(name)
        if found is not None and found.is_here:
            found.is_here = False
            self._drop_if_unused(name, found)

    def forget(self, client: Client) -> list[Reply]:
        """Remove a client that was lost, its requests and leases; return the replies to others."""
        replies: list[Reply] = []
        for name, found in list(self._objects.items()):
            for each in [each for each in found.waiting if each[0] is client]:
                del found.waiting[each]
            if found.owner is client:
                found.is_arriving = False
                replies += self._pass_on(name, found)
        return replies

    def _place(self, name: str) -> _Object | None:
        size_bytes = _place_bytes(name)
        if self.used_bytes + size_bytes > self._limit_bytes:
            return None
        found = self._objects[name] = _Object(self.used_bytes)
        self.used_bytes += size_bytes
        return found

    def _let_pass(self, name: str) -> _Object:
        """Return a new object that passes; it takes no memory before it arrives."""
        found = self._objects[name] = _Object(bytearray())
        self._passing[name] = 0
        return found

    def _make_room(self, size_bytes: int) -> None:
        """Drop the oldest objects that pass, but none that is not here yet, so that another one fits."""
        left = sum(self._passing.values()) + size_bytes - self._passing_bytes
        for name, held_bytes in list(self._passing.items()):
            if left <= 0:
                break
            if self._objects[name].is_here:
                del self._objects[name], self._passing[name]
                left -= held_bytes

    def _drop_if_unused(self, name: str, found: _Object) -> None:
        """Forget an object that passes and that nobody has, fetches or waits for."""
        if name in self._passing and not found.is_here and found.owner is None:
            del self._objects[name], self._passing[name]

    def _grant(self, found: _Object, client: Client, request: int) -> Reply:
        self._leases += 1
        found.owner, found.lease = client, self._leases
        return Reply(client, request, Decision.LEASE)

    def _pass_on(self, name: str, found: _Object) -> Iterator[Reply]:
        found.owner = None
        if found.waiting:
            client, request = next(iter(found.waiting))
            del found.waiting[client, request]
            yield self._grant(found, client, request)
        self._drop_if_unused(name, found)


def _place_bytes(name: str) -> int:
    """Return the size of the place of an object."""
    return -(-size_of(name) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
