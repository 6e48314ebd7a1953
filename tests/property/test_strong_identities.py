"""All writers of super-samples put the hash of their bytes into the rows; those of an earlier release have none."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stoker import RetryingStore
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._maintenance.compaction import compact
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.catalog import BucketCatalog
from stoker._pack.record import PackRecord
from stoker.abc import Store
from support.identities import identity, remove_identities, remove_record_identities
from support.packing import fresh_store, numbered_samples, pack, pack_interrupted

WRITERS = st.lists(st.sampled_from(["append", "resume", "compact", "earlier", "rebuild", "adopt"]), max_size=6)


async def make_earlier(store: Store) -> None:
    """Take the hashes out of a data set's indexes, as if an earlier release had written them."""
    for key in [info.key async for info in store.list("packs/")]:
        record = PackRecord.from_bytes((await store.get(key))[0])
        await store.put(key, remove_record_identities(record).to_bytes())
    newest = remove_identities(await versions.read_manifest(store))
    for key in (version_key(newest.version), POINTER_KEY):
        await store.put(key, newest.to_bytes())


async def unknown_rows(store: Store, manifest: Manifest) -> set[str]:
    """Return the keys of rows without a hash, having checked the others on the objects."""
    unknown = set()
    for row in range(len(manifest)):
        found = manifest.rows.strong_identity(row)
        data, _ = await store.get(manifest.key(row))
        assert found in (None, identity(data))
        if found is None:
            unknown.add(manifest.key(row))
    assert await verify(store, manifest) == []
    return unknown


async def carry_out(store: Store, writer: str, number: int) -> None:
    if writer == "append":
        await pack(store, numbered_samples(7, start=number), mode="append", source=f"append {number}")
    if writer == "resume":
        samples = numbered_samples(30, start=number)
        await pack_interrupted(store, samples[:20], mode="append", source=f"resume {number}")
        await pack(store, samples, mode="append", source=f"resume {number}")
    if writer == "compact":
        await compact(RetryingStore(store), BucketCatalog(store), now_seconds=1e9 + number, super_sample_bytes=4000)
    if writer == "rebuild":
        await rebuild_manifest(store)
    if writer == "adopt":
        await rebuild_manifest(store, adopt=True, verify=True)


@given(WRITERS)
def test_rows_have_the_hash_of_their_objects_and_only_what_an_earlier_release_wrote_has_none(
    writers: list[str],
) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(20))
        earlier: set[str] = set()
        for number, writer in enumerate(writers):
            if writer == "earlier":
                await make_earlier(store)
                manifest = await versions.read_manifest(store)
                earlier = {manifest.key(row) for row in range(len(manifest))}
            await carry_out(store, writer, 100 * (number + 1))
            manifest = await versions.read_manifest(store)
            keys = {manifest.key(row) for row in range(len(manifest))}
            earlier = set() if writer == "adopt" else earlier & keys  # which reads objects whole
            assert await unknown_rows(store, manifest) == earlier

    asyncio.run(main())
