"""The tier in memory: slots smaller than a page, and memory that is given back."""

from __future__ import annotations

import asyncio
import gc

import pytest

from stoker._base.checksum import crc32c
from stoker._cache.tiers import MemoryTier
from stoker.abc import ObjectRef
from support.tiers import MANIFEST, future


@pytest.mark.parametrize("size_bytes", [1, 100, 4095, 5000, 9000])
def test_slots_of_any_size_are_filled_and_read_with_no_error_on_another_thread(
    size_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        tier = MemoryTier(50 * -(-size_bytes // 64) * 64, "fifo", largest_bytes=size_bytes)
        await tier.follow(MANIFEST, future())
        for number in range(120):
            data = bytes([number]) * size_bytes
            ref = ObjectRef(key=f"data/{number}", size_bytes=size_bytes, crc32c=crc32c(data))
            tier.offer(ref, memoryview(data))
            into = bytearray(size_bytes)
            assert await tier.read(ref, memoryview(into))
            assert into == data
        assert tier.statistics().objects == 50
        await tier.close()

    asyncio.run(check())
    gc.collect()
    assert not caplog.records
