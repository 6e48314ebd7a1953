"""The contracts of plug-ins: stores, tiers, sources, executors, eviction policies and trace sinks.

A plug-in need not inherit from these protocols: an object that has their methods is one. At run time
this module imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:  # what sources and sinks are about lies above this module
    from stoker._base.fetch_record import Fetch
    from stoker._base.recorder import Wait
    from stoker._format.schema import Column

__all__ = [
    "Buffer",
    "ObjectInfo",
    "RangeReadable",
    "Readable",
    "Listable",
    "Writable",
    "Deletable",
    "Store",
    "Presigner",
    "ObjectRef",
    "Tier",
    "PlacedTier",
    "CorrectedTier",
    "Sample",
    "SourceListing",
    "Source",
    "Answer",
    "Executor",
    "EvictionPolicy",
    "NextUseOracle",
    "TraceSink",
    "FetchSink",
    "ReleaseSink",
    "BufferedSink",
]

Key = TypeVar("Key", bound=Hashable)
Asked = TypeVar("Asked", bound=Hashable, contravariant=True)

Buffer = bytes | bytearray | memoryview


# Stores: one small protocol per capability, the same for every store. Keys are relative to the store's root
# (``s3://bucket/prefix`` + ``data/x``), use ``/`` and never start with it. Byte ranges are half-open ``start, end``.
# Every method raises a StoreError; those that may succeed on another try are TransientErrors. An adapter does not
# retry: the fetcher does, under its own deadline and budget. Every await may be cancelled.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        key: relative to the store's root.
        size_bytes: of the whole object, also when a range was read.
        tag: the store's identity of this content, to be sent back as a precondition: an ETag without quotes (S3, local,
            memory) or a decimal generation (GCS). Opaque: compared, never interpreted.
    """

    key: str
    size_bytes: int
    tag: str


@runtime_checkable
class RangeReadable(Protocol):
    """Reading ranges of objects: what every store can do."""

    @property
    def url(self) -> str:
        """The root as the user wrote it, without secrets; used in messages."""
        ...

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read bytes ``[start, end)`` straight into ``into``, which has exactly ``end - start`` bytes.

        With ``tag``, the read is conditional on the object still having it. When the call ends, however it ends
        (cancellation too), nothing writes to ``into`` any more. ``begun`` is called when the answer begins, by stores
        whose answers take long enough for that to matter.

        Raises:
            NotFoundError: there is no such object.
            ObjectChangedError: ``tag`` was given and the object has another.
            RangeBeyondEndError: the object ends before ``end``.
            TruncatedError: the connection did.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return what the store says of an object without its bytes.

        Raises:
            NotFoundError: there is no such object.
        """
        ...


@runtime_checkable
class Readable(RangeReadable, Protocol):
    """Reading objects whole, too. Of a plug-in without :meth:`get`, ranges are read instead."""

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole (small) object and what the store says of it.

        Raises:
            NotFoundError: there is no such object.
        """
        ...


@runtime_checkable
class Listable(Protocol):
    """Listing objects: what packing a folder, ``stoker gc`` and ``rebuild-manifest`` need, and training does not."""

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``, ascending by UTF-8 key, after ``start_after``."""
        ...


@runtime_checkable
class Writable(Protocol):
    """Writing objects: whole, atomic, visible at once, and on condition."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object; readers see the old bytes or the new, never a mixture.

        Raises:
            PreconditionFailedError: ``if_absent`` and the object exists, or it does not (or no longer) have ``if_tag``.
        """
        ...


@runtime_checkable
class Deletable(Protocol):
    """Deleting objects: what ``stoker gc`` and ``rm`` need."""

    async def delete(self, key: str) -> None:
        """Delete an object; deleting one that does not exist is no error."""
        ...


@runtime_checkable
class Store(Readable, Listable, Writable, Deletable, Protocol):
    """A bucket, or a prefix of one. Opened by :func:`stoker.open_store`; closed by whoever opened it.

    A plug-in has the methods of those protocols above that it can: what is asked for and missing is an error that names
    the store, the method and the remedy. Its attribute ``prices``, which loaders need, is the name of the store in the
    price list whose prices hold, such as ``"s3"``, or ``"file"`` where nothing is charged.
    """

    async def close(self) -> None:
        """Release connections. Idempotent. The store may be used again afterwards: it reconnects."""
        ...


@runtime_checkable
class Presigner(Protocol):
    """Lending the right to read: a bucket that can be told to answer whoever has a certain URL."""

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL at which anybody can GET an object, or a range of it, for ``seconds`` from here on.

        Nothing is asked of the bucket, so the object need not exist. Where the bucket can tell its versions apart, the
        URL is of the one that has ``tag``; elsewhere of whatever stands at the key then. The URL is a secret.

        Raises:
            CredentialsError: the credentials in use cannot sign.
        """
        ...


