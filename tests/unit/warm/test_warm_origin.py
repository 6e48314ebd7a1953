"""Where a warm tier finds the objects of a data set that its nodes have lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker._cache.keeper import name_of
from stoker._format.manifest import Manifest
from stoker.abc import ObjectRef
from stoker.errors import NotFoundError, ObjectChangedError
from stoker.testing import WatchedStore, run_virtual
from stoker_warm._put_back import BucketOrigin
from support.packing import fresh_store, numbered, pack

STRANGER = "0" * 32


def check(test: Callable[[WatchedStore, BucketOrigin, Manifest], Awaitable[None]]) -> None:
    """Run a test with an origin over a data set, in virtual time."""

    async def main() -> None:
        store = WatchedStore(fresh_store())
        manifest = await pack(store, numbered(9))
        store.calls.clear()
        await test(store, BucketOrigin(store, look_seconds=300.0), manifest)

    run_virtual(main())


def refs_of(manifest: Manifest) -> dict[str, ObjectRef]:
    refs = [manifest.ref(row) for row in range(len(manifest))]
    return {name_of(ref): ref for ref in refs}


def test_objects_are_found_by_their_names_and_read_in_parts() -> None:
    async def test(store: WatchedStore, origin: BucketOrigin, manifest: Manifest) -> None:
        refs = refs_of(manifest)
        assert await origin.find([*refs, STRANGER]) == refs
        for ref in refs.values():
            whole, _ = await store.store.get(ref.key)
            assert await origin.read(ref, 0, len(whole)) == whole
            assert await origin.read(ref, 7, 20) == whole[7:20]

    check(test)


def test_the_manifest_is_read_once() -> None:
    async def test(store: WatchedStore, origin: BucketOrigin, manifest: Manifest) -> None:
        refs = refs_of(manifest)
        for name, ref in refs.items():
            assert await origin.find([name]) == {name: ref}
        await asyncio.gather(*(origin.find([name]) for name in refs))
        assert len(store.calls) == 1

    check(test)


def test_for_a_name_that_it_does_not_know_it_looks_again_but_not_often() -> None:
    async def test(store: WatchedStore, origin: BucketOrigin, manifest: Manifest) -> None:
        assert await origin.find([STRANGER]) == {}
        more = await pack(store.store, numbered(3, 100), mode="append", source="more")
        (name,) = set(refs_of(more)) - set(refs_of(manifest))
        await asyncio.sleep(299.0)
        assert await origin.find([name]) == {}
        assert len(store.calls) == 1
        await asyncio.sleep(1.0)
        assert await origin.find([name, STRANGER]) == {name: refs_of(more)[name]}
        assert len(store.calls) == 2

    check(test)


def test_an_object_that_was_written_again_is_not_taken_for_the_one_that_was_packed() -> None:
    async def test(store: WatchedStore, origin: BucketOrigin, manifest: Manifest) -> None:
        ref = manifest.ref(0)
        await store.store.put(ref.key, b"another one")
        with pytest.raises(ObjectChangedError):
            await origin.read(ref, 0, 5)

    check(test)


def test_while_it_cannot_be_read_it_does_not_say_that_a_name_is_unknown() -> None:
    async def main() -> None:
        store = fresh_store()
        origin = BucketOrigin(store, look_seconds=300.0)
        for _ in range(2):
            with pytest.raises(NotFoundError):
                await origin.find([STRANGER])
        manifest = await pack(store, numbered(3))
        assert await origin.find(refs_of(manifest)) == refs_of(manifest)

    run_virtual(main())
