"""The tier on disk: damaged, hostile and full folders, other owners, and what the next start finds."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker._cache import disk_folder
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import name_of
from stoker.errors import StoreError
from stoker.testing import run_virtual
from support.tiers import LARGEST_BYTES, MANIFEST, body, disk_tier, future, offer, read_row


def running(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())


async def opened(path: Path, held: int = 6, **settings: Any) -> DiskTier:
    tier = disk_tier(path, held, **settings)
    await tier.follow(MANIFEST, future())
    return tier


async def left(path: Path, *rows: int, held: int = 6, **settings: Any) -> None:
    """Leave a folder with the objects of some rows."""
    tier = await opened(path, held, **settings)
    await offer(tier, *rows)
    await tier.close()


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def file_of(path: Path, row: int) -> Path:
    (found,) = (each for each in files(path) if each.name == name_of(MANIFEST.ref(row)))
    return found


def used_bytes(path: Path) -> int:
    return sum(-(-each.stat().st_size // 4096) * 4096 for each in files(path))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def present(tier: DiskTier) -> set[int]:
    return {row for row in range(20) if await read_row(tier, row) is not None}


# Damage.


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:1000] + b"\x00" * (file.stat().st_size - 1000)),
        lambda file: file.write_bytes(file.read_bytes() + b"more"),
        lambda file: os.truncate(file, 1 << 40),
        lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
        make_pipe,
        lambda file: (file.unlink(), file.symlink_to(file)),
    ],
    ids=["cut", "empty", "zeros", "longer", "huge", "link", "pipe", "loop"],
)
@pytest.mark.parametrize("when", ["running", "between runs"])
def test_a_damaged_file_is_a_miss_and_goes_and_the_object_is_written_again(
    tmp_path: Path, damage: Callable[[Path], object], when: str
) -> None:
    async def check() -> None:
        await left(tmp_path, 1, 2)
        if when == "between runs":
            damage(file_of(tmp_path, 1))
        tier = await opened(tmp_path)
        if when == "running":
            damage(file_of(tmp_path, 1))
        assert await read_row(tier, 1) is None
        assert [each.name for each in files(tmp_path)] == [name_of(MANIFEST.ref(2))]
        await offer(tier, 1)
        assert (await read_row(tier, 1), await read_row(tier, 2)) == (body(1), body(2))
        await tier.close()

    running(check)


def test_a_folder_in_the_place_of_a_file_costs_that_object_only(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, 1)
        place = file_of(tmp_path, 1)
        place.unlink()
        (place / "inside").mkdir(parents=True)
        tier = await opened(tmp_path)
        await offer(tier, 1, 2)
        assert (await read_row(tier, 1), await read_row(tier, 2)) == (None, body(2))
        await tier.close()
        assert (place / "inside").is_dir()

    running(check)


def test_a_removed_file_is_a_miss(tmp_path: Path) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        await offer(tier, 1)
        file_of(tmp_path, 1).unlink()
        assert await read_row(tier, 1) is None
        await offer(tier, 1)
        assert await read_row(tier, 1) == body(1)
        await tier.close()

    running(check)


def test_a_removed_folder_only_ends_admission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        path = tmp_path / "cache"
        tier = await opened(path)
        await offer(tier, 1)
        shutil.rmtree(path)
        await offer(tier, 2, 3, 4)
        assert await present(tier) == set()
        await tier.close()

    running(check)
    assert [each.levelname for each in caplog.records] == ["WARNING"]


# What is none of its business.


def test_what_it_did_not_write_stays_untouched_and_uncounted(tmp_path: Path) -> None:
    async def check() -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("keep")
        path = tmp_path / "cache"
        await left(path, 1)
        (part,) = {each.parent for each in files(path)}
        (part / "photo.jpg").write_bytes(bytes(100_000))
        (part / "link").symlink_to(outside)
        (path / "elsewhere").symlink_to(outside)
        (part.parent / "1").symlink_to(outside)
        (part.parent / "77").symlink_to(outside)
        (part.parent / "notes").mkdir()
        tier = await opened(path, 2)
        assert await read_row(tier, 1) == body(1)
        await offer(tier, *range(20))
        assert tier.statistics().objects == 2
        await tier.close()
        assert (part / "photo.jpg").stat().st_size == 100_000
        assert (outside / "precious").read_text() == "keep"
        assert sorted(each.name for each in outside.iterdir()) == ["precious"]

    running(check)


@pytest.mark.parametrize("level", ["data set", "part"])
def test_a_link_in_the_place_of_its_folder_is_not_followed(
    tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        outside, path = tmp_path / "outside", tmp_path / "cache"
        outside.mkdir()
        await left(path, 1)
        part = file_of(path, 1).parent
        place = part if level == "part" else part.parent
        place.rename(tmp_path / "moved")
        place.symlink_to(outside)
        tier = await opened(path)
        await offer(tier, 1)
        assert await read_row(tier, 1) is None
        await tier.close()
        assert not list(outside.iterdir())

    running(check)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        await left(tmp_path, 1)
        file_of(tmp_path, 1).parent.parent.chmod(0o777)
        tier = await opened(tmp_path)
        assert await read_row(tier, 1) is None
        await tier.close()

    running(check)
    assert "others may write to it" in caplog.text


def test_a_path_that_is_a_file_is_reported_once_and_only_costs_hits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        (tmp_path / "file").write_text("x")
        tier = await opened(tmp_path / "file" / "below")
        await offer(tier, 1, 2)
        assert await read_row(tier, 1) is None
        await tier.close()

    running(check)
    assert len(caplog.records) == 1


def test_files_and_folders_are_this_users_alone(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path / "cache", 1)
        file = file_of(tmp_path, 1)
        assert [each.stat().st_mode & 0o777 for each in (file, file.parent, file.parent.parent)] == [
            0o600,
            0o700,
            0o700,
        ]

    running(check)


# Full and failing disks.


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_takes_nothing_in_for_a_pause_with_one_warning_and_then_is_tried_again(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        await offer(tier, 1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", failing(number))
            await offer(tier, 2, 3)
        await asyncio.sleep(29.0)
        await offer(tier, 4)
        assert await present(tier) == {1}
        assert [each.name for each in files(tmp_path)] == [name_of(MANIFEST.ref(1))]
        await asyncio.sleep(1.1)
        await offer(tier, 2, 4)
        assert await present(tier) == {1, 2, 4}
        await tier.close()

    run_virtual(check())
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    assert "accepts no objects for 30 s" in caplog.text


def test_while_a_disk_stays_full_the_pauses_grow_to_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", failing(errno.ENOSPC))
            for _ in range(3600):
                await offer(tier, 1)
                await asyncio.sleep(1.0)
        await asyncio.sleep(600.0)
        await offer(tier, 1)
        assert await present(tier) == {1}
        await tier.close()

    run_virtual(check())
    pauses = [
        float(str(record.getMessage()).partition(" objects for ")[2].partition(" s")[0]) for record in caplog.records
    ]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, *[600.0] * 5]


def test_a_disk_that_cannot_read_is_a_miss_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        await offer(tier, 1, 2)
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        assert await present(tier) == set()
        await tier.close()

    running(check)
    assert len(caplog.records) == 1


class _Disk:
    """Says what a disk has free."""

    def __init__(self, free_bytes: int) -> None:
        self.f_blocks, self.f_frsize, self.f_bavail = 1 << 20, 1, free_bytes


def test_a_reserve_of_the_disk_is_left_free_and_admission_continues_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        reserve_bytes = (1 << 20) // 20
        tier = await opened(tmp_path)
        monkeypatch.setattr(os, "fstatvfs", lambda _: _Disk(reserve_bytes + len(body(1)) - 1))
        await offer(tier, 1)
        assert await present(tier) == set()
        monkeypatch.setattr(os, "fstatvfs", lambda _: _Disk(reserve_bytes + len(body(1))))
        await offer(tier, 1)
        assert await present(tier) == {1}
        await tier.close()

    running(check)
    assert "nearly full" in caplog.text


def test_unused_objects_of_other_data_sets_are_evicted_when_space_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        await left(tmp_path, 1, 2, dataset="old")
        in_use = await opened(tmp_path, dataset="used")
        await offer(in_use, 3)
        tier = await opened(tmp_path)
        max_bytes = used_bytes(tmp_path)

        def disk(_: int) -> _Disk:
            return _Disk((1 << 20) // 20 + max(0, max_bytes - used_bytes(tmp_path)))

        monkeypatch.setattr(os, "fstatvfs", disk)
        await offer(tier, 5)
        assert await present(tier) == {5}
        assert {each.name for each in files(tmp_path)} == {name_of(MANIFEST.ref(row)) for row in (3, 5)}
        await tier.close()
        await in_use.close()

    running(check)


# The next start.


def test_the_next_start_adopts_what_was_left_and_removes_what_is_unfinished(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, 1, 2, 3)
        part = file_of(tmp_path, 1).parent
        (part / ".writing").write_bytes(b"half")
        (part / name_of(MANIFEST.ref(4))).write_bytes(body(4)[:100])
        tier = await opened(tmp_path)
        assert await present(tier) == {1, 2, 3}
        assert len(files(tmp_path)) == 3
        assert tier.statistics().used_bytes == 3 * LARGEST_BYTES
        await tier.close()

    running(check)


def test_the_next_start_trims_to_a_smaller_limit_and_keeps_what_is_needed_soonest(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, *range(10), held=10)
        tier = await opened(tmp_path, 4)
        soonest = sorted(range(10), key=future().next_use)[:4]
        assert await present(tier) == set(soonest)
        assert used_bytes(tmp_path) == 4 * LARGEST_BYTES
        await tier.close()

    running(check)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_another_number_of_owners_continues_with_what_is_there(tmp_path: Path, before: int, after: int) -> None:
    async def check() -> None:
        tiers = [await opened(tmp_path, 8 // before, owners=before, preferred=each) for each in range(before)]
        for each, tier in enumerate(tiers):
            await offer(tier, *range(each, 8, before))
        for tier in tiers:
            await tier.close()
        tiers = [await opened(tmp_path, 8 // after, owners=after, preferred=each) for each in range(after)]
        for tier in tiers:
            assert await present(tier) == set(range(8))
        assert sum(tier.statistics().objects for tier in tiers) == 8
        assert used_bytes(tmp_path) == 8 * LARGEST_BYTES
        for tier in tiers:
            await tier.close()

    running(check)


def test_what_cannot_be_taken_over_goes_and_the_rest_is(tmp_path: Path) -> None:
    async def check() -> None:
        tiers = [await opened(tmp_path, owners=2, preferred=each) for each in range(2)]
        await offer(tiers[1], 1, 2, 3)
        for tier in tiers:
            await tier.close()
        (file_of(tmp_path, 1).parent.parent / "0" / name_of(MANIFEST.ref(1)) / "inside").mkdir(parents=True)
        tier = await opened(tmp_path)
        assert await present(tier) == {2, 3}
        assert tier.statistics().objects == len(files(tmp_path)) == 2
        await tier.close()

    running(check)


def test_a_leftover_that_cannot_be_removed_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        await left(tmp_path, 1)
        (file_of(tmp_path, 1).parent / name_of(MANIFEST.ref(4))).write_bytes(b"half")
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", failing(errno.EPERM))
            tier = await opened(tmp_path)
        assert await present(tier) == {1}
        await offer(tier, 4)
        assert await present(tier) == {1, 4}
        await tier.close()

    running(check)


def test_what_survives_a_version_that_no_longer_has_it_does_not_stand_in_the_way(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, 18, 19, held=2)
        tier = disk_tier(tmp_path, 2)
        await tier.follow(MANIFEST.remove_runs([replace(MANIFEST.runs[0], first_number=18, rows=2)]), future())
        await offer(tier, 0, 1)
        assert await present(tier) == {0, 1}
        await tier.close()

    running(check)


# Others.


def test_owners_read_what_others_have_written_and_write_only_into_their_own_part(tmp_path: Path) -> None:
    async def check() -> None:
        first = await opened(tmp_path, owners=2, preferred=0)
        second = await opened(tmp_path, owners=2, preferred=1)
        await offer(first, 1)
        await offer(second, 2)
        assert await present(first) == await present(second) == {1, 2}
        assert file_of(tmp_path, 1).parent != file_of(tmp_path, 2).parent
        await first.close()
        assert await present(second) == {1, 2}
        await second.close()

    running(check)


def test_a_damaged_file_of_another_owner_is_a_miss_and_stays_for_its_owner(tmp_path: Path) -> None:
    async def check() -> None:
        first = await opened(tmp_path, owners=2, preferred=0)
        second = await opened(tmp_path, owners=2, preferred=1)
        await offer(first, 1)
        file = file_of(tmp_path, 1)
        file.write_bytes(bytes(file.stat().st_size))
        assert await read_row(second, 1) is None
        assert file.exists()
        assert await read_row(first, 1) is None
        assert not file.exists()
        await first.close()
        await second.close()

    running(check)


def test_without_a_free_part_there_are_only_reads_until_one_is_free(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = await opened(tmp_path), await opened(tmp_path)
        await offer(first, 1)
        await offer(second, 2)
        assert await present(second) == {1}
        await first.close()
        await second.follow(MANIFEST, future())
        await offer(second, 2)
        assert await present(second) == {1, 2}
        await second.close()

    running(check)


def test_a_folder_that_is_just_being_opened_is_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, 1)
        handle = os.open(file_of(tmp_path, 1).parent.parent, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        opening = asyncio.ensure_future(opened(tmp_path))
        done, _ = await asyncio.wait([opening], timeout=0.02)
        assert not done
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
        tier = await opening
        assert await present(tier) == {1}
        await tier.close()

    running(check)


# Threads.


class Stuck:
    """Reads of files that block until they are released."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._begun = threading.Event()
        self._read = os.preadv

    def preadv(self, handle: int, into: Any, at: int) -> int:
        self._begun.set()
        assert self.go.wait(60)
        return self._read(handle, into, at)

    async def begun(self) -> None:
        """Wait until a thread is in the middle of one."""
        assert await asyncio.to_thread(self._begun.wait, 60)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    """Block every read of a file until it is released."""
    stuck = Stuck()
    monkeypatch.setattr(os, "preadv", stuck.preadv)
    yield stuck
    stuck.go.set()


