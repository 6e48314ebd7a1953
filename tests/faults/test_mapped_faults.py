"""Groups and units from memory that processes share, which fails, lies and forgets: every value is right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import pytest

from stoker._base.batch_read import ObjectPart
from stoker._cache.index import NOT_FOUND, Found, Presence
from stoker._fetch.groups import SampleGroupReader
from stoker._fetch.mapped_objects import MappedObjects
from stoker._fetch.range_plan import ReadLimits
from stoker._fetch.units import UnitReader
from stoker._memory.unit_ring import UnitRing
from stoker.abc import ObjectRef, Tier
from stoker.errors import ConnectionLostError, FetchError
from stoker.testing import run_virtual
from support.fault_profiles import faulty_profile
from support.faulty_store import StoreProfile
from support.ranged_run import MANIFEST, OBJECTS, SAMPLES, UNITS, Run, UnitRun, cancel_after

DATA_BYTES = sum(map(len, OBJECTS.values()))
HEAD_BYTES = int(MANIFEST.rows.head_bytes.sum())


class SharedMemory:
    """A mapped tier.

    Args:
        seed: seed of its faults.
        faults: fault → probability, of ``lose`` (an offer), ``refuse`` (an object, for ever), ``fail``, ``lie`` (wrong
            bytes), ``delay`` and ``absent`` (no answer).
        held: objects that it has at first, by key.
        remote: keys of objects that have their places on other machines.
    """

    name = "memory"

    def __init__(
        self, seed: int, faults: dict[str, float], held: dict[str, bytes], remote: Collection[str] = ()
    ) -> None:
        self._rng, self._faults, self._remote = random.Random(seed), faults, remote
        self.held, self.heads = dict(held), dict[str, bytes]()
        self.refused: set[str] = set()
        self.seen: Counter[str] = Counter()

    def _has(self, fault: str) -> bool:
        happens = self._rng.random() < self._faults.get(fault, 0.0)
        self.seen[fault] += happens
        return happens

    def _all(self, ref: ObjectRef) -> dict[str, bytes]:
        """Return the objects among which one is: heads, which only readers of ranges give, are not counted."""
        return self.heads if ref.key.endswith("#head") else self.held

    async def find(self, ref: ObjectRef) -> Found:
        if ref.key in self._remote:
            return Found(None, is_remote=True)
        return await self._find(ref)

    async def _find(self, ref: ObjectRef) -> Found:
        if self._has("delay"):
            await asyncio.sleep(0.3)
        if self._has("fail"):
            raise ConnectionLostError("the process has ended")
        if ref.key in self.refused or self._has("absent"):
            return NOT_FOUND
        if ref.key not in self._all(ref):
            return Found(None, has_room=True)
        body = bytearray(self._all(ref)[ref.key])
        if self._has("lie"):
            body[self._rng.randrange(len(body))] ^= 1
        return Found(memoryview(body).toreadonly())

    async def read_parts(self, parts: Sequence[ObjectPart], into: memoryview) -> Sequence[Presence]:
        found = [Presence.UNAVAILABLE] * len(parts)
        for number, (ref, part) in enumerate(parts):
            assert ref.key in self._remote
            with suppress(ConnectionLostError):
                place = await self._find(ref)
                if place.memory is not None:
                    into[part.offset : part.offset + part.size_bytes] = place.memory[part.start : part.end]
                    found[number] = Presence.COPIED
                elif place.has_room:
                    found[number] = Presence.LACKING
        return found

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        found = await self._find(ref)
        if found.memory is not None:
            into[:] = found.memory
        return found.memory is not None

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        if self._has("refuse"):
            self.refused.add(ref.key)
        elif not self._has("lose"):
            self._all(ref)[ref.key] = bytes(data)

    def reject(self, ref: ObjectRef) -> None:
        self.held.pop(ref.key, None)

    async def close(self) -> None:
        pass


FAULTS = {"lose": 0.2, "refuse": 0.1, "fail": 0.05, "lie": 0.1, "delay": 0.1, "absent": 0.1}


class MappedRun(Run):
    """One epoch of groups, from memory that processes share."""

    faults: dict[str, float] = FAULTS
    held: dict[str, bytes] | None = None

    def create_tiers(self, seed: int) -> Sequence[Tier]:
        self.memory = SharedMemory(seed, self.faults, self.held or {}, self.remote)
        return (self.memory,)

    loads = True
    remote: Collection[str] = ()

    def create_mapped(self) -> MappedObjects:
        counters = self.fetcher._counters
        self.mapped = MappedObjects(self.memory, MANIFEST.largest_bytes, self.fetcher, counters, loads=self.loads)
        return self.mapped

    def create_reader(self, limits: ReadLimits) -> Any:
        mapped = self.create_mapped()
        return SampleGroupReader(MANIFEST, self.columns, self.fetcher, self.ring, limits, mapped=mapped)

    def leaves_nothing(self) -> bool:
        return super().leaves_nothing() and not self.mapped._loading and not self.mapped._limiter.held


class MappedUnitRun(MappedRun, UnitRun):
    """One epoch of units, from memory that processes share."""

    def create_reader(self, limits: ReadLimits) -> Any:
        assert isinstance(self.ring, UnitRing)
        mapped = self.create_mapped()
        return UnitReader(MANIFEST, self.columns, self.fetcher, self.ring, limits, UNITS, mapped=mapped)


class RemoteRun(MappedRun):
    """One epoch of groups, some of whose objects have their places on other machines."""

    remote = tuple(OBJECTS)[::2]


class RemoteUnitRun(MappedUnitRun):
    """One epoch of units, all of whose objects have their places on other machines."""

    remote = tuple(OBJECTS)


KINDS = [MappedRun, MappedUnitRun, RemoteRun, RemoteUnitRun]


@pytest.mark.parametrize("kind", KINDS)
def test_random_faults_of_the_memory_and_the_store_spoil_no_value_and_leave_nothing(kind: type[MappedRun]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        run = kind(seed, faulty_profile(seed), attempt_seconds=1.0, checksum_attempts=10)
        run_virtual(run.play())
        assert sorted(run.delivered) == list(range(len(SAMPLES)))
        assert run.leaves_nothing()
        seen += run.memory.seen
        seen["hits"] += run.fetcher.stats.tier_hits["memory"]
    assert {*FAULTS, "hits"} <= seen.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_each_object_is_fetched_once_and_then_copied(kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "faults", {})
    run = kind(0, StoreProfile(tail_sigma=0.0), hedge=False)
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.memory.held == OBJECTS
    assert DATA_BYTES <= run.fetcher.stats.bytes <= DATA_BYTES + HEAD_BYTES
    assert run.fetcher.stats.useful_bytes <= 1.5 * DATA_BYTES  # ranges with gaps; not the objects as well


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_that_is_there(kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "faults", {})
    monkeypatch.setattr(kind, "held", OBJECTS)
    run = kind(0)
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.fetcher.stats.requests == 0


@pytest.mark.parametrize("kind", KINDS)
def test_where_most_of_an_object_is_not_wanted_only_ranges_are_fetched(
    kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "faults", {})
    monkeypatch.setattr(kind, "loads", False)
    monkeypatch.setattr(kind, "held", dict(list(OBJECTS.items())[:2]))
    run = kind(0, StoreProfile(tail_sigma=0.0), hedge=False)
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert len(run.memory.held) == 2
    assert run.fetcher.stats.tier_hits["memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_whose_wanted_values_are_right_is_tried_once(
    kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "faults", {})
    run = kind(0, StoreProfile(tail_sigma=0.0), hedge=False, checksum_attempts=1)
    del run.columns["sound"]
    run.reading = run.create_reader(ReadLimits(slot_bytes=12_000, gap_bytes=2000, range_bytes=400))
    key = MANIFEST.key(2)
    run.store.objects[key] = OBJECTS[key][:-1] + bytes([OBJECTS[key][-1] ^ 1])  # the end of column "sound"
    monkeypatch.setattr(run, "_use", lambda slots, which, rows: run.delivered.extend([0] * len(rows)))
    run_virtual(run.play())
    assert len(run.delivered) == len(SAMPLES)
    assert run.fetcher.stats.failed == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["absent", "fail"])
def test_ranges_are_read_from_the_store_where_the_memory_does_not_answer(
    kind: type[MappedRun], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "faults", {fault: 1.0})
    run = kind(0, StoreProfile(tail_sigma=0.0), hedge=False)
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.fetcher.stats.bytes <= 1.5 * DATA_BYTES  # with gaps; never whole objects for each group
    assert not run.memory.held


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_values_in_the_memory_are_rejected_and_counted(
    kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "faults", {})
    spoilt = {key: bytes(byte ^ 1 for byte in body) for key, body in OBJECTS.items()}
    monkeypatch.setattr(kind, "held", spoilt)
    run = kind(0)
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.memory.held == OBJECTS
    assert run.fetcher.stats.tier_errors["memory"] >= len(OBJECTS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_fetched_is_an_error(kind: type[MappedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "faults", {})
    run = kind(0)
    key = MANIFEST.key(2)
    run.store.objects[key] = OBJECTS[key][:-1] + bytes([OBJECTS[key][-1] ^ 1])
    with pytest.raises(FetchError, match=f"{key} is corrupt"):
        run_virtual(run.play())
    assert run.leaves_nothing()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3])
def test_cancelling_at_any_time_leaves_nothing(kind: type[MappedRun], seconds: float) -> None:
    run = kind(3, StoreProfile(closing_seconds=0.2, probability={"stall": 0.05}))
    run_virtual(cancel_after(seconds, run.play()))
    assert run.leaves_nothing()
