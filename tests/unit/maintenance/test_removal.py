"""Removing a data set: all of it, nothing else, and only where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stoker import open_store
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, version_key
from stoker._maintenance.garbage import plan_removal, remove_dataset
from stoker.abc import Store
from stoker.errors import NotFoundError, StoreError
from stoker.testing import WatchedStore
from support.packing import failing_after, fresh_store, numbered_samples, pack, read_objects

FOREIGN = (
    "data/mine",
    "data/raw/00000001.png",
    "manifests/x",
    "packs/notes.txt",
    "epochs/x/y",
    "readme.md",
    "x/data/y",
)


def run(check: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check(fresh_store()))


def test_all_that_is_the_data_sets_goes_and_what_is_not_stays() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await pack(store, numbered_samples(5, 20), mode="append")
        epoch = f"epochs/{'a' * 16}/00000003/data/{'b' * 16}/00000000"
        await store.put(epoch, b"a materialized epoch's")
        for key in FOREIGN:
            await store.put(key, b"mine")
        removal = await plan_removal(store)
        assert removal.manifest is not None
        assert removal.manifest.samples == 25
        assert {info.key for info in removal.others} == {key for key in FOREIGN if key.count("/") and key[0] != "x"}
        await remove_dataset(store, removal)
        assert set(await read_objects(store)) == set(FOREIGN)
        assert await versions.find_newest_manifest(store) is None
        await pack(store, numbered_samples(3))

    run(check)


@pytest.mark.parametrize("keys", [(), FOREIGN, ("manifest.safetensors", "data/0123456789abcdef/00000000")])
def test_what_is_no_data_set_is_refused(keys: tuple[str, ...]) -> None:
    async def check(store: Store) -> None:
        for key in keys:
            await store.put(key, b"mine")
        with pytest.raises(NotFoundError, match=r"no data set .* nothing was deleted"):
            await plan_removal(store)
        assert set(await read_objects(store)) == set(keys)

    run(check)


def test_a_folder_above_data_sets_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        await pack(open_store(tmp_path / "train"), numbered_samples(3))
        with pytest.raises(NotFoundError):
            await plan_removal(open_store(tmp_path))

    asyncio.run(check())


def test_what_a_killed_pack_left_can_be_removed() -> None:
    async def check(store: Store) -> None:
        with pytest.raises(ZeroDivisionError):
            await pack(store, failing_after(numbered_samples(20)))
        removal = await plan_removal(store)
        assert removal.manifest is None
        await remove_dataset(store, removal)
        assert await read_objects(store) == {}

    run(check)


def test_super_samples_without_manifest_and_records_can_be_removed() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        for key in (POINTER_KEY, version_key(1), *await read_objects(store, "packs/")):
            await store.delete(key)
        await remove_dataset(store, await plan_removal(store))
        assert await read_objects(store) == {}

    run(check)


def test_a_data_set_with_a_damaged_manifest_can_be_removed() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await store.put(POINTER_KEY, b"damaged")
        await store.put(version_key(1), b"damaged")
        await remove_dataset(store, await plan_removal(store))
        assert await read_objects(store) == {}

    run(check)


class _Failing(WatchedStore):
    """Fails after a number of deletions."""

    left = 0

    async def delete(self, key: str) -> None:
        if not self.left:
            raise StoreError(f"cannot delete {key}")
        self.left -= 1
        await super().delete(key)


def test_a_removal_that_is_cut_off_anywhere_is_ended_by_the_next() -> None:
    async def check(count: int) -> bool:
        inner = fresh_store()
        await pack(inner, numbered_samples(9))
        store = _Failing(inner)
        store.left = count
        try:
            await remove_dataset(store, await plan_removal(store))
        except StoreError:
            await remove_dataset(inner, await plan_removal(inner))
        assert await read_objects(inner) == {}
        return store.left > 0

    assert [asyncio.run(check(count)) for count in range(8)] == [False] * 7 + [True]
