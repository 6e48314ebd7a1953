"""Versions of a manifest in a store: found, read whole or in parts, and never moved back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stoker import RetryingStore, RetryPolicy
from stoker._base.retry import RetryingReader
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker.abc import Buffer, ObjectInfo, Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PreconditionFailedError, ServerError, StoreError
from stoker.testing import DyingStore, FlakyStore, WatchedStore, run_virtual
from support.packing import NO_WAIT, fresh_store, labels, numbered_samples, pack, read_objects


async def two_versions() -> Store:
    store = fresh_store()
    await pack(store, numbered_samples(3))
    await pack(store, numbered_samples(3, 3), mode="append")
    return store


def test_a_manifest_is_read_with_one_request() -> None:
    async def main() -> None:
        store = WatchedStore(await two_versions())
        assert (await versions.read_manifest(store)).version == 2
        assert store.calls == [f"get {POINTER_KEY}"]

    asyncio.run(main())


def test_an_older_version_can_be_read_and_one_that_is_not_there_is_named() -> None:
    async def main() -> None:
        store = await two_versions()
        assert (await versions.read_manifest(store, 1)).samples == 3
        with pytest.raises(NotFoundError, match=r"no version 7; its newest is 2"):
            await versions.read_manifest(store, 7)

    asyncio.run(main())


def test_where_there_is_no_data_set_the_error_says_how_to_make_one() -> None:
    async def main() -> None:
        store = fresh_store()
        for version in (None, 3):
            with pytest.raises(NotFoundError, match=rf"no data set at {store.url}.*stoker pack"):
                await versions.read_manifest(store, version)
        assert await versions.find_newest_manifest(store) is None
        assert await versions.list_versions(store) == []

    asyncio.run(main())


def test_without_a_pointer_the_newest_version_is_found_also_if_older_ones_are_gone() -> None:
    async def main() -> None:
        store = await two_versions()
        await store.delete(POINTER_KEY)
        await store.delete(version_key(1))
        assert (await versions.read_manifest(store)).version == 2

    asyncio.run(main())


def test_the_next_commit_moves_a_pointer_that_stayed_behind() -> None:
    async def main() -> None:
        store = await two_versions()
        await store.put(POINTER_KEY, (await read_objects(store))[version_key(1)])
        assert (await versions.read_manifest(store)).version == 1
        newest = await versions.find_newest_manifest(store)
        assert newest is not None
        assert newest.version == 2
        await versions.commit(store, lambda base: base or newest)
        assert (await versions.read_manifest(store)).version == 2
        assert await labels(store) == list(range(6))

    asyncio.run(main())


def test_the_pointer_never_goes_back() -> None:
    async def main() -> None:
        store = await two_versions()
        await versions.advance_pointer(store, await versions.read_manifest(store, 1))
        assert (await versions.read_manifest(store)).version == 2

    asyncio.run(main())


@pytest.mark.parametrize("key", [POINTER_KEY, version_key(2)])
def test_a_damaged_manifest_is_named_with_the_remedy(key: str) -> None:
    async def main() -> None:
        store = await two_versions()
        data = bytearray((await read_objects(store))[key])
        data[-1] ^= 1
        await store.put(key, data)
        with pytest.raises(ChecksumError, match=rf"{key} is damaged.*stoker rebuild-manifest"):
            await versions.read_manifest(store, None if key == POINTER_KEY else 2)
        await store.put(key, b"<html>")
        with pytest.raises(FormatError, match=rf"{key} is not a manifest.*stoker rebuild-manifest"):
            await versions.read_manifest(store, None if key == POINTER_KEY else 2)

    asyncio.run(main())


def test_a_version_under_the_number_of_another_is_refused() -> None:
    async def main() -> None:
        store = await two_versions()
        await store.put(version_key(3), (await read_objects(store))[version_key(1)])
        with pytest.raises(FormatError, match="says that it is version 1"):
            await versions.find_newest_manifest(store)

    asyncio.run(main())


def test_a_build_that_does_not_follow_the_newest_version_is_refused() -> None:
    async def main() -> None:
        store = await two_versions()
        first = await versions.read_manifest(store, 1)
        with pytest.raises(StoreError, match=r"version 1 .* does not follow the newest"):
            await versions.commit(store, lambda base: first)

    asyncio.run(main())


def test_a_store_that_contradicts_itself_ends_a_commit_instead_of_looping() -> None:
    class Contradiction(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put" and key.startswith("manifests/"):
                raise PreconditionFailedError("it is there")

    async def main() -> None:
        store = Contradiction(fresh_store())
        manifest = await pack(fresh_store(), numbered_samples(3))
        with pytest.raises(StoreError, match="does not follow the newest version"):
            await versions.commit(store, lambda base: manifest)

    asyncio.run(main())


class _SlowWholeReads(WatchedStore):
    """Takes a second for a whole object and no time for a range of it."""

    async def before(self, number: int, operation: str, key: str) -> None:
        if operation == "get" and self.whole:
            await asyncio.sleep(1)

    whole = True

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        self.calls.append(f"range {start}-{end}")
        return await self.store.get_range(key, start, end, into=into, tag=tag, begun=begun)


def test_a_large_manifest_is_read_in_parallel_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        memory = await two_versions()
        size = (await memory.head(POINTER_KEY)).size_bytes
        monkeypatch.setattr(versions, "LARGE_BYTES", 500)
        store = _SlowWholeReads(memory)
        assert (await versions.read_manifest(store)).version == 2
        assert asyncio.get_running_loop().time() < 0.5
        assert store.calls[:2] == [f"get {POINTER_KEY}", f"head {POINTER_KEY}"]
        expected = [f"range {start}-{min(start + 500, size)}" for start in range(0, size, 500)]
        assert sorted(store.calls[2:]) == sorted(expected)

    run_virtual(main())


def test_a_small_manifest_that_is_late_is_requested_twice_more_and_the_first_answer_counts() -> None:
    async def main() -> None:
        store = _SlowWholeReads(await two_versions())
        reader = RetryingReader(store)
        assert (await versions.read_manifest(reader)).version == 2
        assert store.calls == [f"get {POINTER_KEY}", f"head {POINTER_KEY}", *[f"get {POINTER_KEY}"] * 2]
        assert reader.hedges == 2
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


# Trying again


class _Failing(WatchedStore):
    """Fails everything, and says when."""

    def __init__(self, store: Store, retry_after_seconds: float | None = None) -> None:
        super().__init__(store)
        self.retry_after_seconds = retry_after_seconds
        self.times: list[float] = []

    async def before(self, number: int, operation: str, key: str) -> None:
        self.times.append(asyncio.get_running_loop().time())
        raise ServerError("down", retry_after_seconds=self.retry_after_seconds)


def test_waits_grow_up_to_the_longest_and_then_the_error_is_raised() -> None:
    async def main() -> None:
        policy = RetryPolicy(attempts=6, backoff_base_seconds=1.0, backoff_cap_seconds=4.0, seed=3)
        store = _Failing(fresh_store())
        with pytest.raises(ServerError, match="down"):
            await RetryingReader(RetryingReader(store), policy).get("x")
        waits = [b - a for a, b in zip(store.times, store.times[1:], strict=False)]
        assert len(store.times) == 6
        assert all(0 <= wait <= longest for wait, longest in zip(waits, (1, 2, 4, 4, 4), strict=True))
        assert len(set(waits)) == 5

    run_virtual(main())


def test_a_store_that_requests_more_time_gets_it() -> None:
    async def main() -> None:
        store = _Failing(fresh_store(), retry_after_seconds=25.0)
        with pytest.raises(ServerError):
            await RetryingReader(store, RetryPolicy(attempts=3)).head("x")
        assert store.times[1] - store.times[0] >= 25.0

    run_virtual(main())


def test_a_listing_that_breaks_continues_behind_the_last_key() -> None:
    class Breaking(WatchedStore):
        breaks = 5

        async def list(self, prefix: str = "", *, start_after: str = "") -> Any:
            given = 0
            async for info in self.store.list(prefix, start_after=start_after):
                if given == 2 and self.breaks:
                    self.breaks -= 1
                    raise ServerError("broke")
                given += 1
                yield info

    async def main() -> None:
        store = fresh_store()
        for i in range(20):
            await store.put(f"k/{i:02d}", b"x")
        reader = RetryingReader(Breaking(store), RetryPolicy(attempts=2, backoff_base_seconds=0.0))
        assert [info.key async for info in reader.list("k/")] == [f"k/{i:02d}" for i in range(20)]

    asyncio.run(main())


def test_a_conditional_write_whose_answer_was_lost_is_known_by_its_bytes() -> None:
    async def main() -> None:
        store = fresh_store()
        info = await RetryingStore(FlakyStore(store, 0, late=True), NO_WAIT).put("k", b"mine", if_absent=True)
        assert info == await store.head("k")
        with pytest.raises(PreconditionFailedError):
            await RetryingStore(store, NO_WAIT).put("k", b"mine", if_absent=True)

    asyncio.run(main())


def test_a_conditional_write_that_failed_while_another_won_is_lost() -> None:
    class Overtaken(WatchedStore):
        async def put(
            self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None
        ) -> ObjectInfo:
            if not self.calls:
                self.calls.append("first")
                await self.store.put(key, b"else", if_absent=True)
                raise ServerError("lost")
            return await self.store.put(key, data, if_absent=if_absent, if_tag=if_tag)

    async def main() -> None:
        with pytest.raises(PreconditionFailedError):
            await RetryingStore(Overtaken(fresh_store()), NO_WAIT).put("k", b"mine", if_absent=True)

    asyncio.run(main())


def test_errors_that_will_not_go_away_are_not_tried_again() -> None:
    async def main() -> None:
        store = DyingStore(fresh_store(), 0, late=False)
        with pytest.raises(StoreError, match="dead"):
            await RetryingReader(store, NO_WAIT).get("x")
        assert len(store.calls) == 1

    asyncio.run(main())


def test_a_manifest_survives_its_own_bytes() -> None:
    async def main() -> None:
        manifest = await versions.read_manifest(await two_versions())
        assert Manifest.from_bytes(manifest.to_bytes()).to_bytes() == manifest.to_bytes()

    asyncio.run(main())