def test_a_cancelled_read_ends_at_once_and_its_thread_writes_nothing_more(tmp_path: Path, stuck: Stuck) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        await offer(tier, 1)
        into = memoryview(bytearray(len(body(1))))
        reading = asyncio.ensure_future(tier.read(MANIFEST.ref(1), into))
        await stuck.begun()
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=5.0)
        assert done
        assert reading.cancelled()
        stuck.go.set()
        while tier._hung_reads:  # noqa: ASYNC110 - what a thread does, nobody is told
            await asyncio.sleep(0.01)
        assert not any(into)
        assert await read_row(tier, 1) == body(1)
        await tier.close()

    running(check)


def test_a_disk_that_hangs_takes_two_late_reads_and_then_refuses_until_they_end(tmp_path: Path, stuck: Stuck) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        await offer(tier, 1, 2)
        readings = [asyncio.ensure_future(read_row(tier, row)) for row in (1, 2)]
        await stuck.begun()
        await asyncio.sleep(0.05)
        for reading in readings:
            reading.cancel()
        await asyncio.wait(readings, timeout=5.0)
        with pytest.raises(StoreError, match=r"disk:.* does not respond: 2 cancelled reads have not ended"):
            await read_row(tier, 1)
        stuck.go.set()
        while tier._hung_reads:  # noqa: ASYNC110 - what a thread does, nobody is told
            await asyncio.sleep(0.01)
        assert await read_row(tier, 2) == body(2)
        await tier.close()

    running(check)


