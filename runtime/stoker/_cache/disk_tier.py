"""The disk cache: super-samples on a local disk, for all processes of the machine and for later runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from stoker._base.sizes import format_bytes
from stoker._base.threads import RevocableBuffer, run_in_thread, run_in_thread_until_cancelled
from stoker._cache.disk_folder import BLOCK_BYTES, DiskFolder, FolderConfig, disk_space_bytes
from stoker._cache.index import AccessForecast, CacheIndex, CacheTierStatistics, name_of
from stoker._format.manifest import Manifest
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, MemoryBudgetError, StoreError

_log = logging.getLogger("stoker")

_MIN_QUEUED_WRITES, _MAX_QUEUED_WRITES = 4, 1024
_MIN_QUEUED_BYTES = 128 << 20
"""Bounds of the number of objects that wait to be written, whatever their size."""
_OPENING_TRIES, _OPENING_SECONDS = 100, 0.05
"""Number of attempts, and the pause between them, while another process is opening the folder."""
_READ_THREADS, _MAX_HUNG_READS = 8, 2
"""Number of reading threads, and of those that may still hang in cancelled reads when another read starts."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 30.0, 600.0
"""Bounds of the pause without writes after a disk error; it doubles each time, until a write succeeds."""
_ENDING_SECONDS = 1.0
"""Time that closing waits for each thread that hangs in a cancelled read."""
_SINGLE_FILE_ERRORS = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""Errors that concern one object and not the disk."""


@dataclass(frozen=True, slots=True)
class _QueuedWrite:
    """An object that waits to be written.

    Attributes:
        name: Name of the object.
        slot: Number of the buffer that holds the object.
        size_bytes: Size of the object.
        evicted: Names of the objects that are evicted for it.
    """

    name: str
    slot: int
    size_bytes: int
    evicted: Sequence[str]


class DiskTier:
    """A :class:`~stoker._cache.index.ManagedTier` in a folder: writes its own part, and reads the others' parts, too.

    The event loop decides at once which objects stay; threads read, write and remove files. A file that is evicted
    while it is read is removed after the read. A cancelled read ends at once, even if the disk hangs. Files are not
    synced to the disk, since each read verifies the checksum.

    Args:
        config: Folder, and the part of it that this process owns.
        policy: Name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: Size of the largest super-sample, in bytes; larger objects are not kept.
        max_queued_bytes: Memory for objects that wait to be written, in bytes; or four objects if that is more, of up
            to 128 MiB in total, or a single one. Objects offered beyond it are not kept. Default: 32 MiB.

    Raises:
        MemoryBudgetError: The limit is smaller than one super-sample.
        ConfigError: There is no such policy.
    """

    is_shared = True

    def __init__(
        self, config: FolderConfig, policy: str, *, largest_bytes: int, max_queued_bytes: int = 32 << 20
    ) -> None:
        if config.share_bytes < disk_space_bytes(largest_bytes):
            raise MemoryBudgetError(
                f"the disk cache {config.path} gives each process {format_bytes(config.share_bytes)}, which is smaller "
                f"than the largest super-sample ({format_bytes(largest_bytes)}); raise limit=, or leave the cache out"
            )
        self.name = f"disk:{config.path}"
        self._config = config
        self._index = CacheIndex(policy, config.share_bytes, BLOCK_BYTES)
        self._largest_bytes = largest_bytes
        fewest = max(1, min(_MIN_QUEUED_WRITES, _MIN_QUEUED_BYTES // largest_bytes))
        self._max_queued_writes = min(max(fewest, max_queued_bytes // largest_bytes), _MAX_QUEUED_WRITES)
        self._pid = os.getpid()
        self._has_warned = False
        self._resume_seconds, self._pause_seconds = float("-inf"), _MIN_PAUSE_SECONDS
        self._reset()

    def _reset(self) -> None:
        """Reset to the closed state."""
        self._index.clear()
        self._folder: DiskFolder | None = None
        self._opening = asyncio.Lock()  # the thread of a cancelled call runs on, beside those of later calls
        self._buffers = Ring(self._max_queued_writes, self._largest_bytes)
        self._queued: dict[str, _QueuedWrite] = {}
        self._queue: deque[_QueuedWrite] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._active_reads: Counter[str] = Counter()
        self._read_ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(_READ_THREADS, "stoker-disk-tier")  # own threads, since reads may hang
        self._hung_reads: set[threading.Event] = set()

    async def follow(self, manifest: Manifest, forecast: AccessForecast) -> None:
        """Keep what a range of positions needs; opens the folder if it is not open, and adopts the files in it."""
        if self._pid != os.getpid():
            self._reset()
            self._pid = os.getpid()
        async with self._opening:
            self._index.follow(manifest, forecast)
            if self._folder is not None and self._folder.own is None:
                await self._close_folder()  # to try again: an owner may have ended
            if self._folder is None:
                await self._open(manifest)

    async def _open(self, manifest: Manifest) -> None:
        fit = partial(self._index.add_existing, manifest=manifest)

        def open_folder(_: threading.Event) -> None:
            self._folder = DiskFolder(self._config, fit)  # set in the thread, so a cancelled call does not lose it

        for _ in range(_OPENING_TRIES):
            try:
                await run_in_thread(open_folder)
            except BlockingIOError:
                await asyncio.sleep(_OPENING_SECONDS)
                continue
            except OSError as error:
                self._warn(
                    "is not used", f"{error.strerror or error}; name a folder that this user can create or write to"
                )
                return
            if not self.accepts_writes:
                _log.info("%s: all %d parts have an owner; this process only reads", self.name, self._config.owners)
            return
        self._warn("is not used", "another process has been opening it for too long")

    @property
    def accepts_writes(self) -> bool:
        """Whether objects can be written now: this process owns a part of the folder, and writes are not paused."""
        has_part = self._folder is not None and self._folder.own is not None
        return has_part and asyncio.get_running_loop().time() >= self._resume_seconds

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill memory from the write queue, from this process's part, or from another owner's part."""
        name = name_of(ref)
        is_own = self._index.look_up(name)
        if (waiting := self._queued.get(name)) is not None:
            into[:] = self._buffers.view(waiting.slot, waiting.size_bytes)
            self._index.counts.hits += 1
            return True
        folder = self._folder
        if folder is None or not (is_own or folder.has_others):
            return False
        if len(self._hung_reads) >= _MAX_HUNG_READS:
            raise StoreError(
                f"{self.name} does not respond: {len(self._hung_reads)} cancelled reads have not ended yet"
            )
        self._active_reads[name] += 1
        try:
            data = await self._read_file(folder, name, into, is_own=is_own)
        except OSError as error:
            self._index.counts.damaged += 1
            if is_own:
                self._index.remove(name)
            if not isinstance(error, ChecksumError):
                self._pause(error)
            return False
        finally:
            self._active_reads.subtract([name])
            if not self._active_reads[name]:
                del self._active_reads[name]
            self._read_ended.set()
        if is_own and not data:  # another program has removed it
            self._index.remove(name)
        self._index.counts.hits += data
        return data

    async def _read_file(self, folder: DiskFolder, name: str, into: memoryview, *, is_own: bool) -> bool:
        """Read a file in a thread. If the call is cancelled, the thread loses access to the memory and ends later."""
        memory = RevocableBuffer(into)
        try:
            return await run_in_thread_until_cancelled(
                lambda: folder.read(name, memory, is_own=is_own), self._threads, self._hung_reads
            )
        finally:
            memory.revoke()

    def holds(self, ref: ObjectRef) -> bool:
        """Return whether an object is in this process's part."""
        return name_of(ref) in self._index

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into the write queue, if the policy accepts it and a buffer is free."""
        if not self.accepts_writes or ref.size_bytes > self._largest_bytes or not self._buffers.free:
            self._index.counts.declined += 1
            return
        evicted = self._index.offer(ref)
        if evicted is None:
            return
        slot = self._buffers.acquire()
        assert slot is not None  # noqa: S101 - a buffer was free
        self._buffers.view(slot, ref.size_bytes)[:] = data
        self._buffers.commit(slot)
        name = name_of(ref)
        self._queued[name] = _QueuedWrite(name, slot, ref.size_bytes, evicted)
        self._queue.append(self._queued[name])
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="stoker disk tier")

    async def _write_all(self) -> None:
        try:
            while self._queue:
                writing = self._queue[0]
                while any(self._active_reads[name] for name in writing.evicted):
                    self._read_ended.clear()
                    await self._read_ended.wait()
                try:
                    await self._write(writing)
                finally:
                    self._queue.popleft()
                    if self._queued.get(writing.name) is writing:
                        del self._queued[writing.name]
                    self._buffers.release(writing.slot)
        finally:
            self._writer = None

    async def _write(self, writing: _QueuedWrite) -> None:
        folder = self._folder
        assert folder is not None  # noqa: S101 - closed only after the last write
        data = self._buffers.view(writing.slot, writing.size_bytes)
        if not self.accepts_writes or writing.name not in self._index:  # evicted before it was written
            await run_in_thread(lambda _: folder.remove(*writing.evicted))
            self._index.remove(writing.name)
            return
        try:
            if await run_in_thread(lambda _: folder.write(writing.name, data, writing.evicted)):
                self._pause_seconds = _MIN_PAUSE_SECONDS
                return
            self._warn("accepts no objects for now", "its disk is nearly full")
        except OSError as error:
            if error.errno not in _SINGLE_FILE_ERRORS:
                self._pause(error)
        self._index.counts.declined += 1
        self._index.remove(writing.name)

    def _pause(self, error: OSError) -> None:
        """Pause writes, for twice as long as before if no write succeeded in between."""
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds >= self._resume_seconds:
            _log.warning("the cache %s accepts no objects for %g s: %s", self.name, self._pause_seconds, error)
            self._resume_seconds = now_seconds + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)

    def _warn(self, what: str, reason: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the cache %s %s: %s", self.name, what, reason)

    async def flush(self) -> None:
        """Wait until the write queue is empty."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Write the queued objects, and release the part; its files stay for the next owner. Idempotent."""
        if self._pid == os.getpid():
            async with self._opening:
                await self.flush()
                await run_in_thread(lambda _: self._end_threads())
                await self._close_folder()
                self._reset()

    def _end_threads(self) -> None:
        have_ended = [ended.wait(_ENDING_SECONDS) for ended in list(self._hung_reads)]
        self._threads.shutdown(wait=all(have_ended))

    async def _close_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await run_in_thread(lambda _: folder.close())

    def statistics(self) -> CacheTierStatistics:
        """Return a snapshot."""
        return self._index.statistics()
