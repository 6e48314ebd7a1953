"""The cache on disk: first in, first out, within its limits, whole or not at all, and gone when its owner is."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch import DiskCache
from stoker_torch._sample_cache import DamagedEntryError
from support.same import same


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    with DiskCache(tmp_path, 3) as cache:
        yield cache


def folder_of(path: Path) -> Path:
    (folder,) = path.iterdir()
    return folder


def file_of(path: Path, index: int) -> Path:
    return folder_of(path) / str(index)


def held(path: Path) -> set[str]:
    return {file.name for file in folder_of(path).iterdir()} - {"counts"}


def copy_of(cache: DiskCache) -> DiskCache:
    """What a spawned worker gets."""
    copied: DiskCache = pickle.loads(pickle.dumps(cache))  # noqa: S301 - as multiprocessing does
    return copied


def test_it_gives_out_what_was_put_here_and_in_a_copy(cache: DiskCache) -> None:
    sample = {"image": torch.rand(3, 4), "label": 7, "name": "é"}
    assert cache.put(5, sample)
    assert cache.put(6, None)
    for each in (cache, copy_of(cache)):
        assert same(each.get(5), sample)
        assert each.get(6) is None
        with pytest.raises(KeyError):
            each.get(7)


def test_two_reads_of_a_sample_share_no_memory(cache: DiskCache) -> None:
    cache.put(0, torch.zeros(3))
    cache.get(0).add_(1)
    assert torch.equal(cache.get(0), torch.zeros(3))


def test_the_first_in_is_the_first_out_and_its_file_goes(cache: DiskCache, tmp_path: Path) -> None:
    for index in (0, 1, 2, 0, 3):
        assert cache.put(index, index)
    assert held(tmp_path) == {"1", "2", "3"}
    assert len(cache) == 3


def test_a_renewed_sample_is_the_last_to_go(cache: DiskCache, tmp_path: Path) -> None:
    for index in range(3):
        cache.put(index, index)
    assert cache.holds(0, renew=True)
    assert not cache.holds(9, renew=True)
    cache.put(3, 3)
    cache.put(4, 4)
    assert held(tmp_path) == {"0", "3", "4"}


def test_the_disk_used_never_passes_the_limit_while_samples_of_all_sizes_come(tmp_path: Path) -> None:
    rng = random.Random(0)
    limit_bytes = 40_000
    with DiskCache(tmp_path, 1000, max_bytes=limit_bytes) as cache:
        folder = folder_of(tmp_path)
        max_bytes = 0
        for index in range(200):
            assert cache.put(index, rng.randbytes(rng.randrange(20_000)))
            files = [file.stat() for file in folder.iterdir() if file.name != "counts"]
            max_bytes = max(max_bytes, sum(-(-file.st_size // 4096) * 4096 for file in files))
        assert limit_bytes / 2 < max_bytes <= limit_bytes
        assert not cache.put(1000, bytes(limit_bytes))
        assert held(tmp_path)


def test_concurrent_writers_keep_the_limit_and_the_order(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 5) as cache:
        threads = [
            threading.Thread(target=lambda start: [cache.put(start + i, bytes(100)) for i in range(50)], args=(start,))
            for start in (0, 100, 200)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert len(held(tmp_path) - {"writing"}) <= 5
        assert len(held(tmp_path)) == len(cache) == 5


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "half of it": lambda file: os.truncate(file, file.stat().st_size // 2),
    "nothing": lambda file: os.truncate(file, 0),
    "more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "another sample's": lambda file: file.write_bytes((file.parent / "1").read_bytes()),
    "a folder": make_folder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss(cache: DiskCache, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    cache.put(0, torch.arange(100))
    cache.put(1, torch.arange(100))
    damage(file_of(tmp_path, 0))
    with pytest.raises(DamagedEntryError):
        cache.get(0)
    assert same(cache.get(1), torch.arange(100))


def test_a_file_of_another_session_is_a_miss(tmp_path: Path) -> None:
    with DiskCache(tmp_path / "a", 3) as one, DiskCache(tmp_path / "b", 3) as other:
        one.put(0, "one")
        other.put(0, "other")
        file_of(tmp_path / "b", 0).write_bytes(file_of(tmp_path / "a", 0).read_bytes())
        with pytest.raises(DamagedEntryError):
            other.get(0)


def test_a_removed_file_is_a_miss_and_its_eviction_no_error(cache: DiskCache, tmp_path: Path) -> None:
    for index in range(3):
        cache.put(index, index)
    file_of(tmp_path, 0).unlink()
    with pytest.raises(KeyError):
        cache.get(0)
    cache.put(3, 3)
    assert held(tmp_path) == {"1", "2", "3"}


def test_a_full_disk_leaves_no_part_of_a_file(
    cache: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.put(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(OSError, match="No space"):
            cache.put(1, 1)
    assert held(tmp_path) == {"0"}
    assert cache.put(1, 1)
    assert cache.get(1) == 1


def test_a_file_that_cannot_be_removed_still_counts_and_gives_way_to_the_next(cache: DiskCache, tmp_path: Path) -> None:
    for index in range(3):
        cache.put(index, index)
    make_folder(file_of(tmp_path, 0))
    with pytest.raises(OSError, match=r"directory|permitted"):
        cache.put(3, 3)
    assert len(cache) == 3
    assert cache.put(3, 3)
    assert held(tmp_path) == {"0", "2", "3"}


def test_who_asks_what_is_there_does_not_wait_for_the_disk(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    renaming, go_on = threading.Event(), threading.Event()
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        renaming.set()
        assert go_on.wait(60)
        return rename(self, target)

    cache.put(0, 0)
    monkeypatch.setattr(Path, "rename", slow)
    writer = threading.Thread(target=cache.put, args=(1, 1))
    writer.start()
    assert renaming.wait(60)
    assert cache.holds(0, renew=True)
    assert not cache.holds(1, renew=False)
    go_on.set()
    writer.join()
    assert cache.holds(1, renew=False)


def test_a_type_that_needs_pickle_is_an_error_that_names_sample_and_type(cache: DiskCache) -> None:
    with pytest.raises(SampleError, match=r"sample 4 .*builtins\.set.*encode="):
        cache.put(4, {1, 2})


def test_encode_and_decode_store_any_type(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 3, encode=sorted, decode=set) as cache:
        cache.put(0, {3, 1})
        assert cache.get(0) == {1, 3}


def test_a_failed_encode_is_reported(tmp_path: Path) -> None:
    with (
        DiskCache(tmp_path, 3, encode=sorted, decode=set) as cache,
        pytest.raises(SampleError, match=r"sample 4 .*not iterable") as caught,
    ):
        cache.put(4, 7)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_decode_that_fails_is_an_error_and_no_miss(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 3, encode=dict, decode=lambda stored: stored["no such key"]) as cache:
        cache.put(0, {"a": 1})
        with pytest.raises(SampleError, match=r"sample 0 .*no such key"):
            cache.get(0)


@pytest.mark.parametrize(
    "settings",
    [{"samples": 0}, {"samples": 3, "max_bytes": 0}, {"samples": 3, "max_bytes": "x"}, {"samples": 3, "encode": str}],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DiskCache(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder"):
        DiskCache(tmp_path / "file", 3)


def test_closing_removes_its_files_and_later_look_ups_are_misses(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3)
    cache.put(0, 0)
    reader = copy_of(cache)
    cache.close()
    cache.close()
    assert not list(tmp_path.iterdir())
    for each in (cache, reader):
        with pytest.raises(KeyError):
            each.get(0)
        each.counts.add(missed=True, damaged=False, wait_seconds=1.0)
    with pytest.raises(StokerError, match="closed"):
        cache.put(1, 1)
    assert not list(tmp_path.iterdir())


def test_counts_can_be_read_after_closing(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 3) as cache:
        copy_of(cache).counts.add(missed=True, damaged=False, wait_seconds=0.5)
        cache.counts.add(missed=False, damaged=False, wait_seconds=0.25)
    assert cache.counts.read() == (2, 1, 0, 750_000_000)


def test_collecting_it_removes_its_files_and_closes_what_it_had_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    cache = DiskCache(tmp_path, 3)
    cache.put(0, 0)
    del cache
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert psutil.Process().num_fds() == before


def test_a_copy_is_a_reader_and_its_end_is_not_the_end_of_the_files(cache: DiskCache, tmp_path: Path) -> None:
    cache.put(0, 0)
    reader = copy_of(cache)
    with pytest.raises(StokerError, match="reader"):
        reader.put(1, 1)
    reader.close()
    del reader
    gc.collect()
    assert cache.get(0) == 0


def test_a_forked_child_reads_and_takes_nothing_along_when_it_ends(cache: DiskCache) -> None:
    cache.put(0, 41)
    with (
        cache._write_lock,
        cache._index_lock,
    ):  # threads of the parent are writing at the moment of the fork
        child = multiprocessing.get_context("fork").Process(target=_use_as_child, args=(cache,))
        child.start()
    child.join()
    assert child.exitcode == 42
    assert cache.get(0) == 41


def _use_as_child(cache: DiskCache) -> None:
    found = cache.get(0)
    try:
        cache.put(1, 1)
    except StokerError:
        found += 1
    cache.close()
    raise SystemExit(found)


def test_sessions_side_by_side_do_not_touch_each_other_nor_anything_else(tmp_path: Path) -> None:
    (tmp_path / "stoker-cache-mine").mkdir()
    (tmp_path / "precious").touch()
    (tmp_path / "stoker-cache-0123456789abcdef").symlink_to(tmp_path / "stoker-cache-mine")
    with DiskCache(tmp_path, 3) as one, DiskCache(tmp_path, 3) as other:
        one.put(0, "one")
        other.put(0, "other")
        assert (one.get(0), other.get(0)) == ("one", "other")
    assert {file.name for file in tmp_path.iterdir()} == {
        "stoker-cache-mine",
        "precious",
        "stoker-cache-0123456789abcdef",
    }


def test_what_a_killed_process_left_goes_when_the_next_begins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_fill_and_hang, args=(tmp_path, ready))
    child.start()
    assert ready.wait(60)
    left = folder_of(tmp_path)
    with DiskCache(tmp_path, 3):
        assert (left / "0").exists()  # it lives
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert (left / "0").exists()
    with DiskCache(tmp_path, 3):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def _fill_and_hang(path: Path, ready: Any) -> None:
    with DiskCache(path, 3) as cache:
        cache.put(0, 0)
        ready.set()
        time.sleep(600)


def test_counts_of_threads_and_processes_are_added_up_exactly(cache: DiskCache) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_count, args=(cache,)) for _ in range(3)]
    threads = [threading.Thread(target=_count, args=(cache,)) for _ in range(3)]
    counting: list[Any] = [*children, *threads]
    for each in counting:
        each.start()
    for each in counting:
        each.join()
    assert cache.counts.read() == (600, 300, 0, 600)


def _count(cache: DiskCache) -> None:
    for number in range(100):
        cache.counts.add(missed=number % 2 == 0, damaged=False, wait_seconds=1e-9)
