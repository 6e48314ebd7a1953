"""``stoker warm bench``: how fast a warm tier takes objects, and gives them back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stoker._base.checksum import crc32c
from stoker._base.sizes import format_bytes
from stoker._base.task_group import for_each
from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.errors import DeadlineError
from stoker_warm._opening import WarmKeeper

__all__ = ["measured", "rows_of_bench"]

_LOOK_SECONDS = 0.005
_BATCH_BYTES = 64 << 20
"""Objects are offered so many bytes at a time: of more, a proxy would decline some."""
_PATIENCE_SECONDS = 120.0


async def measured(keeper: WarmKeeper, *, objects: int, size_bytes: int, at_once: int) -> dict[str, Any]:
    """Write objects that were never there, and read them back.

    Args:
        keeper: of the tier.
        objects: how many. They differ by their keys only, so that they take no more memory here than one.
        size_bytes: of each.
        at_once: reads under way at a time; writes are as many as the proxy is set to.

    Returns:
        The figures, as JSON values; ``written`` and ``read`` may be fewer than ``objects``.

    Raises:
        StoreError: the proxy cannot be asked, or does not get rid of what it was offered.
    """
    data, run = secrets.token_bytes(size_bytes), secrets.token_hex(8)
    checksum = crc32c(data)
    refs = (ObjectRef(key=f"bench/{run}/{row}", size_bytes=size_bytes, crc32c=checksum) for row in range(objects))
    names = [name_of(ref) for ref in refs]
    before = await keeper.status(wakes=True)
    write_seconds = await _written(keeper, names, memoryview(data))
    after = await keeper.status()
    begun = time.perf_counter()
    seconds = await _read(keeper, names, checksum, size_bytes, at_once)
    read_seconds = time.perf_counter() - begun
    return {
        "objects": objects,
        "size_bytes": size_bytes,
        "at_once": at_once,
        "written": after["stored"] - before["stored"],
        "write_seconds": write_seconds,
        "write_bytes_per_second": (after["stored"] - before["stored"]) * size_bytes / write_seconds,
        "read": len(seconds),
        "read_seconds": read_seconds,
        "read_bytes_per_second": len(seconds) * size_bytes / read_seconds,
        "read_p50_seconds": float(np.quantile(seconds, 0.5)) if seconds else None,
        "read_p99_seconds": float(np.quantile(seconds, 0.99)) if seconds else None,
    }


def rows_of_bench(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table."""
    each = format_bytes(found["size_bytes"])
    rates = {name: f"{found[f'{name}_bytes_per_second'] / 1e6:,.0f} MB/s" for name in ("read", "write")}
    late = ""
    if found["read"]:
        late = f"; p50 {found['read_p50_seconds'] * 1e3:,.1f} ms, p99 {found['read_p99_seconds'] * 1e3:,.1f} ms"
    return [
        ("written", f"{found['written']:,} of {found['objects']:,} objects of {each}: {rates['write']}"),
        ("read", f"{found['read']:,} of {found['objects']:,}, {found['at_once']:,} at once: {rates['read']}{late}"),
    ]


async def _written(keeper: WarmKeeper, names: Sequence[str], data: memoryview) -> float:
    """Offer objects, and return how many seconds it took until nothing waited any more."""
    batch = max(1, _BATCH_BYTES // max(1, len(data)))
    begun = time.perf_counter()
    for start in range(0, len(names), batch):
        for name in names[start : start + batch]:
            keeper.offer(name, data)
        await _settled(keeper)
    return time.perf_counter() - begun


async def _settled(keeper: WarmKeeper) -> None:
    loop = asyncio.get_running_loop()
    end_seconds = loop.time() + _PATIENCE_SECONDS
    await asyncio.sleep(0)
    while (await keeper.status())["pending_bytes"]:
        if loop.time() > end_seconds:
            raise DeadlineError(f"the warm tier has not put away within {_PATIENCE_SECONDS:g} s what it was offered")
        await asyncio.sleep(_LOOK_SECONDS)


async def _read(keeper: WarmKeeper, names: Sequence[str], checksum: int, size_bytes: int, at_once: int) -> list[float]:
    """Read objects, and return the seconds of those reads that brought the right bytes."""
    seconds, buffers = list[float](), [memoryview(bytearray(size_bytes)) for _ in range(at_once)]

    async def read(name: str) -> None:
        into = buffers.pop()
        try:
            begun = time.perf_counter()
            if await keeper.read(name, into):
                taken = time.perf_counter() - begun
                seconds.extend([taken] if crc32c(into) == checksum else [])
        finally:
            buffers.append(into)

    await for_each(names, read, concurrency=at_once)
    return seconds
