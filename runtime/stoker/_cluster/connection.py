"""A loader's side of a connection to a cache process, of this machine or another one."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import count

from stoker._cache.index import NOT_FOUND, Found, size_of
from stoker._cluster.frames import (
    MAC_BYTES,
    MAX_PARTS_BYTES,
    MAX_TEXT_BYTES,
    NONCE_BYTES,
    PART,
    PROTOCOL,
    Frame,
    FrameProtocol,
    Kind,
)
from stoker._cluster.secret import ClusterSecret
from stoker.errors import ConnectionLostError, StoreError

_CLOSE_SECONDS = 1.0
"""Time in which a process that takes none of the objects on their way, or answers no request for a lease of one, is
not waited for when a loader is closed."""
UNSENT_BYTES, _MAX_COPIES = 64 << 20, 2
"""Bytes of objects on their way to the process, and number of objects that are not asked for yet, beyond which no more
are given to it."""
_SMALL_BYTES = 4096
"""Size up to which an object is given in any case."""
SILENT_SECONDS = 0.5
"""Time after which a process that has not answered is not responsive, beside the time of bytes that were to be sent."""
_LEAST_BYTES_PER_SECOND = 50e6
"""Rate at which a process is expected to take bytes, at least."""


class Connection(FrameProtocol):
    """The client's side of a connection.

    Args:
        arena: memory of the process; None if objects are sent.
        secret: secret that both sides prove; None on this machine, where the system keeps others out.
    """

    def __init__(self, arena: memoryview | None = None, secret: ClusterSecret | None = None) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self._arena, self._secret, self._nonces, self._numbers = arena, secret, b"", count(1)
        self._requests: dict[int, tuple[memoryview | None, asyncio.Future[tuple[Frame, memoryview]]]] = {}
        self._unanswered: dict[int, float] = {}
        self._leases: set[str] = set()
        self._copies: dict[str, tuple[int, bytes]] = {}  # with the request for a lease
        self._answered = asyncio.Event()  # one of these requests, or the connection has ended
        self._places: dict[str, int] = {}  # objects that were found: each keeps its place
        self._refused: set[str] = set()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._proven: asyncio.Future[None] = loop.create_future()
        self.is_lost = False

    # Between machines.

    async def prove(self, within_seconds: float) -> None:
        """Wait until both sides have proved that they have the secret.

        Raises:
            ConnectionLostError: the other side has another secret, is of another release, or does not answer.
        """
        await asyncio.wait([self._proven, self._ended], timeout=within_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._proven.done() or self.is_lost:
            self.abort()
            raise ConnectionLostError(
                "the cache process there does not answer"
                if not self._ended.done()
                else "the cache process there refuses this loader: another secret, or another release of stoker"
            )

    @property
    def _fingerprint(self) -> str:
        """SHA-256 of the certificate of the connection; empty without TLS."""
        security = None if self.transport is None else self.transport.get_extra_info("ssl_object")
        return "" if security is None else sha256(security.getpeercert(binary_form=True)).hexdigest()

    async def send_and_receive(self, kind: Kind, text: bytes) -> bytes:
        """Send a text, and return that of the answer.

        Raises:
            ConnectionLostError: the connection has ended.
        """
        _, body = await self._request(Frame(kind, number=len(text)), text=text)
        return bytes(body)

    # Objects.

    async def read(self, asked: Frame, into: memoryview) -> bool:
        """Ask for an object, and copy it; return False if the process does not have it.

        Raises:
            ConnectionLostError: the connection has ended.
        """
        arena = self._arena
        if arena is None or (place := self._places.get(asked.name)) is None:
            answer, _ = await self._request(asked, into)
            if answer.kind is not Kind.HIT or arena is None:
                return answer.kind in (Kind.HIT, Kind.PASS)
            place = self._places[asked.name] = answer.number
        into[:] = arena[place : place + len(into)]
        return True

    def has_lease(self, name: str) -> bool:
        """Return whether this client is to fetch an object for all."""
        return name in self._leases

    @property
    def is_mapped(self) -> bool:
        """Whether the objects of the process are in memory of this one."""
        return self._arena is not None

    async def find(self, name: str) -> Found:
        """Return an object's memory, or whether there is room for it; neither if it is not mapped, or in no answer."""
        arena = self._arena
        if arena is None or name in self._refused:
            return NOT_FOUND
        place = self._places.get(name)
        if place is None:
            if not self.is_responsive():
                return NOT_FOUND
            try:
                async with asyncio.timeout(self._patience_seconds()):
                    answer, _ = await self._request(Frame(Kind.PEEK, name=name))
            except TimeoutError:
                return NOT_FOUND
            if answer.kind is not Kind.HIT:
                if answer.kind is Kind.FULL:
                    self._refused.add(name)
                return Found(None, has_room=answer.kind is Kind.LACKING)
            place = self._places[name] = answer.number
        return Found(arena[place : place + size_of(name)])

    async def _request(
        self, asked: Frame, into: memoryview | None = None, text: bytes = b""
    ) -> tuple[Frame, memoryview]:
        """Send a request, and return the answer and its body, which is in ``into`` if it is an object."""
        if self.is_lost:
            raise ConnectionLostError("the connection to the cache process has ended")
        request, name = next(self._numbers), asked.name
        answer: asyncio.Future[tuple[Frame, memoryview]] = asyncio.get_running_loop().create_future()
        self._requests[request] = into, answer
        self._unanswered[request] = asyncio.get_running_loop().time()
        self.send(asked._replace(request=request), text)
        try:
            return await answer
        except asyncio.CancelledError:
            came = None if answer.cancelled() or answer.exception() else answer.result()  # with the cancellation
            if came is not None and came[0].kind is Kind.LEASE:
                self.release(name)
            raise
        finally:
            if self._requests.pop(request, None) is not None:  # cancelled: a lease that comes now is given back
                self.skip_body(request)
                if name:
                    self.send(Frame(Kind.CANCEL, request, name))

    async def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> tuple[bytes, memoryview]:
        """Ask for parts of objects.

        Args:
            parts: names of the objects, and offsets of the first byte and behind the last one.

        Returns:
            The kind of answer for each part, a byte each, and those that are here, one after the other. None is here if
            the process does not answer in time.

        Raises:
            StoreError: the connection has ended, or the answer makes no sense.
        """
        listed = b"".join(PART.pack(name.encode("ascii"), start, end) for name, start, end in parts)
        try:
            size_bytes = sum(end - start for _, start, end in parts)
            async with asyncio.timeout(self._patience_seconds() + size_bytes / _LEAST_BYTES_PER_SECOND):
                answer, body = await self._request(Frame(Kind.PARTS, number=len(listed)), text=listed)
        except TimeoutError:
            return bytes([Kind.FULL]) * len(parts), memoryview(b"")
        if answer.kind is not Kind.RANGES or len(body) < len(parts):
            raise StoreError(
                f"the cache process answered {answer.kind.name} of {len(body)} bytes to {len(parts)} parts"
            )
        return bytes(body[: len(parts)]), body[len(parts) :]

    @property
    def held_bytes(self) -> int:
        """Memory of objects on their way to the process, in bytes."""
        return self.unsent_bytes + sum(len(copy) for _, copy in self._copies.values())

    def give(self, name: str, data: memoryview, *, need: int = 0, other_bytes: int = 0) -> None:
        """Give an object for which this client has a lease; else ask for one first.

        Args:
            name: name of the object.
            data: the object, which is copied.
            need: what the request for a lease says; see :class:`~stoker._cluster.frames.Need`.
            other_bytes: memory of objects on their way to other processes.
        """
        if self.is_lost or self.transport is None:
            return
        held_bytes = self.held_bytes + other_bytes
        if held_bytes and len(data) > _SMALL_BYTES and held_bytes + len(data) > UNSENT_BYTES:
            self.release(name)
        elif name in self._leases:
            self._leases.discard(name)
            self.send(Frame(Kind.GIVE, 0, name), bytes(data))
        elif name not in self._copies and len(self._copies) < _MAX_COPIES:
            request = next(self._numbers)
            self._copies[name] = request, bytes(data)
            self.send(Frame(Kind.ASK, request, name, need))

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

    # What the process sends.

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        if frame.kind in (Kind.CHALLENGE, Kind.WELCOME):
            return self._proof_memory(frame)
        self._unanswered.pop(frame.request, None)
        if frame.kind is Kind.WAIT:
            return 0, None
        into, answer = self._requests.get(frame.request, (None, None))
        if frame.kind in (Kind.LISTENS, Kind.MEMBERS):
            return self.text_memory(frame)
        if frame.kind is Kind.RANGES:
            size_bytes, body = self.text_memory(frame, MAX_PARTS_BYTES + MAX_TEXT_BYTES)
            return size_bytes, None if answer is None else body  # nobody waits for it
        number, copy = self._copies.get(frame.name, (None, b""))
        if number == frame.request:
            del self._copies[frame.name]
            self._answered.set()
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
        self._answer(frame, memoryview(b""))
        return 0, None

    def _proof_memory(self, frame: Frame) -> tuple[int, memoryview]:
        is_expected = (frame.kind is Kind.WELCOME) == bool(self._nonces)
        if self._secret is None or self._proven.done() or not is_expected or frame.number != PROTOCOL:
            raise ValueError(f"the process sent {frame.kind.name} of release {frame.number}")
        return self.text_memory(frame._replace(number=NONCE_BYTES if frame.kind is Kind.CHALLENGE else MAC_BYTES))

    def body_received(self, frame: Frame, body: memoryview) -> None:
        if frame.kind not in (Kind.CHALLENGE, Kind.WELCOME):
            self._answer(frame, body)
            return
        assert self._secret is not None  # noqa: S101 - else the frame was refused
        if frame.kind is Kind.CHALLENGE:
            own = secrets.token_bytes(NONCE_BYTES)
            self._nonces = bytes(body) + own
            self.send(Frame(Kind.PROVE), own + self._secret.proof("client", self._nonces, self._fingerprint))
        elif self._secret.is_proof(bytes(body), "process", self._nonces, self._fingerprint):
            self._proven.set_result(None)
        else:
            raise ValueError("the process does not have the secret")

    def _answer(self, frame: Frame, body: memoryview) -> None:
        _, answer = self._requests.pop(frame.request, (None, None))
        if answer is not None and not answer.done():
            answer.set_result((frame, body))

    # Life.

    def is_responsive(self) -> bool:
        """Return whether the process has answered the requests that it has had time for."""
        oldest = min(self._unanswered.values(), default=math.inf)
        return not self.is_lost and asyncio.get_running_loop().time() - oldest < self._patience_seconds()

    def _patience_seconds(self) -> float:
        """Return how long an answer may take: it comes behind what is sent before the request."""
        return SILENT_SECONDS + self.unsent_bytes / _LEAST_BYTES_PER_SECOND

    async def close(self) -> None:
        """End the connection, once what was given has arrived."""
        try:
            with suppress(TimeoutError):
                while self._copies:
                    self._answered.clear()
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await self._answered.wait()
            if self.transport is not None and not self.is_lost:
                self.end()
                before_bytes, unsent_bytes = math.inf, self.unsent_bytes
                while not self._ended.done() and unsent_bytes < before_bytes:
                    await asyncio.wait([self._ended], timeout=_CLOSE_SECONDS)
                    before_bytes, unsent_bytes = unsent_bytes, self.unsent_bytes
        finally:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_lost = True
        self._arena = None  # its memory is freed with its last mapping
        self._copies.clear()
        self._answered.set()
        self._leases.clear()
        self._ended.set_result(None)
        requests, self._requests = self._requests, {}
        for _, answer in requests.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError("the cache process has ended"))
