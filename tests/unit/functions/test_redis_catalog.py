"""The catalog in Redis: records in memory, and nothing lost when the memory is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from stoker import open_store
from stoker._maintenance.garbage import collect_garbage
from stoker._pack.record import PackRecord, record_key
from stoker.errors import ConnectionLostError, CredentialsError, PackError
from stoker.testing import WatchedStore
from stoker_functions._commit import commit
from stoker_functions._deployment import Deployment
from stoker_functions._pack import pack
from support.deployments import Place, plenty
from support.identities import remove_record_identities
from support.packing import read_objects
from support.redis_server import PASSWORD, RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def deployment(place: Place, server: RedisServer, **changes: Any) -> Deployment:
    return place.deployment(**{"catalog": server.url, "catalog_password": PASSWORD, **changes})


def with_deployment(server: RedisServer, main: Callable[[Place, Deployment], Awaitable[None]], **changes: Any) -> None:
    async def run() -> None:
        place = Place()
        opened = deployment(place, server, **changes)
        try:
            await main(place, opened)
        finally:
            await opened.close()

    asyncio.run(run())


async def packed(place: Place, opened: Deployment, numbers: range) -> PackRecord:
    """Pack raw objects, and return what the bucket has of the run's record."""
    part = place.part(await place.put(numbers))
    result = await pack(part.to_json(), opened, plenty())
    assert result["state"] == "complete"
    data, _ = await open_store(place.dataset).get(record_key(part.run))
    return PackRecord.from_bytes(data)


