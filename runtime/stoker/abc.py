"""Protocols for plug-ins: stores, tiers, sources, executors, eviction policies and trace sinks.

A plug-in need not inherit from these protocols: an object with their methods implements them. At run time
this module imports only the standard library. The documentation's page on plug-ins has a tested example of each, and
:mod:`stoker.testing` a contract suite.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:  # these modules lie above this one
    from stoker._base.fetch_record import DeviceCopy, Fetch
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
    "CopySink",
    "BufferedSink",
]

Key = TypeVar("Key", bound=Hashable)
Asked = TypeVar("Asked", bound=Hashable, contravariant=True)

Buffer = bytes | bytearray | memoryview


# Stores: one small protocol per capability, the same for every store. Keys are relative to the store's root
# (``s3://bucket/prefix`` + ``data/x``), use ``/`` and never start with it. Byte ranges are half-open ``start, end``.
# Methods raise StoreError, or its subclass TransientError if another attempt may succeed. An adapter does not
# retry: the fetcher does, under its own deadline and budget. Every await may be cancelled.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Key, size and version tag of one object, as its store reports them.

    Example:
        >>> ObjectInfo(key="train/labels.csv", size_bytes=7, tag="9a0364b9e99bb480dd25e1f0284c8555").size_bytes
        7

    Attributes:
        key: key of the object, relative to the store's root.
        size_bytes: size of the whole object, also when only a range was read.
        tag: version tag of the content, for use as a precondition: an ETag without quotes (S3, local, memory) or a
            decimal generation (GCS). Opaque: compared, never interpreted.
    """

    key: str
    size_bytes: int
    tag: str


@runtime_checkable
class RangeReadable(Protocol):
    """A store that reads byte ranges of objects: the minimum that training needs."""

    @property
    def url(self) -> str:
        """URL of the store's root as the user wrote it, without secrets, for messages."""
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
        """Read bytes ``[start, end)`` of an object directly into ``into``.

        When the call returns, raises or is cancelled, nothing writes to ``into`` any more.

        Args:
            key: key of the object, relative to the store's root.
            start: offset of the first byte.
            end: offset behind the last byte.
            into: buffer to fill, of exactly ``end - start`` bytes.
            tag: precondition: fail if the object no longer has this tag. Default: no condition.
            begun: called when the first bytes of the response arrive, by stores whose responses are slow enough for
                that to matter. Default: nothing is called.

        Raises:
            NotFoundError: the object does not exist.
            ObjectChangedError: the object has another tag than ``tag``.
            RangeBeyondEndError: the object ends before ``end``.
            TruncatedError: the connection closed before all bytes arrived.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's metadata without reading its bytes.

        Raises:
            NotFoundError: the object does not exist.
        """
        ...


@runtime_checkable
class Readable(RangeReadable, Protocol):
    """A store that also reads whole objects. For a plug-in without :meth:`get`, stoker reads ranges instead."""

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return the bytes of a whole (small) object, and its metadata.

        Raises:
            NotFoundError: the object does not exist.
        """
        ...


@runtime_checkable
class Listable(Protocol):
    """A store that lists objects: needed to pack a folder, by ``stoker gc`` and ``rebuild-manifest``; not to train."""

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose keys start with ``prefix``, ascending by UTF-8 key, after the key ``start_after``."""
        ...


@runtime_checkable
class Writable(Protocol):
    """A store that writes whole objects atomically, optionally on a condition, with read-after-write consistency."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object; readers see the old bytes or the new, never a mixture.

        Args:
            key: key of the object, relative to the store's root.
            data: content of the object.
            if_absent: precondition: fail if the object exists. Default: overwrite.
            if_tag: precondition: fail if the object does not have this tag. Default: no condition.

        Raises:
            PreconditionFailedError: ``if_absent`` is set and the object exists, or its tag is not ``if_tag``.
        """
        ...


@runtime_checkable
class Deletable(Protocol):
    """A store that deletes objects: needed by ``stoker gc`` and ``rm``."""

    async def delete(self, key: str) -> None:
        """Delete an object. It is no error if the object does not exist."""
        ...


@runtime_checkable
class Store(Readable, Listable, Writable, Deletable, Protocol):
    """A bucket, or a prefix of one. :func:`stoker.open_store` opens a store; its caller closes it.

    A plug-in implements those of the protocols above that it can. If an operation needs a missing method, the error
    names the store, the method and the remedy. Loaders also need an attribute ``prices``: the name in the price list
    under which the store is charged, such as ``"s3"``, or ``"file"`` if it is free.
    """

    async def close(self) -> None:
        """Release connections. Idempotent; a store that is used again reconnects."""
        ...


