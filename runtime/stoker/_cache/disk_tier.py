"""Super-samples that are kept on a local disk, for all processes of the machine and for the run after this one."""

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
"""Objects that may wait to be written, however large they are."""
_OPENING_TRIES, _OPENING_SECONDS = 100, 0.05
"""Of a folder that another process is just opening."""
_READ_THREADS, _MOST_LEFT = 8, 2
"""Threads that read, and those of them that may hang after their reads were cancelled while more are begun."""
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 30.0, 600.0
"""For which nothing is written once a disk has failed; twice as long each time, until something is written."""
_ENDING_SECONDS = 1.0
"""For threads that were left, when the tier is closed."""
_OF_ONE_NAME = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What stands in the way of one object and not of others."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """An object that waits to be written.

    Attributes:
        name: its name.
        slot: of the buffers.
        size_bytes: of it.
        instead_of: what goes for it.
    """

    name: str
    slot: int
    size_bytes: int
    instead_of: Sequence[str]


class DiskTier:
    """A :class:`~stoker._cache.keeper.KeepingTier` in one owner's part of a folder, and a reader of the others' parts.

    Who stays is decided at once, on the event loop; files are read, written and removed in threads, in that order: a
    file that is evicted while it is read goes when the reading has ended. A read that is cancelled ends at once, also
    where the disk hangs. Written files are not forced to the disk,
    since each is checked when it is read.

    Args:
        config: whose part of which folder.
        policy: name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: of the super-samples; what is larger is not kept.
        behind_bytes: of memory for what waits to be written, or four objects if that is more; what is offered beyond
            is not kept.

    Raises:
        BudgetError: not one super-sample fits.
        ConfigError: there is no such policy.
    """

    is_shared = True

    def __init__(self, config: FolderConfig, policy: str, *, largest_bytes: int, behind_bytes: int = 32 << 20) -> None:
        if config.share_bytes < taken_bytes(largest_bytes):
            raise BudgetError(
                f"a cache on disk of {format_bytes(config.share_bytes)} a process ({config.owners} share it) holds "
                f"no super-sample, the largest having {format_bytes(largest_bytes)}: raise its limit, or leave it out"
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
        """Have nothing open."""
        self._keeper.clear()
        self._folder: DiskFolder | None = None
        self._opening = asyncio.Lock()  # a call that is cancelled ends when its thread does, beside those after it
        self._buffers = Ring(self._behind_most, self._largest_bytes)
        self._behind: dict[str, _Writing] = {}
        self._queue: deque[_Writing] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reading: Counter[str] = Counter()
        self._read_ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(_READ_THREADS, "stoker-disk-tier")  # reads that hang hold up nothing else
        self._left: set[threading.Event] = set()

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a stretch of the order needs; opens the folder if it is not open, and adopts what is there."""
        if self._pid != os.getpid():
            self._begin()
            self._pid = os.getpid()
        async with self._opening:
            self._keeper.follow(manifest, future)
            if self._folder is not None and self._folder.own is None:
                await self._close_folder()  # to try again: an owner may have gone
            if self._folder is None:
                await self._open(manifest)

    async def _open(self, manifest: Manifest) -> None:
        fit = partial(self._keeper.adopt, manifest=manifest)

        def open_folder(_: threading.Event) -> None:
            self._folder = DiskFolder(self._config, fit)  # here, so that a call that is cancelled does not lose it

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
                _log.info("%s: all of its %d parts are taken; this process only reads", self.name, self._config.owners)
            return
        self._warn("is not used", "another process has been opening it for too long")

    @property
    def takes_in(self) -> bool:
        """Whether objects are written now: this process has a part of the folder, and its disk has not just failed."""
        has_part = self._folder is not None and self._folder.own is not None
        return has_part and asyncio.get_running_loop().time() >= self._resume_seconds

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill memory from what waits to be written, from the own part, or from another owner's."""
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
            raise StoreError(f"{len(self._left)} late reads of {self.name} have not ended yet")
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
        if is_own and not found:  # somebody else has removed it
            self._keeper.drop(name)
        self._keeper.counts.hits += found
        return found

    async def _read_file(self, folder: DiskFolder, name: str, into: memoryview, *, is_own: bool) -> bool:
        """Have a thread read a file. When the call is cancelled, the thread goes on without the memory."""
        memory = WithdrawableMemory(into)
        try:
            return await in_thread_until_cancelled(
                lambda: folder.read(name, memory, is_own=is_own), self._threads, self._left
            )
        finally:
            memory.withdraw()

    def holds(self, ref: ObjectRef) -> bool:
        """Return whether an object is in the own part."""
        return name_of(ref) in self._keeper

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into the line of those that wait to be written, if that is worth it and there is room."""
        if not self.takes_in or ref.size_bytes > self._largest_bytes or not self._buffers.free:
            self._keeper.counts.declined += 1
            return
        evicted = self._keeper.offer(ref)
        if evicted is None:
            return
        slot = self._buffers.acquire()
        assert slot is not None  # noqa: S101 - there was a free one
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
        assert folder is not None  # noqa: S101 - it is closed after the last writing
        data = self._buffers.view(writing.slot, writing.size_bytes)
        if not self.takes_in or writing.name not in self._keeper:  # evicted before it was written
            await in_thread(lambda _: folder.remove(*writing.instead_of))
            self._keeper.drop(writing.name)
            return
        try:
            if await in_thread(lambda _: folder.write(writing.name, data, writing.instead_of)):
                self._pause_seconds = _LEAST_PAUSE_SECONDS
                return
            self._warn("takes nothing in for now", "its disk is nearly full")
        except OSError as error:
            if error.errno not in _OF_ONE_NAME:
                self._pause(error)
        self._keeper.counts.declined += 1
        self._keeper.drop(writing.name)

    def _pause(self, error: OSError) -> None:
        """Take nothing in for a while, twice as long as before if nothing could be written in between."""
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds >= self._resume_seconds:
            _log.warning("the cache %s takes nothing in for %g s: %s", self.name, self._pause_seconds, error)
            self._resume_seconds = now_seconds + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MOST_PAUSE_SECONDS)

    def _warn(self, what: str, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the cache %s %s: %s", self.name, what, why)

    async def flush(self) -> None:
        """Wait until nothing waits to be written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        """Write what waits to be written, and give the part up; what is in it stays for the next. Idempotent."""
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
