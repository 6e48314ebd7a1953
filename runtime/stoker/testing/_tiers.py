"""The contract of tiers, as tests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from stoker._base.checksum import crc32c
from stoker._base.task_group import end_tasks
from stoker.abc import ObjectRef, Tier
from stoker.errors import StoreError

_SIZE_BYTES = 4 << 10
_UNTOUCHED = 0xA5


def _create_object(number: int) -> tuple[ObjectRef, bytes]:
    data = bytes((number * 31 + place * 7) % 251 for place in range(_SIZE_BYTES))
    return _create_ref(f"data/{number:08}", data, number), data


def _create_ref(key: str, data: bytes, row: int) -> ObjectRef:
    sha256_128 = hashlib.sha256(data).digest()[:16]
    checksum, dataset = crc32c(data), "0" * 32
    return ObjectRef(key=key, size_bytes=len(data), crc32c=checksum, sha256_128=sha256_128, dataset=dataset, row=row)


async def _read_object(tier: Tier, ref: ObjectRef) -> bytes | None:
    """Return the bytes of an object, None if the tier does not have it or fails."""
    into = memoryview(bytearray([_UNTOUCHED]) * ref.size_bytes)
    try:
        return bytes(into) if await tier.read(ref, into) else None
    except StoreError:
        return None


class TierTests:
    """The tests of a :class:`~stoker.abc.Tier`, with a few objects of 4 KiB.

    Override :meth:`create_tier`, and :meth:`settle` if offered objects become readable only after a while. Each test
    has its own event loop.

    Attributes:
        keeps: whether the tier stores at least one of the offered objects while it has room; default True. Set it to
            False for a tier that stores nothing by itself.

    Example:
        >>> from stoker.testing import TierTests
        >>> class TestMyTier(TierTests):
        ...     async def create_tier(self):
        ...         return MyTier(limit_bytes=1 << 20)
    """

    keeps = True

    async def create_tier(self) -> Tier:
        """Return a tier that can be read and has none of the suite's objects."""
        raise NotImplementedError("override create_tier in your test class")

    async def settle(self, tier: Tier) -> None:
        """Wait until the objects offered to ``tier`` can be read."""

    def _run(self, check: Callable[[Tier], Awaitable[None]]) -> None:
        async def checked() -> None:
            tier = await self.create_tier()
            try:
                await check(tier)
            finally:
                await tier.close()

        self._run_loop(checked())

    def _run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)

    def test_it_has_a_name(self) -> None:
        async def check(tier: Tier) -> None:
            assert isinstance(tier.name, str)
            assert tier.name

        self._run(check)

    def test_what_was_never_offered_is_not_here(self) -> None:
        async def check(tier: Tier) -> None:
            ref, _ = _create_object(1)
            assert await _read_object(tier, ref) is None

        self._run(check)

    def test_what_was_offered_is_read_again_bit_by_bit(self) -> None:
        async def check(tier: Tier) -> None:
            reads = []
            for number in range(4):
                ref, data = _create_object(number)
                tier.offer(ref, memoryview(data))
                await self.settle(tier)
                reads.append(await _read_object(tier, ref))
                assert reads[-1] in (None, data), f"{ref.key} is not what was offered"
            assert any(reads) or not self.keeps, "it keeps no offered object; set keeps = False if that is intended"

        self._run(check)

    def test_it_copies_what_it_is_offered(self) -> None:
        async def check(tier: Tier) -> None:
            ref, data = _create_object(1)
            reused = bytearray(data)
            tier.offer(ref, memoryview(reused))
            reused[:] = bytes(len(reused))
            await self.settle(tier)
            assert await _read_object(tier, ref) in (None, data), "it refers to memory that the caller reuses"

        self._run(check)

    def test_an_object_of_another_checksum_or_key_is_another_object(self) -> None:
        async def check(tier: Tier) -> None:
            ref, data = _create_object(1)
            tier.offer(ref, memoryview(data))
            await self.settle(tier)
            changed = bytes([data[0] ^ 1]) + data[1:]
            for other in (_create_ref(ref.key, changed, 1), _create_ref(ref.key, data[:-1], 1)):
                assert await _read_object(tier, other) is None, f"{other} was never offered"

        self._run(check)

    def test_many_reads_at_once_have_their_own_bytes(self) -> None:
        async def check(tier: Tier) -> None:
            objects = [_create_object(number) for number in range(4)]
            for ref, data in objects:
                tier.offer(ref, memoryview(data))
                await self.settle(tier)
            reads = await asyncio.gather(*(_read_object(tier, ref) for ref, _ in objects * 4))
            assert all(each in (None, data) for each, (_, data) in zip(reads, objects * 4, strict=True))

        self._run(check)

    def test_a_read_that_is_cancelled_ends_soon_and_writes_nothing_afterwards(self) -> None:
        async def check(tier: Tier) -> None:
            ref, data = _create_object(1)
            tier.offer(ref, memoryview(data))
            await self.settle(tier)
            for turns in range(4):
                into = memoryview(bytearray(ref.size_bytes))
                reading = asyncio.create_task(tier.read(ref, into))
                for _ in range(turns):
                    await asyncio.sleep(0)
                async with asyncio.timeout(5.0):
                    await end_tasks([reading])
                into[:] = bytes([_UNTOUCHED]) * len(into)
                await asyncio.sleep(0.02)
                assert bytes(into) == bytes([_UNTOUCHED]) * len(into), "it wrote to the memory after the read had ended"

        self._run(check)

    def test_closing_twice_is_closing_once(self) -> None:
        async def check(tier: Tier) -> None:
            ref, data = _create_object(1)
            tier.offer(ref, memoryview(data))
            await tier.close()
            await tier.close()

        self._run(check)