@runtime_checkable
class Presigner(Protocol):
    """A store that signs URLs, with which others can read an object without credentials of their own."""

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL with which anyone can GET an object, or a range of it, for the next ``seconds``; it is a secret.

        Signing sends no request, so the object need not exist. If the bucket addresses versions, the URL reads the
        version with ``tag``; otherwise it reads the object that the key has at the time of the request.

        Raises:
            CredentialsError: the credentials in use cannot sign.
        """
        ...


# Tiers.


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """A reference to one object, with the size and checksums that a manifest records for it.

    Two references are equal if key, size, CRC-32C and tag are; the other attributes are not compared.

    Example:
        >>> objects = {ObjectRef(key="data/0", size_bytes=4, crc32c=0x1A2B3C4D): b"data"}  # references are hashable

    Attributes:
        key: key of the object, relative to the store's root.
        size_bytes: size of the whole object.
        crc32c: CRC-32C of the whole object; together with ``size_bytes``, the object's identity.
        tag: ETag or generation when the object was packed, for use as a precondition; empty if unknown.
        sha256_128: first 16 bytes of the object's SHA-256, its name among peers that do not trust each other; None if
            the manifest has none.
        dataset: id of the data set that the object belongs to; empty if unknown.
        row: row of the object in its manifest, which is how the order addresses it; negative if there is none.
    """

    key: str
    size_bytes: int
    crc32c: int
    tag: str = ""
    sha256_128: bytes | None = field(default=None, compare=False)
    dataset: str = field(default="", compare=False)
    row: int = field(default=-1, compare=False)


class Tier(Protocol):
    """A cache between the loader and the store, read before the store.

    A tier may miss, lose or corrupt any object: the fetcher verifies every byte and falls back to the store.
    """

    @property
    def name(self) -> str:
        """Name of the tier in statistics and messages."""
        ...

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Read an object into ``into``, of exactly ``ref.size_bytes`` bytes; return whether the tier has it.

        When the call returns, raises or is cancelled, nothing writes to ``into`` any more. The fetcher cancels a late
        read, which must then end at once, because the store fills the same memory. Code that cannot stop at once,
        such as a thread, must read into memory of its own first.

        Raises:
            StoreError: the tier failed; the fetcher continues with the next tier or the store.
        """
        ...

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Accept, or ignore, the verified bytes of an object that was fetched from a farther tier or the store.

        Must not block. The buffer ``data`` is reused after the call: copy what is to be kept.
        """
        ...

    async def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


@runtime_checkable
class PlacedTier(Tier, Protocol):
    """A tier that reads from several servers, each of which may fail on its own."""

    def place(self, ref: ObjectRef) -> str:
        """Return the name of the server that holds an object. Each name has a circuit breaker of its own."""
        ...


@runtime_checkable
class CorrectedTier(Tier, Protocol):
    """A tier that drops objects which turned out to be corrupt."""

    def reject(self, ref: ObjectRef) -> None:
        """Handle a checksum mismatch: :meth:`read` delivered wrong bytes for this object. Must not block."""
        ...


# Sources.

Sample = tuple[str, dict[str, Any]]
"""A sample's name for messages, and its values by column."""


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The raw objects that a source's URL refers to. Takes about 300 bytes of memory per object.

    Attributes:
        url: URL as the user wrote it.
        store: store that the keys are relative to, with retries. The function that requested the listing closes it.
        objects: objects in ascending UTF-8 order of their keys; those of a brace pattern in the pattern's order.
        is_folder: whether the URL is a folder or prefix, and ``objects`` everything below it.
        follows_links: whether symbolic links that lead out of a local folder are followed.
    """

    url: str
    store: Store
    objects: tuple[ObjectInfo, ...]
    is_folder: bool
    follows_links: bool = False


@runtime_checkable
class Source(Protocol):
    """Raw input of a pack: samples in a fixed order, which can be read from any position.

    An entry point in the group ``stoker.sources`` refers to a coroutine function that takes a :class:`SourceListing`
    and returns a source. The entry point's name is the value of ``stoker pack --kind``.
    """

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns of every sample, by name."""
        ...

    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield samples in order, from number ``start`` on, reading a bounded number of bytes ahead.

        Close the generator (``contextlib.aclosing``) if you leave it early: that cancels the reads in flight.

        Raises:
            PackError: an object is damaged, or not of the source's kind. The message names the object and the remedy.
            StoreError: an object could not be read, or changed since it was listed.
        """
        ...


# Executors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result and resource usage of one successful function call.

    Example:
        >>> answer = Answer(result={"samples": 100}, billed_seconds=2.5, memory_bytes=1 << 30, is_cold=False)

    Attributes:
        result: return value of the function, a JSON object.
        billed_seconds: duration that the platform charges for, including initialisation.
        memory_bytes: memory that the platform charges for; 0 if it does not report it.
        is_cold: whether the call started a new instance (cold start); None if the platform does not report it.
        vcpus: number of vCPUs that the platform charges for separately from memory; default 0.
    """

    result: Mapping[str, Any]
    billed_seconds: float
    memory_bytes: int
    is_cold: bool | None
    vcpus: float = 0.0


