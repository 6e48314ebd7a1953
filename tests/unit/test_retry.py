"""Writing what may be there already, and comparing it with what is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker import RetryingStore, open_store
from stoker._base.retry import head_if_equal
from stoker.abc import ObjectInfo, Store
from stoker.errors import NotFoundError
from stoker.testing import FlakyStore, WatchedStore
from support.memory import ROUNDS, Memory
from support.packing import NO_WAIT, fresh_store, puts

DATA = bytes(range(256)) * 10_000
"""More than two pieces."""


class Damaging(WatchedStore):
    """Spoils what it reads: each reading as ``damage`` says, given its number and the bytes."""

    def __init__(self, store: Store, damage: Callable[[int, memoryview], None]) -> None:
        super().__init__(store)
        self.damage = damage
        self.readings = itertools.count()

    async def get_range(self, *range_: Any, into: memoryview, **conditions: Any) -> ObjectInfo:
        info = await super().get_range(*range_, into=into, **conditions)
        self.damage(next(self.readings), into)
        return info


def run_put_once(store: Store) -> ObjectInfo | None:
    return asyncio.run(RetryingStore(store, NO_WAIT).put_once("data/k", DATA))


def stored(data: bytes | None) -> Store:
    store = fresh_store()
    if data is not None:
        asyncio.run(store.put("data/k", data))
    return store


@pytest.mark.parametrize("late", [False, True])
def test_what_is_not_there_is_written(late: bool) -> None:
    store = stored(None)
    info = run_put_once(FlakyStore(store, 0, late=late))
    assert info == asyncio.run(store.head("data/k"))
    assert asyncio.run(store.get("data/k"))[0] == DATA


def test_what_is_there_already_is_left_and_known() -> None:
    store = WatchedStore(stored(DATA))
    before = asyncio.run(store.store.head("data/k"))
    assert run_put_once(store) == before == asyncio.run(store.store.head("data/k"))
    assert len(puts(store)) == 1


@pytest.mark.parametrize(
    "other",
    [b"", DATA[:-1], DATA + b"x", DATA[:-1] + b"x", b"x" + DATA[1:]],
    ids=["empty", "cut", "more", "end", "start"],
)
def test_another_object_is_none_and_is_left(other: bytes) -> None:
    store = stored(other)
    assert run_put_once(store) is None
    assert asyncio.run(store.get("data/k"))[0] == other


def test_nothing_is_as_little_the_object_as_another_one_is() -> None:
    assert asyncio.run(head_if_equal(fresh_store(), "data/k", DATA)) is None


def test_an_object_that_is_replaced_while_it_is_compared_is_not_the_one() -> None:
    class Replaced(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "get":
                await self.store.put(key, DATA)

    assert asyncio.run(head_if_equal(Replaced(stored(DATA)), "data/k", DATA)) is None


def test_readings_that_are_damaged_on_their_way_each_in_another_way_do_not_make_another_object() -> None:
    def damage(number: int, into: memoryview) -> None:
        if number % 4:
            into[number % 4] ^= 1

    assert asyncio.run(head_if_equal(Damaging(stored(DATA), damage), "data/k", DATA)) is not None


def test_what_is_read_twice_alike_is_what_is_there() -> None:
    def damage(number: int, into: memoryview) -> None:
        into[0] ^= 1

    store = Damaging(stored(DATA), damage)
    assert asyncio.run(head_if_equal(store, "data/k", DATA)) is None
    assert next(store.readings) == 2


def test_damage_that_never_ends_ends_the_comparison() -> None:
    def damage(number: int, into: memoryview) -> None:
        into[number] ^= 1

    assert asyncio.run(head_if_equal(Damaging(stored(DATA), damage), "data/k", DATA)) is None


def test_comparing_holds_no_second_object(tmp_path: Path) -> None:
    large = DATA * 5

    async def main() -> int:
        store = open_store(tmp_path)
        await store.put("data/k", large)
        memory = Memory()
        for _ in range(ROUNDS):
            with memory.round():
                assert await head_if_equal(store, "data/k", large) is not None
        await store.close()
        return memory.peak_bytes

    assert asyncio.run(main()) < len(large) // 4


def test_an_object_that_is_deleted_between_the_write_and_the_comparison_is_none() -> None:
    class Deleting(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "head":
                await self.store.delete(key)

    store = stored(DATA)
    assert run_put_once(Deleting(store)) is None
    with pytest.raises(NotFoundError):
        asyncio.run(store.head("data/k"))
