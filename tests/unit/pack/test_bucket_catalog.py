"""The catalog in the bucket: a new instance reads the new records, and not the whole history."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from stoker import Array, Schema
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._format.supersample import SuperSampleRecord
from stoker._pack.catalog import DIGEST_KEY, BucketCatalog, decode_digest, encode_digest
from stoker._pack.record import SOURCE_HASH_BYTES, SOURCE_RETENTION_SECONDS, PackRecord, record_key
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, PermissionDeniedError, StokerError
from stoker.testing import WatchedStore
from support.fuzzed.mutations import mutated_file
from support.packing import fresh_store

SCHEMA = Schema({"label": Array("int64")})
NOW_SECONDS = 1_700_000_000


def complete(number: int) -> PackRecord:
    """Return the record of a finished run of two samples."""
    run = f"{number:016x}"
    packed = SuperSampleRecord(
        ordinal=0, size_bytes=500, samples=2, head_bytes=300, head_crc32c=1, crc32c=number, tag=f"{number:032x}"
    )
    prefix = Manifest(dataset="d", version=1, schema=SCHEMA, rows=ManifestRows.of([packed]), runs=(PackRun(run, 0, 1),))
    sources = np.random.default_rng(number).integers(0, 256, (2, SOURCE_HASH_BYTES), np.uint8)
    return PackRecord(
        run=run,
        identity="0" * 64,
        source="s",
        mode="deferred",
        state="complete",
        prefix=prefix,
        sources=sources,
    )


def committed(number: int, committed_seconds: int = NOW_SECONDS) -> PackRecord:
    return replace(complete(number), state="committed", version=1, committed_seconds=committed_seconds)


async def written(store: Store, records: Iterable[PackRecord]) -> None:
    for record in records:
        await store.put(record_key(record.run), record.to_bytes())


def contents_of(records: Iterable[PackRecord]) -> list[bytes]:
    """Return all that records say, but for what the manifest has of those that are committed."""
    return [(replace(each, prefix=None) if each.is_committed else each).to_bytes() for each in records]


def counts(store: WatchedStore) -> Counter[str]:
    """Return the number of calls of each operation since the last call."""
    found = Counter(call.partition(" ")[0] for call in store.calls)
    store.calls.clear()
    return found


def test_an_instance_that_starts_reads_what_is_new_and_one_object_of_the_history() -> None:
    async def main() -> None:
        history = [committed(number) for number in range(1200)]
        store = WatchedStore(fresh_store())
        await written(store.store, history)
        first = BucketCatalog(store)
        assert contents_of(await first.records()) == contents_of(history)
        assert counts(store) == {"get": 1201, "list": 1, "put": 1}
        await first.records()
        assert counts(store) == {"list": 1}
        waiting = [complete(number) for number in range(1200, 1210)]
        await written(store.store, waiting)
        second = BucketCatalog(store)
        assert contents_of(await second.records()) == contents_of([*history, *waiting])
        assert counts(store) == {"get": 1 + 10, "list": 1}
        await second.save(replace(each, state="committed", version=2) for each in waiting)
        assert counts(store) == {"put": 10}
        assert [each.version for each in await BucketCatalog(store).records()] == [1] * 1200 + [2] * 10

    asyncio.run(main())


def test_the_digest_is_written_again_when_enough_is_not_in_it() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        most = 0
        for start in range(0, 1000, 100):
            await written(store.store, [committed(number) for number in range(start, start + 100)])
            assert len(await BucketCatalog(store).records()) == start + 100
            most = max(most, counts(store)["get"])
        assert most <= 1 + 356
        data, _ = await store.get(DIGEST_KEY)
        assert len(decode_digest(data)) > 700

    asyncio.run(main())


def test_records_that_changed_or_went_since_the_digest_are_those_that_are_there() -> None:
    async def main() -> None:
        store = fresh_store()
        history = [committed(number) for number in range(300)]
        await written(store, history)
        await BucketCatalog(store).records()
        await store.delete(record_key(history[7].run))
        history[9] = replace(history[9], version=3)
        await written(store, [history[9]])
        del history[7]
        assert contents_of(await BucketCatalog(store).records()) == contents_of(history)

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["no digest", "a bit", "nothing"])
def test_a_damaged_digest_costs_requests_and_nothing_else(damage: str) -> None:
    async def main() -> None:
        store = fresh_store()
        history = [committed(number) for number in range(300)]
        await written(store, history)
        await BucketCatalog(store).records()
        data, _ = await store.get(DIGEST_KEY)
        await store.put(DIGEST_KEY, {"no digest": b"?", "a bit": data[:-1] + b"!", "nothing": b""}[damage])
        for _ in range(2):
            assert contents_of(await BucketCatalog(store).records()) == contents_of(history)
        assert (await store.get(DIGEST_KEY))[0] == data

    asyncio.run(main())


def test_an_unwritable_digest_is_logged_and_the_records_are_still_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put":
                raise PermissionDeniedError("read-only")

    async def main() -> None:
        store = fresh_store()
        history = [committed(number) for number in range(300)]
        await written(store, history)
        assert contents_of(await BucketCatalog(Refusing(store)).records()) == contents_of(history)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert f"{DIGEST_KEY}: read-only" in caplog.text


def test_instances_that_write_the_digest_at_the_same_time_continue_writing_it() -> None:
    async def main() -> None:
        store = fresh_store()
        instances = [BucketCatalog(store) for _ in range(3)]
        for start in range(0, 600, 300):
            await written(store, [committed(number) for number in range(start, start + 300)])
            await asyncio.gather(*(instance.records() for instance in instances))
        await written(store, [committed(number) for number in range(600, 900)])
        await instances[0].records()
        data, _ = await store.get(DIGEST_KEY)
        assert len(decode_digest(data)) == 900

    asyncio.run(main())


def test_raw_objects_are_named_while_they_may_be_needed() -> None:
    async def main() -> None:
        store = fresh_store()
        ages_seconds = [0, SOURCE_RETENTION_SECONDS, SOURCE_RETENTION_SECONDS + 1]
        await written(store, [committed(n, NOW_SECONDS - age) for n, age in enumerate(ages_seconds)])
        catalog = BucketCatalog(store)
        for _ in range(2):
            assert [len(record.sources) for record in await catalog.records()] == [2, 2, 0]

    asyncio.run(main())


def test_a_commit_with_a_wrong_clock_forgets_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        years_seconds = 80 * 365 * 86_400
        await written(store, [committed(n, NOW_SECONDS + (years_seconds if n == 7 else n)) for n in range(300)])
        for now_seconds in (NOW_SECONDS + 400, NOW_SECONDS - years_seconds):
            records = await BucketCatalog(store, clock=partial(float, now_seconds)).records()
            assert all(len(record.sources) == 2 for record in records)

    asyncio.run(main())


def test_a_record_that_was_deleted_since_it_was_read_is_not_written_again() -> None:
    async def main() -> None:
        store = fresh_store()
        await written(store, [complete(1), complete(2)])
        catalog = BucketCatalog(store)
        found = await catalog.records()
        await store.delete(record_key(found[0].run))
        await catalog.save(replace(record, state="committed", version=1) for record in found)
        assert [record.run for record in await catalog.records()] == [found[1].run]

    asyncio.run(main())


def test_other_objects_beside_the_records_are_none() -> None:
    async def main() -> None:
        store = fresh_store()
        await written(store, [complete(1)])
        await store.put("packs/notes.txt", b"of the user's")
        assert len(await BucketCatalog(store).records()) == 1

    asyncio.run(main())


def test_a_digest_comes_back_from_its_bytes_and_one_that_is_damaged_anywhere_does_not() -> None:
    entries = {
        record_key(f"{n:016x}"): (tag, replace(committed(n), prefix=None)) for n, tag in enumerate(["a", "", "é", "d"])
    }
    data = encode_digest(entries)
    again = decode_digest(data)
    assert encode_digest(again) == data
    assert {key: tag for key, (tag, _) in again.items()} == {key: tag for key, (tag, _) in entries.items()}
    assert decode_digest(encode_digest({})) == {}
    for position in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises((ChecksumError, StokerError)):
            decode_digest(bytes(damaged))
    for end in range(0, len(data), 11):
        with pytest.raises(StokerError):
            decode_digest(data[:end])


def test_a_hostile_digest_is_read_or_refused() -> None:
    pool = [
        encode_digest({record_key(f"{n:016x}"): (f"tag {n}", replace(committed(n), prefix=None)) for n in range(count)})
        for count in (0, 1, 3)
    ]
    rng, outcomes = random.Random(5), Counter[str]()
    for _ in range(1000):
        try:
            decode_digest(mutated_file(rng.choice(pool), pool, rng))
        except (FormatError, ChecksumError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["read"] += 1
    assert outcomes.keys() == {"FormatError", "ChecksumError", "read"}


def test_a_digest_has_no_record_that_is_not_committed() -> None:
    with pytest.raises(StokerError, match="which is not committed"):
        decode_digest(encode_digest({record_key("1" * 16): ("t", complete(1))}))