def test_while_a_run_is_packed_the_bucket_has_only_its_first_record(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        first = await packed(place, opened, range(20))
        assert (first.state, len(first)) == ("packing", 0)
        (record,) = await opened.catalog(place.dataset).records()
        assert (record.run, record.state, record.samples) == (first.run, "complete", 20)

    with_deployment(server, main)


def test_what_is_committed_is_in_the_bucket_and_no_longer_in_memory(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(20))
        await packed(place, opened, range(20, 30))
        result = await commit({"dataset": place.dataset}, opened, plenty())
        assert (result["runs"], result["added_samples"], result["version"]) == (2, 30, 1)
        records = await opened.catalog(place.dataset).records()
        assert [record.state for record in records] == ["committed", "committed"]
        server.kill()
        server.lose_what_was_saved()
        server.start()
        assert [record.state for record in await opened.catalog(place.dataset).records()] == ["committed"] * 2
        assert sorted(await place.numbers()) == list(range(30))

    with_deployment(server, main)


def test_a_server_that_loses_everything_loses_nothing(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(40))
        before = {record.run: record for record in await opened.catalog(place.dataset).records()}
        server.kill()
        server.start()
        after = {record.run: record for record in await opened.catalog(place.dataset).records()}
        assert after.keys() == before.keys()
        for run, record in after.items():
            assert (
                record.to_bytes() == remove_record_identities(before[run]).to_bytes()
            )  # no head has the hash of the whole
        await commit({"dataset": place.dataset}, opened, plenty())
        assert sorted(await place.numbers()) == list(range(40))

    with_deployment(server, main)


def test_a_server_that_loses_its_newest_writes_loses_nothing(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(40))
        part = place.part(await place.put(range(40, 60)))
        journal = await opened.catalog(place.dataset).journal(part.run)
        await journal.save(part.record())
        assert len(await opened.catalog(place.dataset).records()) == 2
        server.save()
        await pack(part.to_json(), opened, plenty())
        await packed(place, opened, range(60, 80))
        server.kill()
        server.start()
        records = await opened.catalog(place.dataset).records()
        assert [record.state for record in records] == ["complete"] * 3
        await commit({"dataset": place.dataset}, opened, plenty())
        assert sorted(await place.numbers()) == list(range(80))

    with_deployment(server, main)


def test_a_run_that_was_not_finished_is_restored_as_unfinished_and_continues(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        part = place.part(await place.put(range(40)))
        await pack(part.to_json(), opened, plenty())
        await open_store(place.dataset).delete(f"data/{part.run}/00000004")
        server.kill()
        server.start()
        (record,) = await opened.catalog(place.dataset).records()
        assert (record.state, len(record)) == ("packing", 4)
        assert (await pack(part.to_json(), opened, plenty()))["state"] == "complete"
        await commit({"dataset": place.dataset}, opened, plenty())
        assert sorted(await place.numbers()) == list(range(40))

    with_deployment(server, main)


def test_a_late_record_of_a_run_that_is_committed_is_not_committed_again(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        part = place.part(await place.put(range(20)))
        await pack(part.to_json(), opened, plenty())
        catalog = opened.catalog(place.dataset)
        (late,) = await catalog.records()
        await commit({"dataset": place.dataset}, opened, plenty())
        stale = await catalog.journal("f" * 16)
        await stale.save(late)  # as an invocation that was repeated writes it, which has not seen the commit
        result = await commit({"dataset": place.dataset}, opened, plenty())
        assert (result["runs"], result["version"]) == (0, 1)
        assert len(await place.numbers()) == 20

    with_deployment(server, main)


def test_a_wrong_password_and_a_server_that_is_not_there_are_typed_errors_without_the_password(
    server: RedisServer,
) -> None:
    async def wrong(place: Place, opened: Deployment) -> None:
        with pytest.raises(CredentialsError, match="STOKER_CATALOG_PASSWORD") as caught:
            await opened.catalog(place.dataset).records()
        assert "not-this" not in str(caught.value)

    with_deployment(server, wrong, catalog_password="not-this")

    async def check_lost_server(place: Place, opened: Deployment) -> None:
        server.kill()
        with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1"):
            await opened.catalog(place.dataset).records()

    with_deployment(server, check_lost_server)


def test_what_redis_has_of_a_run_and_cannot_be_read_is_restored_from_the_bucket(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(20))
        await packed(place, opened, range(20, 40))
        (before, _) = await opened.catalog(place.dataset).records()
        client = redis_client(server)
        key = f"stoker:{{{place.dataset}}}:records"
        for damaged in (b"", b"no record", before.to_bytes()[:-1] + b"x"):
            await client.hset(key, before.run, damaged)
            again = await opened.catalog(place.dataset).journal(before.run)
            assert again.recorded is not None
            (after, other) = await opened.catalog(place.dataset).records()
            assert (after.to_bytes(), other.state) == (remove_record_identities(before).to_bytes(), "complete")
        await client.aclose()

    with_deployment(server, main)


def test_a_record_that_redis_evicted_is_written_again_where_its_progress_was_not(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(20))
        client = redis_client(server)
        key = f"stoker:{{{place.dataset}}}:records"
        await client.delete(key)
        await opened.catalog(place.dataset).records()
        assert await client.hlen(key) == 1
        await client.aclose()

    with_deployment(server, main)


def test_a_run_with_a_foreign_object_does_not_block_the_commit_of_others(
    server: RedisServer,
) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        await packed(place, opened, range(20))
        part = place.part(await place.put(range(20, 40)))
        await (await opened.catalog(place.dataset).journal(part.run)).save(part.record())
        await open_store(place.dataset).put(f"data/{part.run}/00000000", b"no super-sample")
        server.kill()
        server.start()
        result = await commit({"dataset": place.dataset}, opened, plenty())
        assert (result["runs"], result["samples"]) == (1, 20)

    with_deployment(server, main)


def test_collecting_garbage_while_functions_pack_takes_nothing_of_theirs(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        store = open_store(place.dataset)
        await packed(place, opened, range(20))
        await commit({"dataset": place.dataset}, opened, plenty())
        part = place.part(await place.put(range(20, 60)))

        class Collecting(WatchedStore):
            async def after(self, number: int, operation: str, key: str) -> None:
                if operation == "put":
                    await collect_garbage(store, delete=True, keep_versions=1)

        collecting = place.deployment(Collecting, catalog=server.url, catalog_password=PASSWORD)
        assert (await pack(part.to_json(), collecting, plenty()))["state"] == "complete"
        await collecting.close()
        await collect_garbage(store, delete=True, keep_versions=1)
        await commit({"dataset": place.dataset}, opened, plenty())
        await collect_garbage(store, delete=True, keep_versions=1)
        assert sorted(await place.numbers()) == list(range(60))

    with_deployment(server, main)


def test_what_is_complete_only_in_memory_cannot_be_given_up(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        store = open_store(place.dataset)
        record = await packed(place, opened, range(20))
        unfinished = place.part(await place.put(range(20, 40)))
        await (await opened.catalog(place.dataset).journal(unfinished.run)).save(unfinished.record())
        before = await read_objects(store)
        assert set((await collect_garbage(store, delete=True)).unfinished) == {record.run, unfinished.run}
        with pytest.raises(PackError, match=f"adds 1 run .*: {record.run}"):
            await collect_garbage(store, delete=True, abandoned=[record.run, unfinished.run])
        assert await read_objects(store) == before
        await collect_garbage(store, delete=True, abandoned=[unfinished.run])
        assert (await commit({"dataset": place.dataset}, opened, plenty()))["samples"] == 20
        assert await place.numbers() == list(range(20))

    with_deployment(server, main)


def test_a_run_that_was_forgotten_while_it_was_packed_is_not_taken_for_finished(server: RedisServer) -> None:
    async def main(place: Place, opened: Deployment) -> None:
        part = place.part(await place.put(range(40)))

        class Forgetting(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if key == f"data/{part.run}/00000003":
                    await opened.catalog(place.dataset).delete_records([part.run])

        forgetting = place.deployment(Forgetting, catalog=server.url, catalog_password=PASSWORD)
        with pytest.raises(PackError, match="was deleted while it was packed"):
            await pack(part.to_json(), forgetting, plenty())
        await forgetting.close()
        assert await opened.catalog(place.dataset).records() == []
        assert (await pack(part.to_json(), opened, plenty()))["state"] == "complete"
        assert (await commit({"dataset": place.dataset}, opened, plenty()))["samples"] == 40

    with_deployment(server, main)


def redis_client(server: RedisServer) -> Redis:
    """Return a client that may do to the server what it wants."""
    return Redis.from_url(server.url, password=PASSWORD)
