"""Objects in memory and on disk, within a limit: eviction, and recovery of a folder."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._shared.folder_storage import FolderStorage
from stoker._shared.storage import IDLE_SECONDS, STALE_SECONDS, BoundedStorage, MemoryStorage, create_buffer
from stoker.errors import ConfigError

TENANT = "0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


Create = Callable[[int, Clock], BoundedStorage[Any]]


def keep(place: BoundedStorage[Any], key: str, data: bytes, group: str = "t/a") -> bool:
    """Have a place keep an object; return whether it does."""
    if not place.reserve(key, len(data), group):
        return False

    async def written() -> None:
        buffer = await create_buffer(len(data))
        buffer[:] = data
        await place.store(key, buffer)

    asyncio.run(written())
    return True


def read(place: BoundedStorage[Any], key: str) -> bytes | None:
    async def found() -> bytes | None:
        async with place.pin(key) as where:
            if where is None:
                return None
            return where.read_bytes() if isinstance(where, Path) else bytes(where)

    return asyncio.run(found())


def believe(key: str, data: memoryview) -> bool:
    return True


def name(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


@pytest.fixture(params=["memory", "disk"])
def create(request: pytest.FixtureRequest, tmp_path: Path) -> Create:
    def created(limit_bytes: int, clock: Clock) -> BoundedStorage[Any]:
        if request.param == "memory":
            return MemoryStorage(limit_bytes, clock)
        return FolderStorage(tmp_path / "tier", limit_bytes, believe, clock)

    return created


def test_what_is_kept_is_read_and_what_is_dropped_is_gone(create: Create) -> None:
    place = create(100, Clock())
    assert keep(place, f"t/{name(1)}", b"x" * 60)
    assert read(place, f"t/{name(1)}") == b"x" * 60
    assert read(place, f"t/{name(2)}") is None
    place.drop(f"t/{name(1)}")
    assert read(place, f"t/{name(1)}") is None
    assert place.statistics().used_bytes == 0
    place.close()


def test_an_object_that_is_being_written_is_not_read_and_gives_its_room_back(create: Create) -> None:
    place = create(100, Clock())
    assert place.reserve(f"t/{name(1)}", 60, "t/a")
    assert read(place, f"t/{name(1)}") is None
    assert not place.reserve(f"t/{name(2)}", 60, "t/a")
    place.cancel_reservation(f"t/{name(1)}")
    assert place.reserve(f"t/{name(2)}", 60, "t/a")
    place.close()


def test_objects_of_a_data_set_in_use_stay_and_those_of_an_idle_one_leave(create: Create) -> None:
    clock = Clock()
    place = create(100, clock)
    assert keep(place, f"t/{name(1)}", b"a" * 50, "t/old")
    assert keep(place, f"t/{name(2)}", b"b" * 50, "t/old")
    clock.seconds += IDLE_SECONDS - 1
    assert read(place, f"t/{name(2)}") is not None
    clock.seconds += 2
    assert not keep(place, f"t/{name(3)}", b"c" * 50, "t/new"), "one object of the data set was read lately"
    clock.seconds += IDLE_SECONDS
    assert keep(place, f"t/{name(3)}", b"c" * 50, "t/new")
    assert read(place, f"t/{name(1)}") is None, "the least recently used leaves first"
    assert read(place, f"t/{name(2)}") == b"b" * 50
    assert place.statistics().evicted == 1
    place.close()


def test_an_object_unread_for_a_day_is_removed_from_a_data_set_in_use(create: Create) -> None:
    clock = Clock()
    place = create(100, clock)
    assert keep(place, f"t/{name(1)}", b"a" * 50)
    assert keep(place, f"t/{name(2)}", b"b" * 50)
    clock.seconds += STALE_SECONDS
    assert read(place, f"t/{name(2)}") is not None
    assert keep(place, f"t/{name(3)}", b"c" * 50)
    assert read(place, f"t/{name(1)}") is None
    place.close()


def test_an_object_that_is_being_read_stays(create: Create) -> None:
    clock = Clock()
    place = create(100, clock)
    assert keep(place, f"t/{name(1)}", b"a" * 100)

    async def while_it_is_read() -> None:
        async with place.pin(f"t/{name(1)}"):
            clock.seconds += STALE_SECONDS
            assert not place.reserve(f"t/{name(2)}", 50, "t/a")
            place.drop(f"t/{name(1)}")
            assert f"t/{name(1)}" in place

    asyncio.run(while_it_is_read())
    clock.seconds += STALE_SECONDS
    assert keep(place, f"t/{name(2)}", b"b" * 50)
    place.close()


def test_what_is_larger_than_the_limit_is_declined(create: Create) -> None:
    place = create(100, Clock())
    assert not place.reserve(f"t/{name(1)}", 101, "t/a")
    assert place.statistics().declined == 1
    place.close()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("kdr"), st.integers(0, 6), st.integers(1, 60), st.sampled_from("ab"), st.integers(0, 700)
        ),
        max_size=60,
    )
)
def test_memory_is_within_its_limit_and_reads_what_was_kept(steps: list[tuple[str, int, int, str, int]]) -> None:
    clock = Clock()
    place: BoundedStorage[Any] = MemoryStorage(100, clock)
    kept: dict[str, bytes] = {}
    for action, number, size, group, passed in steps:
        clock.seconds += passed
        key = f"t/{name(number)}"
        if action == "k" and key not in place:
            data = bytes([number]) * size
            if keep(place, key, data, f"t/{group}"):
                kept[key] = data
        elif action == "d":
            place.drop(key)
        else:
            assert read(place, key) in (None, kept.get(key))
        found = place.statistics()
        assert found.used_bytes <= 100
        assert found.used_bytes == sum(len(kept[each]) for each in kept if each in place)


def test_a_folder_takes_over_what_is_there_and_removes_what_cannot_be_used(tmp_path: Path) -> None:
    first = FolderStorage(tmp_path, 1000, believe)
    for number in range(3):
        assert keep(first, f"{TENANT}/{name(number)}", bytes([number]) * 100)
    first.close()
    (tmp_path / TENANT / "objects" / f"{name(9)}.partial").write_bytes(b"half")
    foreign = [tmp_path / TENANT / "objects" / "notes.txt", tmp_path / "project" / "objects" / name(1)]
    foreign.append(tmp_path / TENANT / "objects" / name(8))
    foreign[1].parent.mkdir(parents=True)
    for each in foreign[:2]:
        each.write_bytes(b"foreign")
    foreign[2].symlink_to(foreign[0])
    second = FolderStorage(tmp_path, 250, believe)
    assert second.statistics().objects == 2
    assert all(each.read_bytes() == b"foreign" for each in foreign)
    files = {file.name for file in set(tmp_path.glob("*/objects/*")) - set(foreign)}
    assert {each for each in map(name, range(3)) if f"{TENANT}/{each}" in second} == files
    second.close()


def test_a_file_that_was_damaged_between_two_servers_is_removed_at_its_first_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checked = list[bytes]()

    def is_sound(key: str, data: memoryview) -> bool:
        checked.append(bytes(data))
        return bytes(data) == b"a" * 100

    for number in range(2):
        first = FolderStorage(tmp_path, 1000, is_sound)
        assert keep(first, f"{TENANT}/{name(number)}", b"a" * 100)
        first.close()
    (tmp_path / TENANT / "objects" / name(0)).write_bytes(b"b" * 100)
    second = FolderStorage(tmp_path, 1000, is_sound)
    for _ in range(2):
        assert read(second, f"{TENANT}/{name(0)}") is None
        assert read(second, f"{TENANT}/{name(1)}") == b"a" * 100
    assert sorted(checked) == [b"a" * 100, b"b" * 100], "each file is checked once"
    assert not (tmp_path / TENANT / "objects" / name(0)).exists()
    assert "damaged" in caplog.text
    second.close()


def test_a_folder_is_used_by_one_server(tmp_path: Path) -> None:
    first = FolderStorage(tmp_path, 1000, believe)
    with pytest.raises(ConfigError, match="another server uses it"):
        FolderStorage(tmp_path, 1000, believe)
    first.close()
    FolderStorage(tmp_path, 1000, believe).close()


def test_a_folder_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="tier cannot be used"):
        FolderStorage(tmp_path / "file" / "tier", 1000, believe)


def test_a_file_removed_by_another_process_is_forgotten(tmp_path: Path) -> None:
    folder = FolderStorage(tmp_path, 1000, believe)
    assert keep(folder, f"{TENANT}/{name(1)}", b"a" * 100)
    (tmp_path / TENANT / "objects" / name(1)).unlink()
    assert read(folder, f"{TENANT}/{name(1)}") is None
    assert folder.statistics().used_bytes == 0
    assert keep(folder, f"{TENANT}/{name(1)}", b"a" * 100)
    assert read(folder, f"{TENANT}/{name(1)}") == b"a" * 100
    folder.close()


def test_a_file_whose_writing_was_cancelled_is_gone_when_its_room_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    replace = Path.replace

    def slow(file: Path, target: Path) -> Path:
        begun.set()
        assert go.wait(30)
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", slow)

    async def main() -> None:
        folder = FolderStorage(tmp_path, 1000, believe)
        assert folder.reserve(f"{TENANT}/{name(1)}", 100, "g")
        writing = asyncio.create_task(folder.store(f"{TENANT}/{name(1)}", memoryview(bytes(100))))
        await asyncio.to_thread(begun.wait, 30)
        writing.cancel()
        asyncio.get_running_loop().call_later(0.05, go.set)
        with pytest.raises(asyncio.CancelledError):
            await writing
        folder.cancel_reservation(f"{TENANT}/{name(1)}")
        assert folder.statistics().used_bytes == 0
        folder.close()

    asyncio.run(main())
    assert not list(tmp_path.glob("*/objects/*"))


def test_offers_that_are_declined_do_not_keep_an_idle_data_set_here(create: Create) -> None:
    clock = Clock()
    place = create(100, clock)
    assert keep(place, f"t/{name(1)}", b"a" * 100, "t/old")
    for number in range(2, 2000):
        clock.seconds += 0.5
        if keep(place, f"t/{name(number)}", b"b" * 100, "t/new"):
            break
    assert clock.seconds <= IDLE_SECONDS + 2
    place.close()


def test_a_tenant_below_its_share_takes_from_the_one_that_holds_most_and_no_more(create: Create) -> None:
    place = create(120, Clock())
    for number in range(12):
        assert keep(place, f"hog/{name(number)}", b"a" * 10, "hog/a")
    taken = [keep(place, f"small/{name(number)}", b"b" * 10, "small/a") for number in range(8)]
    assert taken == [True] * 6 + [False] * 2
    assert [f"hog/{name(number)}" in place for number in range(12)] == [False] * 6 + [True] * 6
    assert not keep(place, f"hog/{name(20)}", b"a" * 10, "hog/a")
    taken = [keep(place, f"third/{name(number)}", b"c" * 10, "third/a") for number in range(5)]
    assert taken == [True] * 4 + [False]
    held = [sum(f"{tenant}/{name(number)}" in place for number in range(12)) for tenant in ("hog", "small", "third")]
    assert held == [4, 4, 4]
    assert keep(place, f"hog/{name(20)}", b"a" * 10, "hog/a") is False
    place.close()


def test_what_one_tenant_is_writing_leaves_half_of_a_memory_to_others() -> None:
    place = MemoryStorage(100, Clock())
    assert place.reserve(f"hog/{name(1)}", 30, "hog/a")
    assert place.reserve(f"hog/{name(2)}", 20, "hog/a")
    assert not place.reserve(f"hog/{name(3)}", 20, "hog/a")
    assert place.reserve(f"small/{name(1)}", 50, "small/a"), "a single one may be as large as fits"
    place.cancel_reservation(f"hog/{name(1)}")
    asyncio.run(place.store(f"hog/{name(2)}", memoryview(bytes(20))))
    assert place.reserve(f"hog/{name(3)}", 30, "hog/a")
    place.close()


def test_an_object_that_is_dropped_while_it_is_read_leaves_with_its_last_reader(create: Create) -> None:
    place = create(100, Clock())
    assert keep(place, f"t/{name(1)}", b"a" * 100)

    async def main() -> None:
        async with place.pin(f"t/{name(1)}") as first:
            async with place.pin(f"t/{name(1)}"):
                place.drop(f"t/{name(1)}")
                async with place.pin(f"t/{name(1)}") as found:
                    assert found is None
            assert first is not None
            assert place.statistics().used_bytes == 100
        assert place.statistics().used_bytes == 0

    asyncio.run(main())
    assert keep(place, f"t/{name(1)}", b"a" * 100)
    assert read(place, f"t/{name(1)}") == b"a" * 100
    place.close()
