"""The catalog in Redis: records in memory, and nothing lost when the memory is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConnectionLostError, CredentialsError
from stoker.pack.record import PackRecord, record_key
from stoker.store import open_store
from stoker_functions.commit import commit
from stoker_functions.deployment import Deployment
from stoker_functions.pack import pack
from support.deployments import Place, plenty
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
            assert record.to_bytes() == before[run].to_bytes()
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


def test_a_run_that_was_not_finished_is_restored_as_unfinished_and_goes_on(server: RedisServer) -> None:
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

    async def gone(place: Place, opened: Deployment) -> None:
        server.kill()
        with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1"):
            await opened.catalog(place.dataset).records()

    with_deployment(server, gone)