# Tiers.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """One object as a manifest pins it.

    Attributes:
        key: relative to the store's root.
        size_bytes: of the whole object.
        crc32c: of the whole object. With ``size_bytes`` it is the object's identity.
        tag: the store's ETag or generation when the object was packed, sent back as a precondition; empty if
            unknown.
        sha256_128: the first 16 bytes of the SHA-256 of the object, by which those who do not trust each other can
            name it; None if the manifest does not know it. Refs are compared without it.
        dataset: id of the data set that it is of; empty if unknown. Refs are compared without it.
        row: in the manifest that pins it, which is what the order counts in; negative if there is none. No part of
            the object's identity.
    """

    key: str
    size_bytes: int
    crc32c: int
    tag: str = ""
    sha256_128: bytes | None = field(default=None, compare=False)
    dataset: str = field(default="", compare=False)
    row: int = field(default=-1, compare=False)


class Tier(Protocol):
    """A nearer place, asked before the store. It may lose, lack or spoil anything: the fetcher verifies."""

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        ...

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into``, which has exactly ``ref.size_bytes`` bytes, and return True; or False if it is not here.

        When the call ends, however it ends (cancellation too), nothing writes to ``into`` any more. A read that is late
        is cancelled, and must end at once: the store fills the same memory then. What cannot stop at once, such as a
        thread, reads into memory of its own first.

        Raises:
            StoreError: the tier failed; the fetcher goes on to the next place.
        """
        ...

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Be told of verified bytes that had to be fetched from farther away.

        Must not block, and must copy what it keeps: ``data`` is reused after the call.
        """
        ...

    async def close(self) -> None:
        """Release what the tier holds. Idempotent."""
        ...


@runtime_checkable
class PlacedTier(Tier, Protocol):
    """A tier that reads from several places, of which some may be sick while the others are well."""

    def place(self, ref: ObjectRef) -> str:
        """Return where an object is read from, as messages call it: each place has a circuit breaker of its own."""
        ...


@runtime_checkable
class CorrectedTier(Tier, Protocol):
    """A tier that can be told of its mistakes."""

    def reject(self, ref: ObjectRef) -> None:
        """Be told that what :meth:`read` delivered were not the bytes of the object. Must not block."""
        ...


# Sources.

Sample = tuple[str, dict[str, Any]]
"""How to name a sample in a message, and its values by column."""


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The raw objects that the URL of a source stands for; about 300 bytes of memory each.

    Attributes:
        url: as the user wrote it.
        store: where the keys are relative to; it tries again. Whoever asked for the listing closes it.
        objects: in ascending UTF-8 order of key; those of a brace pattern in the pattern's order.
        is_folder: whether the URL stands for all that is below it.
        follows_links: whether links out of a local folder are followed.
    """

    url: str
    store: Store
    objects: tuple[ObjectInfo, ...]
    is_folder: bool
    follows_links: bool = False


