"""Objects that a job reads once at its start, in virtual time: by loaders of one machine, and of many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from stoker._cluster import connection, shared_reads
from stoker._cluster.client import ClusterTier
from stoker._cluster.shared_reads import NOTE_BYTES, Note, SharedReads
from stoker._cluster.spec import ClusterSpec
from stoker.errors import ConnectionLostError, NotFoundError
from stoker.testing import run_virtual
from support.cluster_schedules import LOCAL_RANKS, ClusterRun, Machine

MANIFEST = bytes(range(256)) * 40


class Values:
    """Values that all machines see, which may be out of reach."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_lost = False

    async def get(self, key: str) -> bytes:
        await self._wait()
        return self.values.get(key, b"")

    async def set(self, key: str, value: bytes) -> None:
        await self._wait()
        self.values[key] = value

    async def replace(self, key: str, before: bytes, value: bytes) -> bool:
        await self._wait()
        if self.values.get(key, b"") != before:
            return False
        self.values[key] = value
        return True

    async def _wait(self) -> None:
        await asyncio.sleep(0.001)
        if self.is_lost:
            raise ConnectionLostError("the values are out of reach")


class Job:
    """Loaders of some machines that start, and the bucket that they read."""

    def __init__(self, machines: int, objects: int = 64) -> None:
        runs = (ClusterRun(seed, faults=0, machines=machines, objects=objects) for seed in count())
        self.run = next(run for run in runs if run.twins == 1 and run.holds_all)
        self.values, self.reads, self.content = Values(), 0, MANIFEST
        self.bucket_seconds, self.key = 0.03, b""

    async def read_bucket(self) -> bytes:
        self.reads += 1
        content = self.content
        await asyncio.sleep(self.bucket_seconds)
        return content

    async def read(
        self, machine: Machine, *, not_before: float = 0.0, read: Callable[[], Awaitable[bytes]] | None = None
    ) -> tuple[bytes, float]:
        """Read as a loader does at its start."""
        tier = ClusterTier(self.run.setting, passes=True, open_node=machine.open_node)
        shared = SharedReads(tier, self.values, key=self.key, wall_seconds=asyncio.get_running_loop().time)
        try:
            return await shared.read("newest", read or self.read_bucket, not_before=not_before)
        finally:
            await tier.close()

    async def read_everywhere(self, *, not_before: float = 0.0) -> list[bytes]:
        ranks = (machine for machine in self.run.machines for _ in range(LOCAL_RANKS))
        found = await asyncio.gather(*(self.read(machine, not_before=not_before) for machine in ranks))
        return [data for data, _ in found]


def check(work: Callable[[Job], Awaitable[None]], machines: int = 3) -> None:
    async def main() -> None:
        job = Job(machines)
        await asyncio.sleep(100.0)
        await work(job)
        for machine in job.run.machines:
            machine.kill()

    run_virtual(main())


def test_512_ranks_read_the_manifest_once_and_each_super_sample_once() -> None:
    async def main() -> None:
        job = Job(64, objects=512)
        run = job.run
        assert await job.read_everywhere() == [MANIFEST] * 512
        assert job.reads == 1
        assert not run.ports, "a process listens before the first batch"
        await asyncio.gather(*(rank.train(range(1)) for rank in run.ranks))
        assert all(sum(rank.delivered.values()) == 1 for rank in run.ranks)
        assert len(run.store.sent_seconds) == 512
        for machine in run.machines:
            machine.kill()

    run_virtual(main())


def test_what_was_read_too_long_ago_is_read_again_once() -> None:
    async def work(job: Job) -> None:
        now = asyncio.get_running_loop().time
        await job.read_everywhere()
        begun, job.content = now(), MANIFEST[::-1]
        assert await job.read_everywhere(not_before=0.0) == [MANIFEST] * 24  # also what was read before
        assert await job.read_everywhere(not_before=begun) == [MANIFEST[::-1]] * 24
        assert job.reads == 2

    check(work)


def test_a_loader_that_dies_while_it_reads_is_replaced() -> None:
    async def work(job: Job) -> None:
        job.bucket_seconds = 1.0
        first = asyncio.create_task(job.read(job.run.machines[0]))
        await asyncio.sleep(0.5)
        assert job.reads == 1
        others = asyncio.create_task(job.read_everywhere())
        await asyncio.sleep(0.1)
        first.cancel()
        assert await others == [MANIFEST] * 24
        assert job.reads == 2

    check(work)


def test_a_machine_that_dies_while_it_reads_is_replaced() -> None:
    async def work(job: Job) -> None:
        job.values.values["newest"] = Note(asyncio.get_running_loop().time()).encode("newest", b"")
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert job.reads <= len(job.run.machines)

    check(work)


def test_an_error_is_that_of_each_loader_and_the_next_one_reads_again() -> None:
    async def work(job: Job) -> None:
        async def fail() -> bytes:
            job.reads += 1
            await asyncio.sleep(0.01)
            raise NotFoundError("there is no data set")

        for machine in job.run.machines:
            with pytest.raises(NotFoundError):
                await job.read(machine, read=fail)
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert job.reads == len(job.run.machines) + 1

    check(work)


