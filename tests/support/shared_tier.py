"""Servers of a shared tier in this process, and objects for them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from stoker._base.checksum import crc32c
from stoker._shared.address import Address
from stoker._shared.client import ServerAddress, SharedTier
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.read_through import ReadThrough
from stoker._shared.secret import TierSecret, matches_key
from stoker._shared.server import TierServer
from stoker._shared.serving import ListenAddress, serve_tier
from stoker._shared.storage import MemoryStorage
from stoker.abc import ObjectRef
from support.waiting import until_async

SECRET = TierSecret(bytes(range(32)))
OTHER_SECRET = TierSecret(bytes(range(1, 33)))
IS_SOUND = partial(matches_key, (SECRET, OTHER_SECRET))


def object_of(number: int, size_bytes: int = 10_000, *, dataset: str = "d") -> tuple[ObjectRef, bytes]:
    """Return an object whose manifest has its SHA-256."""
    data = random.Random(number).randbytes(size_bytes)
    ref = ObjectRef(
        key=f"data/0123456789abcdef/{number:08}",
        size_bytes=size_bytes,
        crc32c=crc32c(data),
        tag=f"tag{number}",
        sha256_128=hashlib.sha256(data).digest()[:16],
        dataset=dataset,
        row=number,
    )
    return ref, data


def server_of(
    limit_bytes: int = 1 << 20,
    *,
    secrets: Sequence[TierSecret] = (SECRET,),
    folder: FolderStorage | None = None,
    sources: Sequence[ReadThrough] = (),
) -> TierServer:
    """Return a server that is not started."""
    return TierServer(secrets, MemoryStorage(limit_bytes), folder, sources)


@asynccontextmanager
async def running(server: TierServer, endpoint: ListenAddress | None = None) -> AsyncIterator[str]:
    """Start a server on a free loopback port, and yield its URL."""
    async with serve_tier(server, endpoint or ListenAddress(address=Address("127.0.0.1", 0))) as url:
        yield url


@asynccontextmanager
async def client_of(*urls: str, secret: TierSecret = SECRET) -> AsyncIterator[SharedTier]:
    """Yield a client of servers."""
    tier = SharedTier([ServerAddress.parse(url) for url in urls], secret)
    try:
        yield tier
    finally:
        await tier.close()


async def read(tier: SharedTier, ref: ObjectRef) -> bytes | None:
    """Return an object, None if the tier lacks it."""
    into = memoryview(bytearray(ref.size_bytes))
    return bytes(into) if await tier.read(ref, into) else None


async def offered(tier: SharedTier, ref: ObjectRef, data: bytes) -> None:
    """Offer an object, and wait until it can be read."""
    tier.offer(ref, memoryview(data))
    await until_async(lambda: read(tier, ref))
