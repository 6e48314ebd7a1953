"""Packs that die, fail or are cancelled at any operation."""

from __future__ import annotations

import asyncio

import pytest

from stoker._format import versions
from stoker._pack.packer import AsyncPacker
from stoker.abc import Store
from stoker.errors import NotFoundError, StoreError
from stoker.testing import DyingStore, FlakyStore, WatchedStore
from support.packing import SlowStore, config, fresh_store, labels, numbered_samples, pack, read_objects


async def _operations(samples: int, mode: str) -> int:
    store = WatchedStore(await _prepared(mode))
    await pack(store, numbered_samples(samples), mode=mode)
    return len(store.calls)


async def _prepared(mode: str) -> Store:
    store = fresh_store()
    if mode == "append":
        await pack(store, numbered_samples(4), source="base")
    return store


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_after_a_death_at_any_operation_packing_again_gives_every_sample_exactly_once(mode: str, late: bool) -> None:
    async def main() -> None:
        samples, ended = numbered_samples(40), 0
        whole = await _prepared(mode)
        await pack(whole, samples, mode=mode)
        expected = await read_objects(whole, "data/")
        for lives in range(await _operations(40, mode)):
            store = await _prepared(mode)
            dying = DyingStore(store, lives, late=late)
            with pytest.raises(StoreError, match="dead"):
                await pack(dying, samples, mode=mode)
            finished = any(call.startswith("put packs/") for call in dying.calls[lives:]) and (
                b'"state":"committed"' in b"".join((await read_objects(store, f"packs/{_run_of(dying)}")).values())
            )
            if finished:  # its last write had its effect: it is indistinguishable from a completed one
                ended += 1
            else:
                await pack(store, samples, mode=mode)
            assert await read_objects(store, "data/") == expected
            newest = await versions.read_manifest(store)
            assert newest.version == (2 if mode == "append" else 1)
            assert newest.runs == (await versions.read_manifest(whole)).runs
        assert ended <= 1

    asyncio.run(main())


def _run_of(store: WatchedStore) -> str:
    record = next((call for call in store.calls if call.startswith("put packs/")), "put packs/-")
    return record.removeprefix("put packs/")


@pytest.mark.parametrize("late", [False, True], ids=["failed", "answer lost"])
def test_any_operation_may_fail_once_and_the_pack_succeeds_all_the_same(late: bool) -> None:
    async def main() -> None:
        for at in range(await _operations(20, "create")):
            store = FlakyStore(fresh_store(), at, late=late)
            manifest = await pack(store, numbered_samples(20))
            assert (manifest.version, await labels(store.store)) == (1, list(range(20)))

    asyncio.run(main())


def test_a_store_that_stays_broken_ends_the_pack_with_its_error_and_no_manifest() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(StoreError, match="dead"):
            await pack(DyingStore(store, 9, late=False), numbered_samples(100))
        with pytest.raises(NotFoundError, match="stoker pack"):
            await versions.read_manifest(store)

    asyncio.run(main())


def test_a_cancelled_pack_leaves_no_task_and_can_be_resumed() -> None:
    async def main() -> None:
        memory = fresh_store()
        packing = asyncio.create_task(pack(SlowStore(memory), numbered_samples(60)))
        for _ in range(200):
            await asyncio.sleep(0)
        packing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await packing
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await pack(memory, numbered_samples(60))
        assert await labels(memory) == list(range(60))

    asyncio.run(main())


def test_a_write_that_is_cancelled_has_taken_its_sample() -> None:
    async def main() -> None:
        store = SlowStore(fresh_store())
        async with AsyncPacker(store, config(concurrency=1)) as packer:
            for sample in numbered_samples(6):
                await packer.write(sample)
            waiting = asyncio.create_task(packer.write(numbered_samples(1, 6)[0]))
            for _ in range(50):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            store.gate.set()
            for sample in numbered_samples(20, 7):
                await packer.write(sample)
        assert await labels(store) == list(range(27))

    asyncio.run(main())
