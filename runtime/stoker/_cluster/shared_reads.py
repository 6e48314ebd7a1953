"""Objects whose content is not known before, such as the newest manifest: read from the store once for a job.

The first loader of a machine that asks gets a lease at the cache process, as for a super-sample. It takes what another
machine has read from values that all machines share, and else reads the store. What it gives to the process is the
object and a **note** of fixed size: when it was read, its size, checksum and hash. A note tells others of the machine
which object to ask for. They accept none that was read before a time of their choice.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple, Protocol, Self

from stoker._base.checksum import crc32c
from stoker._cluster.client import ClusterTier
from stoker.abc import ObjectRef
from stoker.errors import StoreError

PATIENCE_SECONDS, _ELSEWHERE_SECONDS = 5.0, 3.0
"""Times to wait for what others of the machine, and on other machines, read; then the store is read."""
_POLL_SECONDS, _MAX_POLL_SECONDS = 0.02, 0.25
MAX_VALUE_BYTES = 4 << 20
"""Maximum size of a value; torch's store ends the connection of a client that sends more than 8 MiB at a time."""
_MAX_BYTES, _MAX_SHARED_BYTES = 1 << 30, 64 << 20
"""Maximum sizes of an object, and of one that machines share: their store of values is one process."""
_AHEAD_SECONDS = 1.0
"""Time by which a clock may be ahead of another one, so that what was read then is used."""

_DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<dQI{_DIGEST_BYTES}s")
NOTE_BYTES = 2 * (_FIELDS.size + _DIGEST_BYTES)

Read = Callable[[], Awaitable[bytes]]


