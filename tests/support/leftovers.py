"""Data sets, and the remains of unfinished packs beside them."""

from __future__ import annotations

import pytest

from stoker._pack.record import PackRecord
from stoker.abc import Store
from stoker.errors import StoreError
from stoker.testing import DyingStore, WatchedStore
from support.packing import fresh_store, numbered_samples, pack, pack_interrupted, read_objects


async def data_set() -> Store:
    """Return a store with two versions: samples 0 to 29 and 30 to 44, in 15 super-samples of three."""
    store = fresh_store()
    await pack(store, numbered_samples(30))
    await pack(store, numbered_samples(15, 30), mode="append")
    return store


async def leave_unfinished(store: Store, source: str, *, mode: str = "append") -> str:
    """Fail a pack of 20 samples in its commit; return its run."""
    before = set(await read_objects(store, "packs/"))
    rehearsal = fresh_store()
    if mode == "append":
        rehearsal = await _copied(store)
    watched = WatchedStore(rehearsal)
    await pack(watched, numbered_samples(20, 100), source=source, mode=mode)
    death = next(i for i, call in enumerate(watched.calls) if call.startswith("put manifests/"))
    with pytest.raises(StoreError, match="dead"):
        await pack(DyingStore(store, death, late=False), numbered_samples(20, 100), source=source, mode=mode)
    (key,) = set(await read_objects(store, "packs/")) - before
    assert PackRecord.from_bytes((await store.get(key))[0]).state == "complete"
    return key.removeprefix("packs/").removesuffix(".safetensors")


async def leave_half(store: Store, source: str) -> str:
    """Fail an append after 30 of its samples; return its run."""
    before = set(await read_objects(store, "packs/"))
    await pack_interrupted(store, numbered_samples(31, 200), source=source, mode="append")
    (key,) = set(await read_objects(store, "packs/")) - before
    return key.removeprefix("packs/").removesuffix(".safetensors")


async def _copied(store: Store) -> Store:
    other = fresh_store()
    for key, data in (await read_objects(store)).items():
        await other.put(key, data)
    return other


def flipped(data: bytes) -> bytes:
    """Return the data with one bit of its last byte flipped."""
    return data[:-1] + bytes([data[-1] ^ 1])