def test_without_a_cache_process_or_common_values_each_reads_for_itself() -> None:
    async def work(job: Job) -> None:
        job.values.is_lost = True
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert job.reads == len(job.run.machines)  # one a machine
        job.run.machines[0].is_frozen = True
        begun = asyncio.get_running_loop().time()
        assert (await job.read(job.run.machines[0]))[0] == MANIFEST
        assert asyncio.get_running_loop().time() - begun < 10.0

    check(work)


@pytest.mark.parametrize("spoil", ["note", "object", "value"])
def test_what_is_damaged_is_not_used(spoil: str) -> None:
    async def work(job: Job) -> None:
        first, second, _ = job.run.machines
        await job.read(first)
        await asyncio.sleep(0.1)  # what was given is on its way
        if spoil == "value":
            job.values.values["newest/0"] = b"x" * len(MANIFEST)
        else:
            assert first.node is not None
            place = passing(first)[spoil == "object"]
            place[7] ^= 1
        assert (await job.read(first))[0] == MANIFEST
        assert (await job.read(second))[0] == MANIFEST
        assert job.reads == (2 if spoil == "value" else 1)

    check(work)


def passing(machine: Machine) -> list[bytearray]:
    """Return what passes at a machine's process, the smallest first."""
    assert machine.node is not None
    places = [each.place for each in machine.node.catalog._objects.values()]
    return sorted((place for place in places if isinstance(place, bytearray)), key=len)


def test_what_loaders_open_takes_no_place_and_one_version_at_a_time_in_the_values() -> None:
    async def work(job: Job) -> None:
        for version in range(5):
            job.content = MANIFEST + bytes(version)
            await job.read_everywhere(not_before=asyncio.get_running_loop().time())
        assert job.reads == 5
        assert set(job.values.values) == {"newest", "newest/0"}
        assert all(each.node is not None and each.node.catalog.used_bytes == 0 for each in job.run.machines)

    check(work)


def test_a_process_without_room_lets_it_pass() -> None:
    async def work(job: Job) -> None:
        for machine in job.run.machines:
            connection = await machine.open_node(ClusterSpec.parse(job.run.setting), job.run.setting)
            assert machine.node is not None
            machine.node.catalog._limit_bytes = 0
            await connection.close()
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert job.reads == 1

    check(work)


@pytest.mark.parametrize("limit", ["_MAX_SHARED_BYTES", "UNSENT_BYTES"])
def test_what_is_too_large_for_the_values_or_for_a_queue_is_read_at_the_same_time(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(job: Job) -> None:
        job.bucket_seconds = 1.0
        monkeypatch.setattr(shared_reads if limit == "_MAX_SHARED_BYTES" else connection, limit, 10_000)
        begun = asyncio.get_running_loop().time()
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert asyncio.get_running_loop().time() - begun < 2.5
        assert job.reads <= len(job.run.machines)

    check(work)


def test_a_note_of_the_future_is_not_used() -> None:
    async def work(job: Job) -> None:
        now = asyncio.get_running_loop().time()
        job.values.values["newest"] = Note.of(MANIFEST[::-1], now + 60).encode("newest", b"")
        job.values.values["newest/0"] = MANIFEST[::-1]
        assert await job.read_everywhere() == [MANIFEST] * 24
        assert job.reads == 1

    check(work)


def test_values_that_are_slow_delay_only_the_one_that_sets_them() -> None:
    async def work(job: Job) -> None:
        async def never(key: str, value: bytes) -> None:
            await asyncio.sleep(1000.0)

        job.values.set = never  # type: ignore[method-assign]
        machine, begun = job.run.machines[0], asyncio.get_running_loop().time()
        first = asyncio.create_task(job.read(machine))
        await asyncio.gather(*(job.read(machine) for _ in range(4)))
        assert asyncio.get_running_loop().time() - begun < 0.5
        assert (await first)[0] == MANIFEST
        assert job.values.values == {"newest": b""}  # another machine may read it

    check(work)


def test_who_lacks_the_secret_writes_nothing_that_is_used() -> None:
    async def work(job: Job) -> None:
        now, forged = asyncio.get_running_loop().time(), MANIFEST[::-1]
        job.key = b"secret"
        for text in (
            Note.of(forged, now).encode("newest", b""),
            Note.of(forged, now).encode("newest", b"other"),
            Note.of(forged, now).encode("another data set", b"secret"),
        ):
            job.values.values = {"newest": text, "newest/0": forged}
            assert await job.read_everywhere() == [MANIFEST] * 24
            for machine in job.run.machines:
                machine.kill()
        job.values.values["newest/0"] = forged  # under the note of another one
        assert await job.read_everywhere() == [MANIFEST] * 24

    check(work)


NOTE = Note.of(b"abc", 5.0)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\0" * NOTE_BYTES, b"zz", b"\xff" * 64, b"0" * NOTE_BYTES),
        NOTE.encode("name", b"k")[:-2],
        NOTE.encode("other", b"k"),
        NOTE.encode("name", b"other"),
        NOTE._replace(size_bytes=1 << 40).encode("name", b"k"),
    ],
)
def test_a_text_that_is_no_note_is_none(text: bytes) -> None:
    assert Note.decode(text, "name", b"k") is None
    assert len(NOTE.encode("name", b"k")) == NOTE_BYTES
    assert Note.decode(NOTE.encode("name", b"k"), "name", b"k") == NOTE