@runtime_checkable
class Source(Protocol):
    """Samples in a fixed order, which can be read from any of them on.

    An entry point of the group ``stoker.sources`` names a coroutine function, ``await open_mine(listing)``, that
    returns the source of a :class:`SourceListing`; its name is what ``stoker pack --kind`` calls the kind.
    """

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns of every sample, by name."""
        ...

    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the samples from number ``start`` on, in order, reading a bounded number of bytes ahead.

        Close the generator (``contextlib.aclosing``) when leaving it early: that cancels the reads in flight.

        Raises:
            PackError: an object is damaged or not what the source's kind makes of it; names object and remedy.
            StoreError: an object could not be read, or is no longer the one that was listed.
        """
        ...


# Executors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a call that ended well.

    Attributes:
        result: the function's, a JSON object.
        billed_seconds: that the platform charges for, initialisation included.
        memory_bytes: that it charges for; 0 if it does not tell.
        is_cold: whether an instance was started for the call; None if the platform does not tell.
        vcpus: processors that are charged for apart from memory.
    """

    result: Mapping[str, Any]
    billed_seconds: float
    memory_bytes: int
    is_cold: bool | None
    vcpus: float = 0.0


class Executor(Protocol):
    """Runs functions, many at a time; used inside ``async with``, whose end leaves nothing of its own running.

    A class that inherits from this one may leave out what has a default here.

    Attributes:
        name: the entry point's.
        concurrency: calls at once that make sense, at most.
        platform: whose prices hold, as :class:`stoker.Prices` calls it; default None, where nothing is charged.
        sees_files: whether its functions have the files of this machine; default False.
        heeds: those of :class:`ExecutorOptions` that say where its functions are and as whom they are called; a
            command refuses the others. Default none.
    """

    name: str
    concurrency: int
    platform: str | None = None
    sees_files: bool = False
    heeds: frozenset[str] = frozenset()

    async def __aenter__(self) -> Executor:
        """Make ready to call; nothing is started or connected to before."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release connections and processes."""
        ...

    def vcpus(self, function: str) -> float:
        """Return the processors that a call is charged for apart from memory; default 0, as they come with it."""
        return 0.0

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Run one function to its end, once: whoever calls tries again.

        A call that is cancelled, or whose answer is lost, may have run: events must be safe to deliver twice.

        Raises:
            ThrottledError: too many run at once; this one has not.
            TransientError: it was lost, or ran out of time.
            FunctionError: the function ended with an error that would come again.
            StokerError: anything else would meet every other call, too: no such function, no permission.
        """
        ...


# Eviction policies.


class EvictionPolicy(Protocol[Key]):
    """Decides who makes room. It knows which keys are there, by being told, and nothing of their sizes."""

    def used(self, key: Key) -> None:
        """A look-up found a resident."""
        ...

    def added(self, key: Key) -> None:
        """A key became resident."""
        ...

    def removed(self, key: Key) -> None:
        """A resident is none any more, whoever wanted that."""
        ...

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield residents that may go for a newcomer, the first to go first; ends where staying is worth more.

        Nobody is added or removed while this is iterated over.
        """
        ...


class NextUseOracle(Protocol[Asked]):
    """Tells when a key is needed next; the order of a run tells it for rows."""

    @property
    def present(self) -> int:
        """The time that has passed."""
        ...

    def next_use(self, key: Asked, /) -> int:
        """Return the time at which a key is needed next, behind the present."""
        ...


# Trace sinks: one small protocol per capability. A sink is told of what happened, as it happens, from two threads, and
# must not block. Times of fetches are the event loop's; add ``offset_seconds`` for those of ``time.perf_counter``.


class TraceSink(Protocol):
    """Is told of waits. One that is a :class:`FetchSink` and so on, too, is told of more."""

    def waited(self, wait: Wait) -> None:
        """A batch was yielded."""
        ...


@runtime_checkable
class FetchSink(Protocol):
    """Is told of fetches."""

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """An item is in the ring."""
        ...


@runtime_checkable
class ReleaseSink(Protocol):
    """Is told when memory of the ring is free again."""

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """The consumer is done with an item, at a moment in loop time."""
        ...


@runtime_checkable
class BufferedSink(Protocol):
    """Holds back what it is told."""

    def flush(self) -> None:
        """Write it: nothing more comes for a while."""
        ...
