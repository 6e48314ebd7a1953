"""Several packers at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._maintenance.garbage import collect_garbage
from stoker._pack.packer import AsyncPacker
from stoker.abc import Store
from stoker.errors import DatasetExistsError, PackError
from stoker.testing import WatchedStore
from support.packing import config, fresh_store, labels, numbered_samples, pack, read_objects


class _Shuffled(WatchedStore):
    """Lets other tasks run a random number of times before and after each operation."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(store)
        self.random = random.Random(seed)

    async def before(self, number: int, operation: str, key: str) -> None:
        for _ in range(self.random.randrange(9)):
            await asyncio.sleep(0)

    after = before


async def _race(store: Store, seed: int, packs: list[tuple[list[dict[str, object]], dict[str, Any]]]) -> list[Any]:
    tasks = (pack(_Shuffled(store, seed + i), samples, **changes) for i, (samples, changes) in enumerate(packs))
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_create_the_same_one_wins_and_the_data_set_is_whole(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        outcomes = await _race(store, seed, [(numbered_samples(40), {}), (numbered_samples(40), {})])
        assert {type(outcome) for outcome in outcomes} == {Manifest, DatasetExistsError}
        assert await labels(store) == list(range(40))
        assert (await versions.read_manifest(store)).version == 1

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_create_different_data_sets_one_wins_whole(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        outcomes = await _race(
            store, seed, [(numbered_samples(40), {"source": "a"}), (numbered_samples(40, 100), {"source": "b"})]
        )
        assert {type(outcome) for outcome in outcomes} == {Manifest, DatasetExistsError}
        first = 0 if isinstance(outcomes[0], Manifest) else 100
        assert await labels(store) == list(range(first, first + 40))

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(15))
def test_appenders_of_different_sources_all_succeed(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(4))
        outcomes = await _race(
            store,
            seed,
            [(numbered_samples(10, 100 * i), {"source": f"{i}", "mode": "append"}) for i in range(1, 5)],
        )
        assert {type(outcome) for outcome in outcomes} == {Manifest}
        assert sorted(await labels(store)) == list(range(4)) + [100 * i + j for i in range(1, 5) for j in range(10)]
        assert (await versions.read_manifest(store)).version == 5
        assert (await labels(store))[:4] == [0, 1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("second", [0, 100], ids=["same samples", "other samples"])
def test_appenders_that_name_no_source_both_succeed(seed: int, second: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(4))
        changes = {"source": None, "mode": "append"}
        outcomes = await _race(
            store, seed, [(numbered_samples(10, 50), changes), (numbered_samples(10, 50 + second), changes)]
        )
        assert {type(outcome) for outcome in outcomes} == {Manifest}
        assert sorted(await labels(store)) == sorted([0, 1, 2, 3, *range(50, 60), *range(50 + second, 60 + second)])

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_append_the_same_source_at_once_one_is_refused(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(4), source="base")
        changes = {"mode": "append"}
        outcomes = await _race(store, seed, [(numbered_samples(10, 50), changes), (numbered_samples(10, 50), changes)])
        assert {type(outcome) for outcome in outcomes} == {Manifest, PackError}
        assert await labels(store) == [0, 1, 2, 3, *range(50, 60)]

    asyncio.run(main())


def test_a_twin_that_is_far_ahead_is_neither_set_back_nor_doubled() -> None:
    async def main() -> None:
        store, before = fresh_store(), dict[str, bytes]()

        async def packing() -> None:
            async with AsyncPacker(store, config()) as slow:
                await slow.write(numbered_samples(1)[0])
                await pack(store, numbered_samples(60))
                before.update(await read_objects(store))
                for sample in numbered_samples(59, 1):
                    await slow.write(sample)

        with pytest.raises(DatasetExistsError, match="at the same time"):
            await packing()
        assert await read_objects(store) == before

    asyncio.run(main())


def test_an_append_to_a_data_set_that_was_replaced_meanwhile_is_refused() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(3), source="first")

        async def packing() -> None:
            async with AsyncPacker(store, config(mode="append")) as packer:
                await packer.write(numbered_samples(1)[0])
                for key in await read_objects(store):
                    if not key.startswith("packs/") or "first" in str((await store.get(key))[0]):
                        await store.delete(key)
                await pack(store, numbered_samples(6), source="second")

        with pytest.raises(PackError, match="was deleted while"):
            await packing()
        assert await labels(store) == list(range(6))

    asyncio.run(main())


def test_a_pack_whose_record_is_collected_as_abandoned_stops_before_it_commits() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(3), source="first")

        async def packing() -> None:
            async with AsyncPacker(store, config(mode="append")) as packer:
                for sample in numbered_samples(60):
                    await packer.write(sample)
                await collect_garbage(store, delete=True, abandoned=list((await collect_garbage(store)).unfinished))

        with pytest.raises(PackError, match="was deleted while the pack was running"):
            await packing()
        assert await labels(store) == [0, 1, 2]

    asyncio.run(main())
