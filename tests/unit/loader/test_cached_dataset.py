"""The cached data set and its service: what is looked up, missed, fetched and counted, and what failures come to."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch import CachedDataset, CacheStatistics, MemoryCache
from support.executors import Delayed, Immediate


class Squares:
    """A data set that records its readers, and fails at given samples."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.reads: list[int] = []
        self.failing = failing

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        if index in self.failing:
            raise OSError(f"no sample {index}")
        return index * index

    def __len__(self) -> int:
        return 100


class Ticking:
    """A clock that advances by one second per reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def cached(squares: Squares, samples: int = 10, **settings: Any) -> CachedDataset:
    return CachedDataset(squares, MemoryCache(samples), **{"executor": Immediate(), **settings})


def test_a_fetched_sample_comes_from_the_cache() -> None:
    squares = Squares()
    dataset = cached(squares)
    dataset.service.fetch([3, 4])
    assert squares.reads == [3, 4]
    assert [dataset[3], dataset[4]] == [9, 16]
    assert squares.reads == [3, 4]
    assert len(dataset) == 100


def test_a_miss_reads_the_data_set_and_puts_nothing_into_the_cache() -> None:
    squares = Squares()
    dataset = cached(squares)
    assert [dataset[3], dataset[3]] == [9, 9]
    assert squares.reads == [3, 3]
    assert not dataset.cache.holds(3, renew=False)


def test_every_look_up_miss_and_second_is_counted() -> None:
    dataset = cached(Squares(failing=(8,)), clock=Ticking())
    dataset.service.fetch([3, 4, 3])
    dataset.service.fetch([4, 5, 8])
    assert [dataset[3], dataset[5], dataset[6]] == [9, 25, 36]
    with pytest.raises(OSError, match="no sample 8"):
        _ = dataset[8]
    assert dataset.stats() == CacheStatistics(
        lookups=4, misses=2, damaged=0, wait_seconds=4.0, fetches=2, fetched=3, already_cached=2, failures=1
    )
    assert dataset.stats().miss_rate == 0.5


def test_the_difference_of_two_statistics_is_what_happened_between_them() -> None:
    dataset = cached(Squares(), clock=Ticking())
    assert dataset.stats().miss_rate == 0.0
    _ = dataset[0]
    before = dataset.stats()
    dataset.service.fetch([1])
    _ = dataset[1]
    assert dataset.stats() - before == CacheStatistics(
        lookups=1, misses=0, damaged=0, wait_seconds=1.0, fetches=1, fetched=1, already_cached=0, failures=0
    )


def test_indices_of_all_integer_types_are_the_same_sample() -> None:
    dataset = cached(Squares())
    dataset.service.fetch([3])
    assert dataset[torch.tensor(3)] == 9  # type: ignore[index]  # what some samplers yield
    assert dataset.stats().misses == 0


def test_an_index_that_is_on_its_way_is_not_read_twice() -> None:
    squares = Squares()
    later = Delayed()
    dataset = cached(squares, executor=later)
    dataset.service.fetch([3])
    dataset.service.fetch([3])
    later.do_all()
    assert squares.reads == [3]


def test_each_sample_can_be_seen_as_soon_as_it_is_read() -> None:
    later = Delayed(1)
    dataset = cached(Squares(), executor=later)
    dataset.service.fetch([3])
    later.tick()
    dataset.service.fetch([4])
    assert [dataset.cache.holds(index, renew=False) for index in (3, 4)] == [True, False]


class OneByOne(Delayed):
    """Does one piece of work a tick."""

    def _do(self) -> None:
        pass

    def tick(self) -> None:
        self._due.pop(0)[1]()


def test_together_samples_can_be_seen_when_the_last_of_their_fetch_is_read() -> None:
    later = OneByOne()
    dataset = cached(Squares(failing=(5,)), executor=later, visible="together")
    dataset.service.fetch([3, 4, 5])
    seen = []
    for _ in range(3):
        later.tick()
        seen.append([index for index in (3, 4, 5) if dataset.cache.holds(index, renew=False)])
    assert seen == [[], [], [3, 4]]


def test_a_renewed_sample_outlives_those_that_came_after_it_and_else_it_does_not() -> None:
    for renew in (True, False):
        dataset = cached(Squares(), 3, renew=renew)
        dataset.service.fetch([0, 1, 2])
        dataset.service.fetch([0, 3])
        assert dataset.cache.holds(0, renew=False) is renew


def test_a_read_that_fails_in_the_background_is_a_miss_and_training_gets_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    squares = Squares(failing=(3, 4))
    dataset = cached(squares)
    with caplog.at_level(logging.WARNING, "stoker"):
        dataset.service.fetch([3, 4, 5])
    assert len(caplog.records) == 1
    assert "sample 3 could not be fetched ahead" in caplog.text
    assert "no sample" not in caplog.text  # an error's text may have a signed URL in it
    assert dataset[5] == 25
    with pytest.raises(OSError, match="no sample 3"):
        _ = dataset[3]
    squares.failing = ()
    assert dataset[3] == 9
    assert (dataset.stats().failures, dataset.stats().misses) == (2, 2)


def test_the_error_of_a_miss_does_not_hang_on_the_look_up() -> None:
    with pytest.raises(OSError, match="no sample") as caught:
        _ = cached(Squares(failing=(3,)))[3]
    assert caught.value.__context__ is None


def test_even_an_exit_in_the_background_is_only_a_miss() -> None:
    class Leaving(Squares):
        def __getitem__(self, index: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit
            return super().__getitem__(index)

    with CachedDataset(Leaving(), MemoryCache(10), threads=1) as dataset:
        dataset.service.fetch([1, 2])
        while dataset.stats().failures < 2:
            pass
        assert dataset[1] == 1


def test_a_sample_that_the_cache_cannot_hold_stops_the_next_fetch_with_its_name() -> None:
    dataset = CachedDataset([{1}], MemoryCache(3, max_bytes=100), executor=Immediate())
    dataset.service.fetch([0])
    with pytest.raises(SampleError, match=r"builtins\.set"):
        dataset.service.fetch([0])


def test_a_sample_that_is_too_large_is_a_failure_and_no_more() -> None:
    dataset = CachedDataset([b"", bytes(1000)], MemoryCache(3, max_bytes=100), executor=Immediate())
    dataset.service.fetch([0, 1])
    dataset.service.fetch([1])
    assert (dataset.stats().fetched, dataset.stats().failures) == (1, 2)
    assert len(dataset[1]) == 1000


def test_what_is_forgotten_before_it_is_begun_is_not_read_and_may_be_requested_again() -> None:
    squares = Squares()
    later = Delayed()
    dataset = cached(squares, executor=later)
    dataset.service.fetch([1, 2, 3])
    dataset.service.forget([1, 3])
    later.do_all()
    assert squares.reads == [2]
    dataset.service.fetch([1])
    later.do_all()
    assert squares.reads == [2, 1]


@pytest.mark.parametrize("drop_late", [True, False])
def test_what_training_has_read_itself_is_not_read_again_unless_requested_as_in_the_paper(drop_late: bool) -> None:
    squares = Squares()
    later = Delayed()
    dataset = cached(squares, executor=later, drop_late=drop_late)
    dataset.service.fetch([1, 2])
    assert dataset[1] == 1
    later.do_all()
    assert squares.reads == ([1, 2] if drop_late else [1, 1, 2])
    assert dataset.cache.holds(1, renew=False) is not drop_late


class Gated(Squares):
    """Reads wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)

    def __getitem__(self, index: int) -> int:
        self.begun.release()
        assert self.gate.wait(60)
        return super().__getitem__(index)


