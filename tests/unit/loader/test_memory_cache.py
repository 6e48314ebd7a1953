"""The cache in memory: first in, first out, within its limits, for one process."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch import MemoryCache
from stoker_torch._sample_cache import sample_bytes


def held(cache: MemoryCache, indices: range) -> list[int]:
    return [index for index in indices if cache.holds(index, renew=False)]


def test_it_gives_out_what_was_put_and_none_is_a_sample() -> None:
    cache = MemoryCache(3)
    sample = object()
    assert cache.put(5, sample)
    assert cache.put(6, None)
    assert cache.get(5) is sample
    assert cache.get(6) is None
    with pytest.raises(KeyError):
        cache.get(7)


def test_the_first_in_is_the_first_out_however_often_it_was_read_or_put() -> None:
    cache = MemoryCache(3)
    for index in range(3):
        cache.put(index, index)
    cache.get(0)
    cache.put(0, "again")
    cache.put(3, 3)
    assert held(cache, range(9)) == [1, 2, 3]
    cache.put(4, 4)
    assert held(cache, range(9)) == [2, 3, 4]


def test_a_sample_that_is_put_again_stays_what_it_was() -> None:
    cache = MemoryCache(3)
    cache.put(0, "first")
    assert cache.put(0, "second")
    assert cache.get(0) == "first"


def test_a_renewed_sample_is_the_last_to_go() -> None:
    cache = MemoryCache(3)
    for index in range(3):
        cache.put(index, index)
    assert cache.holds(0, renew=True)
    assert not cache.holds(7, renew=True)
    cache.put(3, 3)
    cache.put(4, 4)
    assert held(cache, range(9)) == [0, 3, 4]


def test_the_limit_in_bytes_holds_beside_the_one_in_samples() -> None:
    cache = MemoryCache(100, max_bytes=1000, size_of=len)
    for index in range(20):
        assert cache.put(index, bytes(300))
        assert len(cache) <= 3
    assert held(cache, range(20)) == [17, 18, 19]
    assert cache.put(20, bytes(900))
    assert held(cache, range(21)) == [20]


def test_a_sample_larger_than_the_limit_is_not_kept_and_costs_no_other_its_place() -> None:
    cache = MemoryCache(100, max_bytes="1KB", size_of=len)
    cache.put(0, bytes(1000))
    assert not cache.put(1, bytes(1001))
    assert held(cache, range(2)) == [0]


def test_what_a_sample_keeps_in_memory_is_counted_with_what_it_is_a_view_of() -> None:
    whole = torch.zeros(1000, dtype=torch.float64)
    assert sample_bytes(whole[:2]) == 8000
    assert sample_bytes(np.zeros(1000)[:2]) == 8000
    assert 16000 < sample_bytes({"a": [whole], "b": (np.zeros(1000), 3, "text", None)}) < 16800


def test_a_sample_that_does_not_tell_its_size_is_an_error_only_where_size_matters() -> None:
    assert MemoryCache(3).put(0, object())
    with pytest.raises(SampleError, match=r"builtins\.object.*size_of="):
        MemoryCache(3, max_bytes=1000).put(0, object())


@pytest.mark.parametrize(("samples", "max_bytes"), [(0, None), (-1, None), (3, 0), (3, "0MB"), (3, "much")])
def test_limits_that_leave_no_room_are_refused(samples: int, max_bytes: int | str | None) -> None:
    with pytest.raises(ConfigError):
        MemoryCache(samples, max_bytes=max_bytes)


def test_closed_it_is_empty_and_takes_nothing() -> None:
    with MemoryCache(3) as cache:
        cache.put(0, 0)
    assert len(cache) == 0
    with pytest.raises(StokerError, match="closed"):
        cache.put(1, 1)
    with pytest.raises(KeyError):
        cache.get(0)
    cache.close()


def test_use_in_another_process_is_an_error_that_names_the_disk_cache() -> None:
    cache = MemoryCache(3)
    cache.put(0, 0)
    with pytest.raises(ConfigError, match="DiskCache"):
        pickle.dumps(cache)
    context = multiprocessing.get_context("fork")
    messages = context.SimpleQueue()
    child = context.Process(target=_look_up, args=(cache, messages))
    child.start()
    child.join()
    assert "num_workers=0, or a DiskCache" in messages.get()
    messages.close()


def _look_up(cache: MemoryCache, messages: multiprocessing.SimpleQueue[str]) -> None:
    try:
        messages.put(f"found {cache.get(0)}")
    except ConfigError as error:
        messages.put(str(error))