class Executor(Protocol):
    """Runs functions, many concurrently. An async context manager; leaving it ends everything that it started.

    A subclass inherits the defaults of ``platform``, ``sees_files``, ``heeds`` and :meth:`vcpus`.

    Attributes:
        name: name of the executor's entry point.
        concurrency: maximum number of concurrent calls.
        platform: name of the platform in :class:`stoker.Prices`; None, the default, if calls are free.
        sees_files: whether the functions can read the files of this machine; default False.
        heeds: names of the :class:`~stoker.fanout.ExecutorOptions` that the executor reads to locate its functions and
            to authenticate. A command rejects the others. Default: none.
    """

    name: str
    concurrency: int
    platform: str | None = None
    sees_files: bool = False
    heeds: frozenset[str] = frozenset()

    async def __aenter__(self) -> Executor:
        """Start what calls need; no process or connection is opened earlier."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release connections and processes."""
        ...

    def vcpus(self, function: str) -> float:
        """Return the number of vCPUs charged separately from memory; default 0: memory includes them."""
        return 0.0

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Run a function once and return its result. The caller retries.

        A function may have run although its call was cancelled or its response lost: events must be idempotent.

        Args:
            function: name of the function, such as ``"pack"``.
            event: argument of the function, a JSON object.

        Raises:
            ThrottledError: the platform is at its concurrency limit; the function did not run.
            TransientError: the call was lost or timed out.
            FunctionError: the function raised an error that a retry would raise again.
            StokerError: no call can succeed, for instance because the function or a permission is missing.
        """
        ...


# Eviction policies.


class EvictionPolicy(Protocol[Key]):
    """Chooses the entries that a full cache evicts. The cache reports its keys, but not their sizes."""

    def used(self, key: Key) -> None:
        """Record a hit on an entry."""
        ...

    def added(self, key: Key) -> None:
        """Record that an entry was added."""
        ...

    def removed(self, key: Key) -> None:
        """Record that an entry was removed, by eviction or otherwise."""
        ...

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield the entries to evict for a new one, in order of eviction.

        The iterator ends if the remaining entries are worth more than the new one. The cache neither adds nor removes
        entries during the iteration.
        """
        ...


class NextUseOracle(Protocol[Asked]):
    """Knows when a key is needed next, in positions of a run's order; an eviction policy may use it (Belady)."""

    @property
    def present(self) -> int:
        """The current position."""

    def next_use(self, key: Asked, /) -> int:
        """Return the position, after the present, at which a key is needed next."""


# Trace sinks: one small protocol per capability. Threads call a sink's methods, as events happen; the methods must
# not block. Times of fetches are in loop time; loop time plus ``offset_seconds`` is ``time.perf_counter`` time.


class TraceSink(Protocol):
    """Receives a record of each batch's wait. A sink that also implements the protocols below receives their events."""

    def waited(self, wait: Wait) -> None:
        """Receive the wait of a batch that was just yielded."""


@runtime_checkable
class FetchSink(Protocol):
    """Receives a record of each fetch."""

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Receive the record of a completed fetch: the object is in the ring."""


@runtime_checkable
class ReleaseSink(Protocol):
    """Receives an event when the ring memory of an object is free again."""

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Receive the release of a fetched object, at ``now_seconds`` in loop time."""


@runtime_checkable
class CopySink(Protocol):
    """Receives a record of each batch's copy to a device."""

    def copied(self, copy: DeviceCopy) -> None:
        """Receive the record of a completed copy; called by the thread that copies."""


@runtime_checkable
class BufferedSink(Protocol):
    """A sink that buffers events."""

    def flush(self) -> None:
        """Write the buffered events; called when no more are expected for a while."""