def fetch_threads(others: Collection[threading.Thread] = ()) -> list[str]:
    found = [thread for thread in threading.enumerate() if thread not in others]
    return [thread.name for thread in found if thread.name.startswith("stoker-fetch")]


def test_close_leaves_a_data_set_that_does_not_return_behind_and_names_the_samples(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stoker_torch._user_functions._CLOSE_SECONDS", 0.05)
    entered, leave = threading.Barrier(3), threading.Event()

    class Stuck(Squares):
        def __getitem__(self, index: int) -> int:
            entered.wait()
            leave.wait()
            return super().__getitem__(index)

    dataset = CachedDataset(Stuck(), MemoryCache(samples=10), threads=2)
    dataset.service.fetch([3, 5, 7])
    entered.wait()
    dataset.close()
    leave.set()
    assert caplog.messages == ["fetching threads are still running: the data set has not returned sample 3, 5"]


def test_a_fetch_answers_at_once_and_reads_as_many_samples_at_a_time_as_there_are_threads() -> None:
    gated, others = Gated(), threading.enumerate()
    with CachedDataset(gated, MemoryCache(10), threads=3) as dataset:
        assert not fetch_threads(others)
        dataset.service.fetch(range(5))
        for _ in range(3):
            assert gated.begun.acquire(timeout=60)
        assert len(fetch_threads(others)) == 3
        assert not gated.begun.acquire(blocking=False)
        gated.gate.set()


def test_closing_drops_what_is_not_begun_and_leaves_no_thread() -> None:
    gated = Gated()
    dataset = CachedDataset(gated, MemoryCache(10), threads=1)
    dataset.service.fetch(range(5))
    assert gated.begun.acquire(timeout=60)
    opening = threading.Timer(0.05, gated.gate.set)
    opening.start()
    dataset.close()
    dataset.close()
    opening.join()
    assert gated.reads == [0]
    assert not fetch_threads()
    assert dataset[7] == 49  # it can still be read
    with pytest.raises(StokerError, match="closed"):
        dataset.service.fetch([8])


def test_collecting_it_leaves_no_thread() -> None:
    dataset = CachedDataset(Squares(), MemoryCache(10), threads=2)
    dataset.service.fetch(range(5))
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None
    assert not fetch_threads()


def test_a_copy_looks_up_and_does_not_fetch() -> None:
    class Shared(MemoryCache):
        def __reduce__(self) -> Any:  # stands for a cache that can be sent
            return MemoryCache, (3,)

    dataset = CachedDataset(range(5), Shared(3), executor=Immediate(), clock=float)
    copied: CachedDataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - as multiprocessing does
    assert copied[3] == 3
    with pytest.raises(ConfigError, match="process that constructed it"):
        copied.service.fetch([3])


def test_a_forked_child_that_fetches_is_an_error_with_the_remedy() -> None:
    dataset = cached(Squares())
    child = multiprocessing.get_context("fork").Process(target=_fetch_as_child, args=(dataset,))
    child.start()
    child.join()
    assert child.exitcode == 42


def _fetch_as_child(dataset: CachedDataset) -> None:
    try:
        dataset.service.fetch([1])
    except ConfigError:
        raise SystemExit(42) from None


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Endless(), iter([1]), None])
def test_what_has_no_samples_by_index_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="index"):
        CachedDataset(dataset, MemoryCache(3))


@pytest.mark.parametrize("settings", [{"threads": 0}, {"visible": "never"}])
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CachedDataset([1], MemoryCache(3), **settings)
