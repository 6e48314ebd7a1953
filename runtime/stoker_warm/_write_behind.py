"""Objects that are put away behind the back of whoever has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from stoker_warm._code import Code
from stoker_warm._directory import Directory
from stoker_warm._settings import WarmConfig
from stoker_warm._statistics import ProxyTally
from stoker_warm._writing import ShardWriter, encoded

__all__ = ["WriteBehind"]


class WriteBehind:
    """Copies of objects, up to so many bytes, until they are with nodes. Lives on the proxy's event loop.

    Args:
        config: of the tier.
        writer: puts them away.
        directory: knows which are away.
        tally: where they are counted.
        spawn: runs what it is given until it ends or the proxy does.
    """

    def __init__(
        self,
        config: WarmConfig,
        writer: ShardWriter,
        directory: Directory,
        tally: ProxyTally,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._config, self._writer, self._directory, self._tally, self._spawn = config, writer, directory, tally, spawn
        self._turns = asyncio.Semaphore(config.writes)
        self._is_closed = False

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time, if there is room for a copy until then. Never blocks."""
        if not self._has(name) and self._has_room(len(data)):
            self._begin(name, self._config.code, bytes(data))

    def take(self, name: str, data: bytearray) -> bool:
        """Like :meth:`offer`, but without a copy: nobody changes ``data`` any more.

        Returns:
            Whether it is here, or will be if nothing comes between.
        """
        if self._has(name):
            return True
        if not self._has_room(len(data)):
            return False
        self._begin(name, self._config.code, data)
        return True

    def rebuild(self, name: str, code: Code, data: memoryview) -> None:
        """Put the lost shards of an object away again, of which the bytes are at hand; if there is room for a copy."""
        if self._fits(len(data)) and name not in self._writer.under_way:
            self._begin(name, code, bytes(data))

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True

    def _has(self, name: str) -> bool:
        return self._directory.find(name) is not None or name in self._writer.under_way

    def _has_room(self, size_bytes: int) -> bool:
        has_room = self._fits(size_bytes)
        self._tally.declined += not has_room
        return has_room

    def _fits(self, size_bytes: int) -> bool:
        return not self._is_closed and self._tally.pending_bytes + size_bytes <= self._config.pending_bytes

    def _begin(self, name: str, code: Code, data: bytes | bytearray) -> None:
        self._writer.under_way.add(name)
        self._tally.pending_bytes += len(data)
        writing = self._spawn(self._write(name, code, data))
        writing.add_done_callback(lambda _: self._ended(name, len(data)))

    def _ended(self, name: str, size_bytes: int) -> None:
        self._writer.under_way.discard(name)
        self._tally.pending_bytes -= size_bytes

    async def _write(self, name: str, code: Code, data: bytes | bytearray) -> None:
        async with self._turns:
            is_new = self._directory.find(name, is_use=False) is None
            written = await self._writer.write(name, code, partial(encoded, code, data))
            if written is None:
                self._tally.declined += 1
            elif not is_new:
                self._tally.rebuilt += written.stored
            elif self._directory.find(name, is_use=False) is not None:
                self._tally.stored += 1
            else:
                self._tally.declined += 1
