"""Random access within a budget: how its memory is spent, the least that works, and the queue of those that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from stoker._base.sizes import format_bytes
from stoker._format.manifest import Manifest
from stoker._format.schema import Schema
from stoker.errors import BudgetError

__all__ = ["ByteBudget", "SampleMemory", "head_bytes_held"]

_HEAD_OBJECT_BYTES = 1536
_TENSOR_OBJECT_BYTES = 256
"""What an open head takes besides its bytes: measured, and rounded up. It knows where each of its tensors starts."""


def head_bytes_held(schema: Schema, head_bytes: int) -> int:
    """Return what a head of ``head_bytes`` takes when it is open."""
    tensors = 1 + len(schema) + sum(not column.is_fixed for column in schema.values())
    return head_bytes + _HEAD_OBJECT_BYTES + _TENSOR_OBJECT_BYTES * tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMemory:
    """What random access may hold at a time, beside what it returns.

    Attributes:
        manifest_bytes: of the manifest and the index of its rows.
        hedge_slots: for hedged requests.
        slot_bytes: of one: the size of the largest super-sample.
        head_bytes: of heads, those in use and those that are kept.
        value_bytes: of values on their way.
    """

    manifest_bytes: int
    hedge_slots: int
    slot_bytes: int
    head_bytes: int
    value_bytes: int

    @classmethod
    def plan(cls, manifest: Manifest, hedge_slots: int, memory_bytes: int) -> Self:
        """Return how ``memory_bytes`` are spent: up to half of what is free on heads, the rest on values.

        Raises:
            BudgetError: one head, one super-sample and the hedges do not fit; names the figure that does.
        """
        manifest_bytes = manifest.file_bytes + 8 * (len(manifest) + 1)
        slot_bytes = manifest.largest_bytes
        largest_head_bytes = head_bytes_held(manifest.schema, int(manifest.rows.head_bytes.max()))
        free_bytes = memory_bytes - manifest_bytes - hedge_slots * slot_bytes
        if free_bytes < largest_head_bytes + slot_bytes:
            figure = memory_bytes - free_bytes + largest_head_bytes + slot_bytes
            raise BudgetError(
                f"memory {format_bytes(memory_bytes)} is too small for random access: a manifest of "
                f"{format_bytes(manifest_bytes)}, a super-sample of up to {format_bytes(slot_bytes)}, its head and "
                f"{hedge_slots} hedges must fit; give memory={figure} ({format_bytes(figure)})"
            )
        heads_bytes = head_bytes_held(manifest.schema, 0) * len(manifest) + int(
            manifest.rows.head_bytes.sum(dtype="i8")
        )
        head_bytes = max(largest_head_bytes, min(heads_bytes, free_bytes // 2, free_bytes - slot_bytes))
        return cls(
            manifest_bytes=manifest_bytes,
            hedge_slots=hedge_slots,
            slot_bytes=slot_bytes,
            head_bytes=head_bytes,
            value_bytes=free_bytes - head_bytes,
        )


class ByteBudget:
    """Lends out ``limit_bytes``. Belongs to one event loop.

    The order of arrival keeps those who need much from being passed for ever by those who need little.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Lent out now."""
        return self._held_bytes

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold bytes for a while, after waiting for them.

        Raises:
            BudgetError: there are never so many.
        """
        await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def acquire(self, size_bytes: int) -> None:
        """Wait for bytes and hold them until they are released. A wait that is cancelled leaves none behind.

        Raises:
            BudgetError: there are never so many.
        """
        if size_bytes > self.limit_bytes:
            raise BudgetError(f"{size_bytes} bytes are more than the {self.limit_bytes} there are; give more memory")
        if self._waiting or self._held_bytes + size_bytes > self.limit_bytes:
            await self._wait(size_bytes)
        else:
            self._held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back bytes that were acquired."""
        self._held_bytes -= size_bytes
        self._admit()

    async def _wait(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._held_bytes -= size_bytes  # they were granted just before
            self._admit()  # whom this one was in the way of
            raise

    def _admit(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if self._held_bytes + size_bytes > self.limit_bytes:
                    return
                self._held_bytes += size_bytes
                turn.set_result(None)
            self._waiting.popleft()
