"""The client of a shared tier: reads, offers, choice of the server, and verification of answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import stoker
from stoker import Array
from stoker._base.breaker import FAILURE_THRESHOLD
from stoker._base.meter import ReaderWrapper
from stoker._cache.tiers import open_tier
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._shared import read_through
from stoker._shared import server as tier_server
from stoker._shared.address import Address
from stoker._shared.certificate import create_ephemeral_tls
from stoker._shared.client import ServerAddress, SharedTier, _BufferPool
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.read_through import ReadThrough, is_valid_object
from stoker._shared.serving import ListenAddress
from stoker.abc import CorrectedTier, ObjectRef, PlacedTier, Readable, Tier
from stoker.errors import ConfigError, ConnectionLostError, CredentialsError, StoreError
from stoker.testing import TierTests, WatchedStore
from support.shared_tier import OTHER_SECRET, SECRET, client_of, object_of, offered, read, running, server_of
from support.waiting import until, until_async


class TestSharedTier(TierTests):
    """Each test has a server of its own."""

    settled = 0

    async def create_tier(self) -> Tier:
        self.server = server_of()
        self.listening = running(self.server)
        tier = SharedTier([ServerAddress.parse(await self.listening.__aenter__())], SECRET)
        close = tier.close

        async def close_both() -> None:
            await close()
            await self.listening.__aexit__(None, None, None)

        tier.close = close_both  # type: ignore[method-assign]  # the suite closes nothing else
        return tier

    async def settle(self, tier: Tier) -> None:
        self.settled += 1
        await until(lambda: self.server.statistics()["memory"].added == self.settled)


def test_it_reads_what_another_machine_has_offered_over_tls_that_it_knows_by_its_fingerprint() -> None:
    async def main() -> None:
        ref, data = object_of(1, 3_000_000)
        endpoint = ListenAddress(address=Address("127.0.0.1", 0), tls=create_ephemeral_tls())
        async with running(server_of(1 << 24), endpoint) as url, client_of(url) as one, client_of(url) as two:
            await offered(one, ref, data)
            assert await read(two, ref) == data
            origin = url.partition("?")[0]
            for wrong in (f"{origin}?fingerprint={'0' * 64}", origin):
                async with client_of(wrong) as deceived:
                    with pytest.raises(StoreError, match="certificate"):
                        await read(deceived, ref)

    asyncio.run(main())


def test_without_a_server_a_read_is_an_error_and_a_failed_offer_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        ref, data = object_of(1)
        async with running(server_of()) as url:
            pass
        async with client_of(url) as tier:
            with pytest.raises(ConnectionLostError):
                await read(tier, ref)
            for number in range(3):
                offer(tier, number)
            await until(lambda: caplog.records)
            tier.offer(ref, memoryview(data))
            await asyncio.sleep(0.05)

    asyncio.run(main())
    (record,) = caplog.records
    assert record.message.startswith("a tier server accepts no objects, and is offered at most one every 5 s: http://")
    assert record.message.count("://") == 1
    assert SECRET.token not in caplog.text


def test_a_server_without_room_is_not_offered_the_next_objects_and_that_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        server = server_of(15_000)
        async with running(server) as url, client_of(url) as tier:
            await offered(tier, *object_of(1))
            offer(tier, 2)
            await until(lambda: server.statistics()["memory"].declined)
            await asyncio.sleep(0.05)
            offer(tier, 3)
            await asyncio.sleep(0.05)
            assert server.statistics()["memory"].declined == 1
            assert await tier.flush() == 1, "of three offers one was accepted"

    asyncio.run(main())
    assert not caplog.records


def test_a_flush_ends_when_every_offer_is_with_its_server() -> None:
    async def main() -> None:
        server = server_of()
        async with running(server) as url, client_of(url) as tier:
            assert await tier.flush() == 0
            for number in range(5):
                offer(tier, number)
            assert await tier.flush() == 5
            assert server.statistics()["memory"].added == 5

    asyncio.run(main())


def test_an_unknown_tenant_is_reported_by_the_server() -> None:
    async def main() -> None:
        async with running(server_of()) as url, client_of(url, secret=OTHER_SECRET) as tier:
            with pytest.raises(CredentialsError, match="STOKER_TIER_SECRET"):
                await read(tier, object_of(1)[0])

    asyncio.run(main())


def test_an_object_whose_sha256_is_unknown_is_not_offered() -> None:
    async def main() -> None:
        ref, data = object_of(1)
        weak = replace(ref, sha256_128=None)
        server = server_of()
        async with running(server) as url, client_of(url) as tier:
            assert await read(tier, weak) is None
            tier.offer(weak, memoryview(data))
            await offered(tier, ref, data)
            assert await read(tier, weak) is None
        assert server.stats.received_bytes == len(data)

    asyncio.run(main())


def test_two_objects_of_one_size_and_crc_have_two_names() -> None:
    async def main() -> None:
        ref, data = object_of(1)
        twin = replace(ref, sha256_128=bytes(16), key="data/0123456789abcdef/00000002")
        assert (twin.size_bytes, twin.crc32c) == (ref.size_bytes, ref.crc32c)
        async with running(server_of()) as url, client_of(url) as tier:
            await offered(tier, ref, data)
            assert await read(tier, twin) is None
            for one, other in ((ref, twin), (replace(ref, sha256_128=None), replace(twin, sha256_128=None))):
                assert tier._name(one) != tier._name(other)

    asyncio.run(main())


def test_an_object_that_was_rejected_is_forgotten_by_the_server() -> None:
    async def main() -> None:
        ref, data = object_of(1)
        async with running(server_of()) as url, client_of(url) as tier:
            await offered(tier, ref, data)
            tier.reject(ref)
            await until_async(lambda: lacks(tier, ref))

    asyncio.run(main())
    assert isinstance(SharedTier([], SECRET), CorrectedTier)


def test_servers_divide_the_objects_and_one_that_goes_takes_only_its_own() -> None:
    servers = [ServerAddress(f"https://10.0.0.{number}:7412", "0" * 64) for number in range(4)]
    tier = SharedTier(servers, SECRET)
    assert isinstance(tier, PlacedTier)
    places = {number: tier.place(object_of(number, 10)[0]) for number in range(400)}
    assert min(Counter(places.values()).values()) > 60
    fewer = SharedTier(servers[:3], SECRET)
    moved = [number for number in places if fewer.place(object_of(number, 10)[0]) != places[number]]
    assert {places[number] for number in moved} == {servers[3].origin}
    assert SharedTier(servers[:1], SECRET).place(object_of(1)[0]) == ""


def test_several_servers_hold_what_is_offered_each_a_part() -> None:
    async def main() -> None:
        one, two = server_of(), server_of()
        async with running(one) as url, running(two) as other, client_of(url, other) as tier:
            for number in range(12):
                await offered(tier, *object_of(number))
            assert all([await read(tier, ref) == data for ref, data in map(object_of, range(12))])
        assert one.stats.received_bytes + two.stats.received_bytes == 120_000
        assert min(one.stats.received_bytes, two.stats.received_bytes) > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://10.0.0.9:7412", "use https://"),
        ("https://10.0.0.9:7412/path", "not a tier server"),
        ("https://10.0.0.9:0", "not a tier server"),
        ("https://10.0.0.9:99999", "not the URL"),
        ("https://:7412", "not a tier server"),
        ("https://user:hunter2@10.0.0.9:7412", "secret belongs in"),
        ("https://10.0.0.9:7412?fingerprint=abc", "64 hexadecimal digits"),
        ("http://127.0.0.1:7412?fingerprint=" + "0" * 64, "64 hexadecimal digits"),
        ("https://10.0.0.9:7412?limit=8GB", "only the setting fingerprint="),
        ("https://10.0.0.9:7412#x", "only the setting fingerprint="),
        ("https://10.0.0.9:7412,https://10.0.0.9:7412", "given twice"),
        ("https://10.0.0.9:7412,", "not a tier server"),
    ],
)
def test_a_url_that_is_not_right_is_an_error_that_says_why(
    url: str, match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", SECRET.reveal())
    with pytest.raises(ConfigError, match=match) as caught:
        open_tier(url, store=stoker.open_store(tmp_path))
    assert "hunter2" not in str(caught.value)


def test_without_a_secret_a_tier_is_not_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STOKER_TIER_SECRET", raising=False)
    with pytest.raises(ConfigError, match="STOKER_TIER_SECRET is not set"):
        open_tier("https://10.0.0.9:7412", store=stoker.open_store(tmp_path))


def offer(tier: SharedTier, number: int) -> None:
    ref, data = object_of(number)
    tier.offer(ref, memoryview(data))


async def lacks(tier: SharedTier, ref: ObjectRef) -> bool:
    return await read(tier, ref) is None


SCHEMA = {"x": Array("uint8", (500,))}


def pack(url: Path, rows: int, **settings: Any) -> None:
    """Pack rows into super-samples of 8 or so."""
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=4096, **settings) as packer:
        packer.extend({"x": np.full(500, row % 251, np.uint8)} for row in range(rows))


def without_sha256(manifest: Manifest) -> Manifest:
    """Return a manifest as earlier releases wrote it."""
    return replace(manifest, rows=replace(manifest.rows, sha256_128=None))


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_server_reads_an_unoffered_object_once_for_all_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    pack(tmp_path / "data", 100)

    async def main() -> None:
        store = WatchedStore(stoker.open_store(tmp_path / "data"))
        manifest = await read_manifest(store)
        if is_earlier:
            manifest = without_sha256(manifest)
            monkeypatch.setattr(read_through, "read_manifest", lambda _: returned(manifest))
        source = ReadThrough(store, [OTHER_SECRET, SECRET])
        await source.refresh()
        server = server_of(secrets=(OTHER_SECRET, SECRET), sources=[source])
        async with running(server) as url, client_of(url) as one, client_of(url) as two:
            refs = [manifest.ref(row) for row in range(len(manifest))]
            for ref in refs:
                body, _ = await store.get(ref.key)
                await asyncio.gather(*(until_async(partial(read, tier, ref)) for tier in (one, two)))
                assert await read(one, ref) == await read(two, ref) == body
            assert server.stats.fetched == len(refs)
            assert await read(one, object_of(1)[0]) is None

    asyncio.run(main())


async def returned(manifest: Manifest) -> Manifest:
    return manifest


def test_what_is_being_received_is_not_read_from_the_bucket_beside(tmp_path: Path) -> None:
    pack(tmp_path / "data", 10)

    async def main() -> None:
        store = WatchedStore(stoker.open_store(tmp_path / "data"))
        source = ReadThrough(store, [SECRET])
        await source.refresh()
        ref = (await read_manifest(store)).ref(0)
        body, _ = await store.get(ref.key)
        server = server_of(sources=[source])
        async with running(server) as url, client_of(url) as tier:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"PUT /objects/{tier._name(ref)} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {SECRET.token}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            await until(lambda: server.statistics()["memory"].used_bytes)
            assert await read(tier, ref) is None
            writer.write(body)
            assert b" 201 " in await reader.readline()
            writer.close()
            assert await read(tier, ref) == body
        assert server.stats.fetched == 0
        assert server.statistics()["memory"].added == 1

    asyncio.run(main())


def test_a_server_learns_of_a_version_that_was_written_after_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_through, "_REFRESH_SECONDS", 0.0)
    pack(tmp_path / "data", 10)

    async def main() -> None:
        store = stoker.open_store(tmp_path / "data")
        source = ReadThrough(store, [SECRET])
        await source.refresh()
        await asyncio.to_thread(pack, tmp_path / "data", 50, mode="append")
        manifest = await read_manifest(store)
        async with running(server_of(sources=[source])) as url, client_of(url) as tier:
            await until_async(lambda: read(tier, manifest.ref(len(manifest) - 1)))

    asyncio.run(main())


def test_a_failing_bucket_is_a_miss_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack(tmp_path / "data", 10)

    async def main() -> None:
        store = stoker.open_store(tmp_path / "data")
        source = ReadThrough(store, [SECRET])
        await source.refresh()
        ref = (await read_manifest(store)).ref(0)
        (tmp_path / "data" / ref.key).write_bytes(bytes(ref.size_bytes))
        server = server_of(sources=[source])
        async with running(server) as url, client_of(url) as tier:
            for failures in range(1, 4):
                assert await read(tier, ref) is None
                await until(lambda: server.stats.fetch_failures == failures)  # noqa: B023 - it is over when it changes
        assert server.stats.fetched == 0

    asyncio.run(main())
    assert caplog.text.count("could not be read from its bucket") == 1


def test_a_bucket_that_hangs_is_left_alone_after_a_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tmp_path / "data", 100)
    monkeypatch.setattr(tier_server, "_FETCH_TIMEOUT_SECONDS", 0.01)

    class Hanging(ReaderWrapper[Readable]):
        reads = 0

        async def get_range(self, *_: Any, **__: Any) -> Any:
            self.reads += 1
            await asyncio.Event().wait()

    async def main() -> None:
        store = Hanging(stoker.open_store(tmp_path / "data"))
        source = ReadThrough(store, [SECRET])
        await source.refresh()
        manifest = await read_manifest(store)
        server = server_of(sources=[source])
        async with running(server) as url, client_of(url) as tier:
            for row in range(8):
                assert await read(tier, manifest.ref(row)) is None
                await until(lambda: not server._fetches)
            assert store.reads == FAILURE_THRESHOLD
            assert server.stats.fetch_failures == FAILURE_THRESHOLD

    asyncio.run(main())


def test_objects_that_are_named_without_sha256_outlive_the_server_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(tmp_path / "data", 20)

    async def main() -> None:
        store = WatchedStore(stoker.open_store(tmp_path / "data"))
        manifest = without_sha256(await read_manifest(store))
        monkeypatch.setattr(read_through, "read_manifest", lambda _: returned(manifest))
        refs = [manifest.ref(row) for row in range(2)]
        for fetched in (2, 1):
            source = ReadThrough(store, [SECRET])
            await source.refresh()
            folder = FolderStorage(tmp_path / "tier", 1 << 20, partial(is_valid_object, [SECRET], [source]))
            server = server_of(100, folder=folder, sources=[source])
            async with running(server) as url, client_of(url) as tier:
                for ref in refs:
                    await until_async(partial(read, tier, ref))
            assert server.stats.fetched == fetched, "one is here, and one was damaged"
            damaged = tmp_path / "tier" / SECRET.tenant / "objects" / SECRET.object_name(refs[0])
            damaged.write_bytes(bytes(refs[0].size_bytes))

    asyncio.run(main())


def test_copies_of_mixed_sizes_never_exceed_their_limit() -> None:
    copies, held = _BufferPool(1000), list[bytearray]()
    rng = random.Random(1)
    for _ in range(2000):
        if held and rng.random() < 0.5:
            copies.release(held.pop(rng.randrange(len(held))))
        elif (buffer := copies.acquire(size_bytes := rng.choice((1, 10, 100, 600)))) is not None:
            assert size_bytes <= len(buffer) <= 2 * size_bytes
            held.append(buffer)
        assert sum(map(len, [*held, *copies._spare])) <= 1000
    for buffer in held:
        copies.release(buffer)
    assert copies.acquire(1000) is not None
    assert copies.acquire(1) is None


@pytest.mark.parametrize("status", [302, 400, 403, 429, 500, 502, 503, 507, 520])
def test_a_refusal_names_the_tier_server_and_not_the_bucket(status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no")

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}") as tier:
            with pytest.raises(StoreError, match="tier server") as caught:
                await read(tier, object_of(1)[0])
        assert "bucket" not in str(caught.value)
        assert "the store" not in str(caught.value)
        await runner.cleanup()

    asyncio.run(main())