def test_what_is_evicted_while_it_is_read_is_read_to_its_end(tmp_path: Path, stuck: Stuck) -> None:
    async def check() -> None:
        tier = await opened(tmp_path, 1, policy="fifo")
        await offer(tier, 1)
        reading = asyncio.ensure_future(read_row(tier, 1))
        await stuck.begun()
        tier.offer(MANIFEST.ref(2), memoryview(body(2)))
        assert await read_row(tier, 2) == body(2)  # from memory: its file waits for the reading
        stuck.go.set()
        assert await reading == body(1)
        await tier.flush()
        assert [each.name for each in files(tmp_path)] == [name_of(MANIFEST.ref(2))]
        await tier.close()

    running(check)


def test_what_comes_faster_than_the_disk_writes_is_declined_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        go, write = threading.Event(), os.write

        def slowly(handle: int, data: Any) -> int:
            assert go.wait(60)
            return write(handle, data)

        tier = await opened(tmp_path, 20, behind_bytes=5 * LARGEST_BYTES)
        monkeypatch.setattr(os, "write", slowly)
        for row in range(10):
            tier.offer(MANIFEST.ref(row), memoryview(body(row)))
        assert (tier.statistics().added, tier.statistics().declined) == (5, 5)
        go.set()
        await tier.flush()
        assert await present(tier) == {0, 1, 2, 3, 4}
        await tier.close()

    running(check)


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    async def check() -> None:
        tier = await opened(tmp_path)
        for row in (1, 2, 3):
            tier.offer(MANIFEST.ref(row), memoryview(body(row)))
        await tier.close()
        tier = await opened(tmp_path)
        assert await present(tier) == {1, 2, 3}
        await tier.close()

    running(check)


