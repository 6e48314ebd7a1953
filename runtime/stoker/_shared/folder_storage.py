"""Objects of a tier server in files, which any other web server can serve, too."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from stoker._base.threads import run_in_thread
from stoker._shared.storage import BoundedStorage
from stoker.errors import ConfigError

_log = logging.getLogger("stoker.tier.server")
_FILE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TENANT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_OBJECTS = "objects"
_PARTIAL = ".partial"
_MAX_WRITING_BYTES = 128 << 20
"""Maximum size of one tenant's objects in memory that wait to be written to disk."""


class FolderStorage(BoundedStorage[Path]):
    """Objects in files ``FOLDER/<tenant>/objects/<name>``, which any web server can serve.

    A file is renamed to its name when it is complete. Files of an earlier process are kept, and verified before their
    first read. A lock ensures that only one process at a time uses a folder.

    Args:
        folder: Folder of the files; created if it does not exist.
        limit_bytes: Maximum size of all files together, in bytes.
        is_valid: Returns whether bytes are those of the object with a key; called in a thread.
        clock: Monotonic clock, in seconds. Default: :func:`time.monotonic`.

    Raises:
        ConfigError: The folder cannot be used, or another process uses it.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        is_valid: Callable[[str, memoryview], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit_bytes, _MAX_WRITING_BYTES, clock)
        self._folder, self._is_valid = folder, is_valid
        self._unchecked: set[str] = set()
        self._lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except OSError as error:
            self.close()
            reason = "another server uses it" if isinstance(error, BlockingIOError) else error
            raise ConfigError(f"the folder {folder} cannot be used for objects: {reason}") from None

    def _take_over(self) -> None:
        """Keep an earlier process's files as far as there is room, the newest first, and remove the others.

        Files whose names do not come from a server are not touched.
        """
        files = [(file, file.lstat()) for file in self._folder.glob(f"*/{_OBJECTS}/*") if self._is_own(file)]
        for file, status in sorted(files, key=lambda each: each[1].st_mtime, reverse=True):
            tenant = file.parent.parent.name
            key = f"{tenant}/{file.name}"
            if file.suffix != _PARTIAL and status.st_size and self._make_room(key, status.st_size) is not None:
                self._put(key, file, f"{tenant}/", status.st_size)
                self._unchecked.add(key)
            else:
                file.unlink()

    @staticmethod
    def _is_own(file: Path) -> bool:
        is_name = _FILE.fullmatch(file.name.removesuffix(_PARTIAL)) and _TENANT.fullmatch(file.parent.parent.name)
        return bool(is_name) and file.is_file() and not file.is_symlink()

    @asynccontextmanager
    async def pin(self, key: str) -> AsyncIterator[Path | None]:
        """Yield an object's file; None if it is not here, or another program has damaged or removed it."""
        entry = self._entries.get(key)
        async with super().pin(key) as file:
            if file is None or await self._is_usable(key, file):
                yield file
                return
        if self._entries.get(key) is entry:  # no other reader has dropped it meanwhile
            _log.warning("the file of %s is damaged or missing, and was dropped", key)
            self.drop(key)
        yield None

    async def _is_usable(self, key: str, file: Path) -> bool:
        if key not in self._unchecked:
            return self._is_there(file)
        if await asyncio.to_thread(self._check, key, file):
            self._unchecked.discard(key)
            return True
        return False

    @staticmethod
    def _is_there(file: Path) -> bool:
        return file.exists()

    def _check(self, key: str, file: Path) -> bool:
        try:
            return self._is_valid(key, memoryview(file.read_bytes()))
        except OSError:
            return False

    def close(self) -> None:
        """Release the folder's lock; its files stay. Idempotent."""
        super().close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _write(self, key: str, data: memoryview) -> Path:
        file = self._file(key)
        try:
            return await run_in_thread(lambda _: self._write_file(file, data))
        except asyncio.CancelledError:
            file.unlink(missing_ok=True)  # the caller gives its room back
            raise

    def _write_file(self, file: Path, data: memoryview) -> Path:
        partial = file.with_suffix(_PARTIAL)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(data)
            return partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _remove(self, key: str, data: Path | None) -> None:
        self._unchecked.discard(key)
        if data is not None:
            data.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        tenant, _, name = key.partition("/")
        return self._folder / tenant / _OBJECTS / name
