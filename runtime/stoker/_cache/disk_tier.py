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
from stoker._base.threads import WithdrawableMemory, in_thread, in_thread_until_cancelled
from stoker._cache.disk_folder import BLOCK_BYTES, DiskFolder, FolderConfig, taken_bytes
from stoker._cache.keeper import CacheStatistics, Future, Keeper, name_of
from stoker._format.manifest import Manifest
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef
from stoker.errors import BudgetError, ChecksumError, StoreError

_log = logging.getLogger("stoker")

_BEHIND_LEAST, _BEHIND_MOST = 4, 1024
"""Bounds of the number of objects that wait to be written, whatever their size."""
_OPENING_TRIES, _OPENING_SECONDS = 100, 0.05
"""Number of attempts, and the pause between them, while another process is opening the folder."""
_READ_THREADS, _MOST_LEFT = 8, 2
"""Number of reading threads, and of those that may still hang in cancelled reads when another read starts."""
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 30.0, 600.0
"""Bounds of the pause without writes after a disk error; it doubles each time, until a write succeeds."""
_ENDING_SECONDS = 1.0
"""Time that closing waits for each thread that hangs in a cancelled read."""
_OF_ONE_NAME = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""Errors that concern one object and not the disk."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """An object that waits to be written.

    Attributes:
        name: Name of the object.
        slot: Number of the buffer that holds the object.
        size_bytes: Size of the object.
        instead_of: Names of the objects that are evicted for it.
    """

    name: str
    slot: int
    size_bytes: int
    instead_of: Sequence[str]


class DiskTier:
    """A :class:`~stoker._cache.keeper.KeepingTier` in a folder: writes its own part, and reads the others' parts, too.

    The event loop decides at once which objects stay; threads read, write and remove files. A file that is evicted
    while it is read is removed after the read. A cancelled read ends at once, even if the disk hangs. Files are not
    synced to the disk, since each read verifies the checksum.

    Args:
        config: Folder, and the part of it that this process owns.
        policy: Name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: Size of the largest super-sample, in bytes; larger objects are not kept.
        behind_bytes: Memory for objects that wait to be written, in bytes, or four objects if that is more; objects
            offered beyond it are not kept. Default: 32 MiB.

    Raises:
        BudgetError: The limit is smaller than one super-sample.
        ConfigError: There is no such policy.
    """

    is_shared = True

    def __init__(self, config: FolderConfig, policy: str, *, largest_bytes: int, behind_bytes: int = 32 << 20) -> None:
        if config.share_bytes < taken_bytes(largest_bytes):
            raise BudgetError(
                f"a disk cache of {format_bytes(config.share_bytes)} per process ({config.owners} share it) is smaller "
                f"than the largest super-sample ({format_bytes(largest_bytes)}); raise its limit, or leave it out"
            )
        self.name = f"disk:{config.path}"
        self._config = config
        self._keeper = Keeper(policy, config.share_bytes, BLOCK_BYTES)
        self._largest_bytes = largest_bytes
        self._behind_most = min(max(_BEHIND_LEAST, behind_bytes // largest_bytes), _BEHIND_MOST)
        self._pid = os.getpid()
        self._has_warned = False
        self._resume_seconds, self._pause_seconds = float("-inf"), _LEAST_PAUSE_SECONDS
        self._begin()

    def _begin(self) -> None:
        """Reset to the closed state."""
        self._keeper.clear()
        self._folder: DiskFolder | None = None
        self._opening = asyncio.Lock()  # the thread of a cancelled call runs on, beside those of later calls
        self._buffers = Ring(self._behind_most, self._largest_bytes)
        self._behind: dict[str, _Writing] = {}
        self._queue: deque[_Writing] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reading: Counter[str] = Counter()
        self._read_ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(_READ_THREADS, "stoker-disk-tier")  # own threads, since reads may hang
        self._left: set[threading.Event] = set()

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a range of positions needs; opens the folder if it is not open, and adopts the files in it."""
        if self._pid != os.getpid():
            self._begin()
            self._pid = os.getpid()
        async with self._opening:
            self._keeper.follow(manifest, future)
            if self._folder is not None and self._folder.own is None:
                await self._close_folder()  # to try again: an owner may have ended
            if self._folder is None:
                await self._open(manifest)

    async def _open(self, manifest: Manifest) -> None:
        fit = partial(self._keeper.adopt, manifest=manifest)

        def open_folder(_: threading.Event) -> None:
            self._folder = DiskFolder(self._config, fit)  # set in the thread, so a cancelled call does not lose it

        for _ in range(_OPENING_TRIES):
            try:
                await in_thread(open_folder)
            except BlockingIOError:
                await asyncio.sleep(_OPENING_SECONDS)
                continue
            except OSError as error:
                self._warn("is not used", error)
                return
            if not self.takes_in:
                _log.info("%s: all %d parts have an owner; this process only reads", self.name, self._config.owners)
            return
        self._warn("is not used", "another process has been opening it for too long")

    @property
    def takes_in(self) -> bool:
        """Whether objects can be written now: this process owns a part of the folder, and writes are not paused."""
        has_part = self._folder is not None and self._folder.own is not None
        return has_part and asyncio.get_running_loop().time() >= self._resume_seconds

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill memory from the write queue, from this process's part, or from another owner's part."""
        name = name_of(ref)
        is_own = self._keeper.look_up(name)
        if (waiting := self._behind.get(name)) is not None:
            into[:] = self._buffers.view(waiting.slot, waiting.size_bytes)
            self._keeper.counts.hits += 1
            return True
        folder = self._folder
        if folder is None or not (is_own or folder.has_others):
            return False
        if len(self._left) >= _MOST_LEFT:
            raise StoreError(f"{self.name} does not respond: {len(self._left)} cancelled reads have not ended yet")
        self._reading[name] += 1
        try:
            found = await self._read_file(folder, name, into, is_own=is_own)
        except OSError as error:
            self._keeper.counts.damaged += 1
            if is_own:
                self._keeper.drop(name)
            if not isinstance(error, ChecksumError):
                self._pause(error)
            return False
        finally:
            self._reading.subtract([name])
            if not self._reading[name]:
                del self._reading[name]
            self._read_ended.set()
        if is_own and not found:  # another program has removed it
            self._keeper.drop(name)
        self._keeper.counts.hits += found
        return found

    async def _read_file(self, folder: DiskFolder, name: str, into: memoryview, *, is_own: bool) -> bool:
        """Read a file in a thread. If the call is cancelled, the thread loses access to the memory and ends later."""
        memory = WithdrawableMemory(into)
        try:
            return await in_thread_until_cancelled(
                lambda: folder.read(name, memory, is_own=is_own), self._threads, self._left
            )
        finally:
            memory.withdraw()

    def holds(self, ref: ObjectRef) -> bool:
        """Return whether an object is in this process's part."""
        return name_of(ref) in self._keeper

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into the write queue, if the policy accepts it and a buffer is free."""
        if not self.takes_in or ref.size_bytes > self._largest_bytes or not self._buffers.free:
            self._keeper.counts.declined += 1
            return
        evicted = self._keeper.offer(ref)
        if evicted is None:
            return
        slot = self._buffers.acquire()
        assert slot is not None  # noqa: S101 - a buffer was free
        self._buffers.view(slot, ref.size_bytes)[:] = data
        self._buffers.commit(slot)
        name = name_of(ref)
        self._behind[name] = _Writing(name, slot, ref.size_bytes, evicted)
        self._queue.append(self._behind[name])
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="stoker disk tier")

    async def _write_all(self) -> None:
        try:
            while self._queue:
                writing = self._queue[0]
                while any(self._reading[name] for name in writing.instead_of):
                    self._read_ended.clear()
                    await self._read_ended.wait()
                try:
                    await self._write(writing)
                finally:
                    self._queue.popleft()
                    if self._behind.get(writing.name) is writing:
                        del self._behind[writing.name]
                    self._buffers.release(writing.slot)
        finally:
            self._writer = None

    async def _write(self, writing: _Writing) -> None:
        folder = self._folder
        assert folder is not None  # noqa: S101 - closed only after the last write
        data = self._buffers.view(writing.slot, writing.size_bytes)
        if not self.takes_in or writing.name not in self._keeper:  # evicted before it was written
            await in_thread(lambda _: folder.remove(*writing.instead_of))
            self._keeper.drop(writing.name)
            return
        try:
            if await in_thread(lambda _: folder.write(writing.name, data, writing.instead_of)):
                self._pause_seconds = _LEAST_PAUSE_SECONDS
                return
            self._warn("accepts no objects for now", "its disk is nearly full")
        except OSError as error:
            if error.errno not in _OF_ONE_NAME:
                self._pause(error)
        self._keeper.counts.declined += 1
        self._keeper.drop(writing.name)

    def _pause(self, error: OSError) -> None:
        """Pause writes, for twice as long as before if no write succeeded in between."""
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds >= self._resume_seconds:
            _log.warning("the cache %s accepts no objects for %g s: %s", self.name, self._pause_seconds, error)
            self._resume_seconds = now_seconds + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MOST_PAUSE_SECONDS)

    def _warn(self, what: str, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the cache %s %s: %s", self.name, what, why)

    async def flush(self) -> None:
        """Wait until the write queue is empty."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Write the queued objects, and release the part; its files stay for the next owner. Idempotent."""
        if self._pid == os.getpid():
            async with self._opening:
                await self.flush()
                await in_thread(lambda _: self._end_threads())
                await self._close_folder()
                self._begin()

    def _end_threads(self) -> None:
        have_ended = [ended.wait(_ENDING_SECONDS) for ended in list(self._left)]
        self._threads.shutdown(wait=all(have_ended))

    async def _close_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await in_thread(lambda _: folder.close())

    def statistics(self) -> CacheStatistics:
        """Return a snapshot."""
        return self._keeper.statistics()