def test_a_start_that_is_cancelled_leaves_a_tier_that_can_be_closed(tmp_path: Path) -> None:
    async def check() -> None:
        tier = disk_tier(tmp_path, 3)
        starting = asyncio.ensure_future(tier.follow(MANIFEST, future()))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await tier.follow(MANIFEST, future())
        await offer(tier, 1)
        await tier.close()
        tier = await opened(tmp_path)
        assert await present(tier) == {1}
        await tier.close()

    running(check)


@pytest.mark.parametrize("then", ["follow", "close"])
def test_what_comes_while_a_cancelled_start_has_not_ended_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    async def check() -> None:
        await left(tmp_path, 1)
        before, begun, go, tidied = open_files(), threading.Event(), threading.Event(), disk_folder._clean_up_part

        def slowly(handle: int) -> list[str]:
            begun.set()
            assert go.wait(60)
            return tidied(handle)

        monkeypatch.setattr(disk_folder, "_clean_up_part", slowly)
        tier = disk_tier(tmp_path, 3)
        starting = asyncio.ensure_future(tier.follow(MANIFEST, future()))
        assert await asyncio.to_thread(begun.wait, 60)
        starting.cancel()
        following = asyncio.ensure_future(tier.follow(MANIFEST, future()) if then == "follow" else tier.close())
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait([starting])
        await following
        if then == "follow":
            await offer(tier, 2)
            assert await present(tier) == {1, 2}
            await tier.close()
        assert open_files() == before

    running(check)


def test_opening_and_closing_leaves_no_file_open(tmp_path: Path) -> None:
    async def check() -> None:
        await left(tmp_path, 1, owners=4, preferred=2)
        before = open_files()
        for _ in range(3):
            tier = await opened(tmp_path, owners=4)
            await present(tier)
            await tier.close()
        assert open_files() == before

    running(check)
