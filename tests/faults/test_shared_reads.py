"""Objects that a job reads once at its start, in virtual time: by loaders of one machine, and of many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from stoker._cluster.client import ClusterTier
from stoker._cluster.shared_reads import NOTE_BYTES, Note, SharedReads
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
        tier = ClusterTier(self.run.setting, is_shared=True, open_node=machine.open_node)
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
        job.values.values["newest"] = Note(asyncio.get_running_loop().time()).encode(b"")  # and never a word again
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
            (key,) = (key for key in job.values.values if "/" in key)
            job.values.values[key] = b"x" * len(MANIFEST)
        else:
            assert first.node is not None
            memory = first.node.arena.memory
            at = bytes(memory).index(MANIFEST if spoil == "object" else job.values.values["newest"])
            memory[at + 7] ^= 1
        assert (await job.read(first))[0] == MANIFEST
        assert (await job.read(second))[0] == MANIFEST
        assert job.reads == (2 if spoil == "value" else 1)

    check(work)


def test_who_lacks_the_secret_writes_nothing_that_is_used() -> None:
    async def work(job: Job) -> None:
        now = asyncio.get_running_loop().time()
        note = Note.of(MANIFEST[::-1], now, b"")
        job.key = b"secret"
        job.values.values = {"newest": note.encode(b""), f"newest/{note.digest.hex()}/0": MANIFEST[::-1]}
        assert await job.read_everywhere() == [MANIFEST] * 24
        stored = next(key for key in job.values.values if key.endswith("/0") and note.digest.hex() not in key)
        for machine in job.run.machines:
            machine.kill()
        job.values.values[stored] = MANIFEST[::-1]  # under the note of another one
        assert await job.read_everywhere() == [MANIFEST] * 24

    check(work)


@pytest.mark.parametrize(
    "text", [b"", b"\0" * NOTE_BYTES, b"zz", b"\xff" * 64, Note(1.0).encode(b"k")[:-2], b"0" * 104]
)
def test_a_text_that_is_no_note_is_none(text: bytes) -> None:
    assert Note.decode(text, b"k") is None
    note = Note.of(b"abc", 5.0, b"k")
    assert len(note.encode(b"k")) == NOTE_BYTES
    assert Note.decode(note.encode(b"k"), b"k") == note
    assert Note.decode(note.encode(b"k"), b"other") is None