class SharedValues(Protocol):
    """Values of at most :data:`MAX_VALUE_BYTES` by key, which all machines of a job see."""

    async def get(self, key: str) -> bytes:
        """Return a value; empty if there is none.

        Raises:
            StoreError: the values are out of reach.
        """
        ...

    async def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            StoreError: the values are out of reach.
        """
        ...

    async def replace(self, key: str, before: bytes, value: bytes) -> bool:
        """Set a value if it was ``before``, empty for none; return whether it was.

        Raises:
            StoreError: the values are out of reach.
        """
        ...


class Note(NamedTuple):
    """What is known of an object that was read.

    Attributes:
        read_at: when its reading began, in seconds since the epoch.
        size_bytes: its size; 0 while it is being read.
        crc32c: its checksum.
        digest: hash of its content.
    """

    read_at: float
    size_bytes: int = 0
    crc32c: int = 0
    digest: bytes = bytes(_DIGEST_BYTES)

    @classmethod
    def of(cls, data: bytes | bytearray, read_at: float) -> Self:
        """Return the note of an object."""
        return cls(read_at, len(data), crc32c(data), _hash(data))

    def encode(self, name: str, key: bytes) -> bytes:
        """Return it as ASCII text of fixed size, which only those who have a key can write for a name."""
        fields = _FIELDS.pack(*self)
        return (fields + _hash(fields + name.encode(), key)).hex().encode()

    @classmethod
    def decode(cls, text: bytes | memoryview, name: str, key: bytes) -> Self | None:
        """Return the note of a text; None if it is none."""
        try:
            data = bytes.fromhex(bytes(text).decode("ascii"))
            fields, check = data[: _FIELDS.size], data[_FIELDS.size :]
            note = cls(*_FIELDS.unpack(fields))
        except (ValueError, struct.error):
            return None
        is_right = compare_digest(check, _hash(fields + name.encode(), key)) and note.size_bytes <= _MAX_BYTES
        return note if is_right else None

    def is_of(self, data: bytes | bytearray) -> bool:
        """Return whether it is the note of an object."""
        return len(data) == self.size_bytes and _hash(data) == self.digest

    def ref(self, name: str) -> ObjectRef:
        """Return the object that was read under a name, as tiers know it."""
        return ObjectRef(key=f"{name}/{self.digest.hex()}", size_bytes=self.size_bytes, crc32c=self.crc32c)


def _hash(data: bytes | bytearray, key: bytes = b"") -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES, key=key).digest()


class SharedReads:
    """Reads objects once for the loaders of a job. Belongs to one event loop.

    Args:
        tier: the cache process of this machine, without those of others, where objects pass.
        values: what all machines see; None if the job has one machine.
        key: secret of those who may write notes, of at most 64 bytes; empty: all who reach the process and the values.
        wall_seconds: returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        tier: ClusterTier,
        values: SharedValues | None = None,
        key: bytes = b"",
        wall_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._tier, self._values, self._key, self._wall_seconds = tier, values, key, wall_seconds

    async def read(self, name: str, read: Read, *, not_before: float) -> tuple[bytes, float]:
        """Return an object that a loader of the job has read, or else read it for all.

        Args:
            name: name of the object, equal on all machines, and for no other object.
            read: reads the object from its store.
            not_before: least time at which its reading may have begun, in seconds since the epoch.

        Returns:
            The object, and the time at which its reading began.

        Raises:
            Exception: an error of ``read``.
        """
        note_ref = ObjectRef(key=name, size_bytes=NOTE_BYTES, crc32c=0)
        claim = b""
        try:
            if (found := await self._read_here(name, note_ref, not_before)) is not None:
                return found
            shared = await self._read_elsewhere(name, not_before)
            if isinstance(shared, tuple):
                data, note = shared
            else:
                claim, read_at = shared, self._wall_seconds()
                data = await read()
                note = Note.of(data, read_at)
        except BaseException:
            self._tier.decline(note_ref)
            await self._end_claim(name, claim, b"")
            raise
        self._tier.offer(note.ref(name), memoryview(data))
        self._tier.offer(note_ref, memoryview(note.encode(name, self._key)))
        is_shared = bool(claim) and await self._share(name, data)
        await self._end_claim(name, claim, note.encode(name, self._key) if is_shared else b"")
        return data, note.read_at

    def _is_recent(self, note: Note, not_before: float) -> bool:
        return not_before <= note.read_at <= self._wall_seconds() + _AHEAD_SECONDS

    async def _read_here(self, name: str, note_ref: ObjectRef, not_before: float) -> tuple[bytes, float] | None:
        """Return what another loader of this machine has read; None if this one is to read it, or has to."""
        text = memoryview(bytearray(NOTE_BYTES))
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                for _ in range(2):
                    if not await self._tier.read(note_ref, text):
                        return None
                    note = Note.decode(text, name, self._key)
                    if note is not None and self._is_recent(note, not_before):
                        return await self._read_noted(name, note)
                    self._tier.reject(note_ref)  # another one may have replaced it, or this one is to
        return None

    async def _read_noted(self, name: str, note: Note) -> tuple[bytes, float] | None:
        """Return the object of a note from the process of this machine."""
        ref, data = note.ref(name), bytearray(note.size_bytes)
        if not await self._tier.read(ref, memoryview(data)):
            self._tier.decline(ref)
        elif note.is_of(data):
            return bytes(data), note.read_at
        else:
            self._tier.reject(ref)
        return None

    async def _read_elsewhere(self, name: str, not_before: float) -> tuple[bytes, Note] | bytes:
        """Return what another machine has read; else the claim with which this one reads it for all, if it may."""
        if self._values is not None:
            with suppress(TimeoutError, StoreError):
                async with asyncio.timeout(_ELSEWHERE_SECONDS):
                    return await self._read_shared(self._values, name, not_before)
        return b""

    async def _read_shared(self, values: SharedValues, name: str, not_before: float) -> tuple[bytes, Note] | bytes:
        pause_seconds = _POLL_SECONDS
        while True:
            text = await values.get(name)
            note, now = Note.decode(text, name, self._key), self._wall_seconds()
            if note is not None and note.size_bytes and self._is_recent(note, not_before):
                data = b"".join([await values.get(key) for key in _piece_keys(name, note.size_bytes)])
                return (data, note) if note.is_of(data) else b""
            if note is None or note.size_bytes or abs(note.read_at - now) > _ELSEWHERE_SECONDS:
                claim = Note(now).encode(name, self._key)
                if await values.replace(name, text, claim):
                    return claim
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_POLL_SECONDS)

    async def _share(self, name: str, data: bytes) -> bool:
        """Let other machines have an object; return whether they can, or find that it is too large."""
        values = self._values
        assert values is not None  # noqa: S101 - there is a claim

        async def set_pieces() -> None:
            for number, key in enumerate(_piece_keys(name, len(data))):
                await values.set(key, data[number * MAX_VALUE_BYTES : (number + 1) * MAX_VALUE_BYTES])

        return await _succeeds(set_pieces())

    async def _end_claim(self, name: str, claim: bytes, value: bytes) -> None:
        if claim and self._values is not None:
            await _succeeds(self._values.replace(name, claim, value))


def _piece_keys(name: str, size_bytes: int) -> list[str]:
    """Return the keys of the pieces of an object; none if it is too large to be shared."""
    pieces = -(-size_bytes // MAX_VALUE_BYTES) if size_bytes <= _MAX_SHARED_BYTES else 0
    return [f"{name}/{number}" for number in range(pieces)]


async def _succeeds(work: Awaitable[object]) -> bool:
    """Wait for something that others can do without, for a limited time; return whether it succeeds."""
    try:
        async with asyncio.timeout(_ELSEWHERE_SECONDS):
            await work
    except (TimeoutError, StoreError):
        return False
    return True
