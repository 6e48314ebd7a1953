"""A pack record restored from the heads of its run's super-samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Schema, Text, open_store
from stoker._maintenance.inspection import restore_record
from stoker._pack.packer import AsyncPacker
from stoker._pack.plan import PackConfig
from stoker._pack.record import PackRecord, record_key
from stoker._pack.run import SuperSampleWriter
from stoker.abc import Store
from stoker.errors import FormatError
from stoker.testing import WatchedStore
from stoker_functions._pack import pack
from support.deployments import Place, plenty
from support.identities import remove_record_identities
from support.memory import ROUNDS, Memory
from support.packing import fresh_store
from support.supersamples import EVERY_KIND, samples_of


async def packed(store: Store, schema: Schema, samples: list[dict[str, Any]], super_sample_bytes: int) -> PackRecord:
    """Pack samples, and return the run's record as it was when the source had ended."""
    records: dict[str, PackRecord] = {}

    class Noting(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put" and key.startswith("manifests/"):
                data, _ = await self.store.get((await anext(self.store.list("packs/"))).key)
                records["complete"] = PackRecord.from_bytes(data)

    config = PackConfig(schema=schema, super_sample_bytes=super_sample_bytes, source="x")
    async with AsyncPacker(Noting(store), config) as packer:
        for sample in samples:
            await packer.write(sample)
    return records["complete"]


def begun(record: PackRecord) -> PackRecord:
    """Return the record with which its run began."""
    return replace(record, state="packing", prefix=None)


def test_restoring_a_run_of_many_super_samples_does_not_keep_their_heads() -> None:
    async def main() -> int:
        store = fresh_store()
        samples = [{"b": bytes(60_000)}] * 300
        record = await packed(store, Schema({"b": Bytes()}), samples, 70_000)
        memory = Memory()
        for _ in range(ROUNDS):
            with memory.round():
                assert (await restore_record(store, begun(record))).to_bytes() == remove_record_identities(
                    record
                ).to_bytes()
        return memory.peak_bytes

    assert asyncio.run(main()) < 5 << 20


LONG_HEADER = Schema(
    {"label": Array("int64", classes=tuple(f"class {n} " + "x" * 40 for n in range(3000))), "b": Bytes()}
)
LARGE_HEAD = Schema({f"c{n}": Array("float64", (8,)) for n in range(40)})


@pytest.mark.parametrize(
    ("schema", "samples", "super_sample_bytes"),
    [
        (Schema({"b": Bytes()}), [{"b": b"x"}], 400),
        (Schema({"b": Bytes()}), [{"b": b""}] * 50, 400),
        (Schema({"b": Bytes(), "t": Text()}), [{"b": b"x" * n, "t": "t"} for n in range(300)], 2000),
        (EVERY_KIND, samples_of(EVERY_KIND, 200), 5000),
        (LONG_HEADER, [{"label": n % 3000, "b": b"x" * 500} for n in range(60)], 4000),
        (LARGE_HEAD, [{name: np.full(8, n, np.float64) for name in LARGE_HEAD} for n in range(100)], 150_000),
        (Schema({"b": Bytes()}), [{"b": bytes(100_000)}] * 5, 250_000),
    ],
    ids=["one sample", "empty values", "small", "every kind", "a long header", "a large head", "large values"],
)
def test_the_record_is_as_it_was_written(
    schema: Schema, samples: list[dict[str, Any]], super_sample_bytes: int
) -> None:
    async def main() -> None:
        store = fresh_store()
        record = await packed(store, schema, samples, super_sample_bytes)
        found = await restore_record(store, begun(record))
        assert found.state == "complete"
        assert found.to_bytes() == remove_record_identities(record).to_bytes()  # no head has the hash of the whole

    asyncio.run(main())


def test_a_head_within_the_first_read_costs_one_request_and_larger_ones_two_or_three() -> None:
    async def main() -> None:
        for schema, values, limit, requests in (
            (Schema({"b": Bytes()}), {"b": b"x" * 300}, 1000, 1),
            (LONG_HEADER, {"label": 1, "b": b"x" * 500}, 4000, 3),
            (LARGE_HEAD, {name: np.zeros(8) for name in LARGE_HEAD}, 150_000, 2),
        ):
            store = fresh_store()
            record = await packed(store, schema, [values] * 6, limit)
            watched = WatchedStore(store)
            await restore_record(watched, begun(record))
            assert [call for call in watched.calls if call.startswith("list")] == [f"list data/{record.run}/"]
            reads = [call for call in watched.calls if call.startswith("get")]
            assert len(record) <= len(reads) <= requests * len(record)

    asyncio.run(main())


def test_of_a_run_with_gaps_the_prefix_counts_and_it_is_not_finished() -> None:
    async def main() -> None:
        for missing in (0, 1, 4, 7):
            store = fresh_store()
            record = await packed(store, Schema({"b": Bytes()}), [{"b": b"x" * 300}] * 16, 700)
            assert len(record) == 8
            await store.delete(f"data/{record.run}/{missing:08d}")
            found = await restore_record(store, begun(record))
            assert (found.state, len(found)) == ("packing", missing)
            assert found.run == record.run

    asyncio.run(main())


def test_what_is_known_is_never_taken_back() -> None:
    async def main() -> None:
        store = fresh_store()
        record = await packed(store, Schema({"b": Bytes()}), [{"b": b"x" * 300}] * 16, 700)
        assert await restore_record(store, record) is record
        committed = replace(record, state="committed", version=3)
        assert await restore_record(store, committed) is committed
        for number in range(8):
            await store.delete(f"data/{record.run}/{number:08d}")
        assert await restore_record(store, record) is record
        start = begun(record)
        assert await restore_record(store, start) is start

    asyncio.run(main())


def test_objects_that_are_no_super_samples_of_the_run_are_passed_over_where_they_have_no_number() -> None:
    async def main() -> None:
        store = fresh_store()
        record = await packed(store, Schema({"b": Bytes()}), [{"b": b"x" * 300}] * 16, 700)
        for key in ("readme", "00000099", "0", "00000003/x"):
            await store.put(f"data/{record.run}/{key}", b"nothing of ours")
        assert (await restore_record(store, begun(record))).to_bytes() == remove_record_identities(record).to_bytes()

    asyncio.run(main())


@pytest.mark.parametrize(
    "what", ["nothing", "a byte", "text", "a cut head", "another run", "another number", "another schema"]
)
def test_what_has_a_number_and_is_no_super_sample_of_the_run_is_a_format_error(what: str) -> None:
    async def main() -> None:
        store = fresh_store()
        schema = Schema({"b": Bytes()})
        record = await packed(store, schema, [{"b": b"x" * 300}] * 16, 700)
        key = f"data/{record.run}/00000003"
        whole, _ = await store.get(key)
        assert record.prefix is not None
        other = {
            "nothing": b"",
            "a byte": b"x",
            "text": b"this is no super-sample" * 100,
            "a cut head": whole[:200],
            "another run": one(schema, record.prefix.dataset, "f" * 16, 3),
            "another number": one(schema, record.prefix.dataset, record.run, 4),
            "another schema": one(Schema({"c": Bytes()}), record.prefix.dataset, record.run, 3),
        }[what]
        await store.put(key, other)
        with pytest.raises(FormatError):
            await restore_record(store, begun(record))

    asyncio.run(main())


def one(schema: Schema, dataset: str, run: str, number: int) -> bytes:
    cutter = SuperSampleWriter(schema, 1000, dataset=dataset, run=run)
    cutter.skip(number, 0)
    cutter.add(dict.fromkeys(schema, b"x"))
    cut = cutter.finish()
    assert cut is not None
    return bytes(cut.data[:])


def test_the_names_of_raw_objects_and_the_job_are_those_of_the_first_record() -> None:
    async def main() -> None:
        place = Place()
        store = open_store(place.dataset)
        for changes in ({"is_remembered": True}, {"job": "a" * 16}):
            part = place.part(await place.put(range(20)), **changes)
            await pack(part.to_json(), place.deployment(), plenty())
            complete = PackRecord.from_bytes((await store.get(record_key(part.run)))[0])
            assert (await restore_record(store, part.record())).to_bytes() == remove_record_identities(
                complete
            ).to_bytes()
            assert (len(complete.sources), complete.job) == (20 if part.is_remembered else 0, part.job)

    asyncio.run(main())
