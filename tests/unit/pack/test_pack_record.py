"""The record of how far a pack has come."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stoker import Array, Schema
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._pack.record import PackRecord
from stoker._pack.run import SuperSampleWriter
from stoker.errors import ChecksumError, StokerError
from stoker.testing import WatchedStore
from support.memory import ROUNDS, Memory
from support.packing import fresh_store, numbered_samples, pack, pack_interrupted, puts, read_objects


def _record() -> PackRecord:
    async def main() -> bytes:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(50))
        (data,) = (await read_objects(store, "packs/")).values()
        return data

    return PackRecord.from_bytes(asyncio.run(main()))


def test_a_record_comes_back_from_its_bytes() -> None:
    record = _record()
    again = PackRecord.from_bytes(record.to_bytes())
    assert (again.to_bytes(), len(again), again.samples, again.state) == (record.to_bytes(), 16, 48, "packing")
    assert PackRecord.from_bytes(replace(record, prefix=None).to_bytes()).samples == 0


def test_a_record_that_is_damaged_anywhere_is_refused() -> None:
    data = _record().to_bytes()
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises((ChecksumError, StokerError)):
            PackRecord.from_bytes(damaged)
    for end in range(0, len(data), 7):
        with pytest.raises(StokerError):
            PackRecord.from_bytes(data[:end])


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "0" * 16},
        {"run": "../../../../etc/"},
        {"identity": "x"},
        {"mode": "replace"},
        {"state": "done"},
        {"state": "committed"},
        {"version": 3},
        {"state": "complete", "prefix": None},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StokerError, match="pack record"):
        PackRecord.from_bytes(replace(_record(), **changes).to_bytes())


def test_the_records_bytes_stay_proportional_to_the_manifest() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        await pack(store, [{"data": bytes(300), "label": i} for i in range(1000)])
        assert len(puts(store)) == 1000
        assert len(puts(store, "packs/")) < 100

    asyncio.run(main())


def test_records_of_one_data_set_do_not_keep_its_schema_each() -> None:
    schema = Schema({"label": Array("int64", classes=tuple(f"class {n}" for n in range(5000)))})
    cutter = SuperSampleWriter(schema, 1000, dataset="d", run="a" * 16)
    cutter.add({"label": 1})
    cut = cutter.finish()
    assert cut is not None
    prefix = Manifest(
        dataset="d", version=1, schema=schema, rows=ManifestRows.of([cut.packed]), runs=(PackRun("a" * 16, 0, 1),)
    )
    data = PackRecord(run="a" * 16, identity="0" * 64, source="s", mode="deferred", prefix=prefix).to_bytes()
    assert len(data) > 50_000
    PackRecord.from_bytes(data)
    memory = Memory()
    for _ in range(ROUNDS):
        with memory.round():
            records = [PackRecord.from_bytes(bytes(data)) for _ in range(20)]
    assert memory.held_bytes < 20 * 8000
    assert all(record.to_bytes() == data for record in records)
