"""The prefetch sampler: the paper's rule to the letter, checked against a model of it, and what goes beyond it."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from stoker.errors import ConfigError, SampleError
from stoker_torch import CachedDataset, MemoryCache, PrefetchSampler
from support.executors import Delayed, Immediate

PAPER: dict[str, Any] = {"visible": "together", "renew": False, "drop_late": False}


def paper_misses(
    orders: Sequence[Sequence[int]], *, cache: int, fetch_size: int, threshold: int, delay: float
) -> list[list[int]]:
    """Return which look-ups miss, by epoch, with a fetch that takes as long as ``delay`` look-ups: the paper's rule."""
    stored: list[int] = []  # first in, first out
    under_way: list[tuple[float, list[int]]] = []
    missed: list[list[int]] = []
    now = 0

    def arrive() -> None:
        while under_way and under_way[0][0] <= now:
            stored.extend(under_way.pop(0)[1])
            del stored[:-cache]

    for order in orders:
        left, queue = list(order), list[int]()
        missed.append([])
        while left or queue:
            if len(queue) <= threshold:
                fetch, left = left[:fetch_size], left[fetch_size:]
                queue += fetch
                known = {*stored, *(index for _, indices in under_way for index in indices)}
                under_way.append((now + delay, [index for index in fetch if index not in known]))
            arrive()
            index = queue.pop(0)
            if index not in stored:
                missed[-1].append(index)
            now += 1
            arrive()
    return missed


class Orders:
    """A sampler whose epochs are given."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._orders = iter(orders)
        self._length = len(orders[0])

    def __iter__(self) -> Iterator[int]:
        return iter(next(self._orders))

    def __len__(self) -> int:
        return self._length


class Noting(CachedDataset):
    """A cached data set of the numbers themselves, that knows what was missed, and for which look-ups are time."""

    def __init__(self, count: int, cache: int, delay: float = 0, **settings: Any) -> None:
        self.executor = Delayed(delay)
        self.fetched: list[list[int]] = []
        self.asked: list[list[int]] = []
        super().__init__(range(count), MemoryCache(cache), executor=self.executor, **settings)
        fetch = self.service.fetch

        def noting(indices: Sequence[int]) -> None:
            self.fetched.append(list(indices))
            fetch(indices)

        self.service.fetch = noting  # type: ignore[method-assign]

    def missed(self, indices: Iterator[int]) -> list[int]:
        """Look up all of an epoch, and return what was missed."""
        missed = []
        self.asked.append([])
        for index in indices:
            self.asked[-1].append(index)
            before = self.cache.counts.read()[1]
            assert self[index] == index
            if self.cache.counts.read()[1] > before:
                missed.append(index)
            self.executor.tick()
        return missed


def shuffled(count: int, epochs: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.sample(range(count), count) for _ in range(epochs)]


def test_every_miss_is_one_of_the_papers_whatever_the_sizes_and_the_time_of_a_fetch() -> None:
    rng = random.Random(3)
    missed = looked_up = 0
    for seed in range(300):
        cache = rng.randrange(1, 20)
        threshold = rng.randrange(cache)
        fetch_size = rng.randrange(1, cache - threshold + 1)
        delay = rng.choice([0, 0, 1, 2, 5, 20, math.inf])
        orders = shuffled(rng.randrange(1, 40), 3, seed)
        dataset = Noting(50, cache, delay, **PAPER)
        sampler = PrefetchSampler(
            Orders(orders), dataset, fetch_size=fetch_size, threshold=threshold, across_epochs=False
        )
        found = [dataset.missed(iter(sampler)) for _ in orders]
        assert found == paper_misses(orders, cache=cache, fetch_size=fetch_size, threshold=threshold, delay=delay)
        missed += sum(map(len, found))
        looked_up += sum(map(len, orders))
    assert 0.1 < missed / looked_up < 0.9


def test_with_half_and_half_fetches_are_issued_when_half_of_the_cache_is_left() -> None:
    dataset = Noting(16, 8, **PAPER)
    sampler = PrefetchSampler(SequentialSampler(range(16)), dataset, fetch_size=4, threshold=4, across_epochs=False)
    assert len(sampler) == 16
    issued = [len(dataset.fetched) for _ in sampler]
    # four before the first; four more at once, since no more than four are left; then whenever four are left
    assert issued == [1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4]
    assert dataset.fetched == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_instantaneous_fetches_miss_nothing_and_endless_ones_everything() -> None:
    for delay, expected in ((0, 0), (math.inf, 60)):
        dataset = Noting(20, 8, delay)
        sampler = PrefetchSampler(RandomSampler(range(20)), dataset, fetch_size=4, threshold=4)
        for _ in range(3):
            dataset.missed(iter(sampler))
        assert dataset.stats().misses == expected


def test_a_fetch_is_truncated_at_the_end_of_an_epoch_that_it_may_not_cross() -> None:
    dataset = Noting(10, 8)
    sampler = PrefetchSampler(SequentialSampler(range(10)), dataset, fetch_size=4, across_epochs=False)
    assert [list(sampler), list(sampler)] == [list(range(10))] * 2
    assert dataset.fetched == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2


def test_first_in_first_out_evicts_unread_samples_only_if_threshold_and_fetch_size_pass_the_cache() -> None:
    for cache, threshold, fetch_size in product(range(1, 9), range(9), range(1, 9)):
        sizes = {"cache": cache, "fetch_size": fetch_size, "threshold": threshold}
        missed = sum(map(len, paper_misses(shuffled(60, 1), **sizes, delay=0)))
        # fetched one by one, no more than one is ever queued, for there is one fetch before each is taken
        assert (missed == 0) == (threshold + fetch_size <= cache or fetch_size == 1), sizes


def test_a_cache_too_small_for_threshold_and_fetch_size_is_refused_with_the_size_that_fits() -> None:
    dataset = Noting(10, 7)
    PrefetchSampler(range(10), dataset, fetch_size=4, threshold=3)
    with pytest.raises(ConfigError, match="8 samples or more, and this one is for 7"):
        PrefetchSampler(range(10), dataset, fetch_size=4, threshold=4)


@pytest.mark.parametrize(
    "settings", [{"fetch_size": 0}, {"fetch_size": 1, "threshold": -1}, {"fetch_size": 1, "epochs": 0}]
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefetchSampler(range(10), Noting(10, 7), **settings)


def test_the_recipes_use_the_cache_but_for_what_is_in_hand() -> None:
    dataset = Noting(100, 11)
    orders = range(100)
    for made, expected in (
        (PrefetchSampler.full_fetch(orders, dataset), (11, 0)),
        (PrefetchSampler.half_and_half(orders, dataset), (6, 5)),
        (PrefetchSampler.half_and_half(orders, dataset, unread_samples=4, epochs=3), (4, 3)),
        (PrefetchSampler.full_fetch(orders, dataset, unread_samples=4, across_epochs=False), (7, 0)),
    ):
        assert (made._schedule.fetch_size, made._schedule.threshold) == expected
    with pytest.raises(ConfigError):
        PrefetchSampler.full_fetch(orders, dataset, unread_samples=11)


def test_across_epochs_only_the_very_first_samples_are_waited_for() -> None:
    orders = shuffled(40, 4)
    missed = {}
    for across in (False, True):
        dataset = Noting(40, 16, 5)
        sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=8, threshold=8, across_epochs=across, epochs=4)
        missed[across] = [len(dataset.missed(iter(sampler))) for _ in orders]
    assert missed[True] == [5, 0, 0, 0]
    assert missed[False][0] == 5
    assert min(missed[False]) > 0


class HalfSpeed(Delayed):
    """Does work every other tick, as much as it takes to read one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index

    def tick(self) -> None:
        self._now += 1
        before = self.reads
        while self._now % 2 and self._due and self.reads == before:
            self._due.pop(0)[1]()


def test_a_service_that_cannot_keep_up_is_of_use_if_it_drops_what_training_has_read_itself() -> None:
    missed = {}
    for drop_late in (False, True):
        half = HalfSpeed()
        dataset = CachedDataset(half, MemoryCache(40), executor=half, drop_late=drop_late)
        for index in PrefetchSampler(range(400), dataset, fetch_size=20, threshold=20, epochs=1):
            assert dataset[index] == index
            half.tick()
        missed[drop_late] = dataset.stats().misses
    assert missed[False] > 350  # it reads what training has read already, ever further behind
    assert missed[True] < 250  # it reads about one of two


@pytest.mark.parametrize(("threshold", "fetch_size"), [(0, 12), (6, 6), (11, 1), (3, 5)])
def test_renewed_no_sample_is_evicted_before_its_use_in_any_epoch(threshold: int, fetch_size: int) -> None:
    missed = {}
    for renew in (True, False):
        dataset = Noting(20, 12, renew=renew)
        sampler = PrefetchSampler(RandomSampler(range(20)), dataset, fetch_size=fetch_size, threshold=threshold)
        missed[renew] = sum(len(dataset.missed(iter(sampler))) for _ in range(30))
    assert missed[True] == 0
    assert missed[False] > 0  # as in the paper: what is cached keeps its place, and goes before it is read


def test_every_epoch_is_a_whole_permutation_although_it_is_drawn_ahead() -> None:
    torch.manual_seed(5)
    sampler = PrefetchSampler(RandomSampler(range(30)), Noting(30, 20), fetch_size=7, threshold=9)
    epochs = [list(sampler) for _ in range(5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 5
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("across", [True, False])
def test_a_sampler_with_a_generator_of_its_own_yields_what_it_would_alone(across: bool) -> None:
    def alone() -> RandomSampler:
        return RandomSampler(range(30), generator=torch.Generator().manual_seed(3))

    plain = alone()
    sampler = PrefetchSampler(alone(), Noting(30, 20), fetch_size=7, threshold=9, across_epochs=across)
    assert [list(sampler) for _ in range(4)] == [list(plain) for _ in range(4)]


def test_an_epoch_smaller_than_a_fetch_is_drawn_one_epoch_ahead_and_no_further() -> None:
    dataset = Noting(3, 20)
    orders = shuffled(3, 3)
    sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=10, threshold=10)
    assert [list(sampler), list(sampler)] == orders[:2]
    assert dataset.fetched == [orders[0] + orders[1], orders[2]]


def test_nothing_is_fetched_beyond_the_last_epoch() -> None:
    dataset = Noting(10, 8)
    sampler = PrefetchSampler(SequentialSampler(range(10)), dataset, fetch_size=4, threshold=4, epochs=2)
    for _ in range(2):
        dataset.missed(iter(sampler))
    assert sum(map(len, dataset.fetched)) == 20
    assert list(sampler) == list(range(10))  # one more is still whole


def test_an_epoch_left_early_is_over_and_what_was_not_begun_of_it_is_not_read() -> None:
    reads: list[int] = []

    class Reading:
        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return index

        def __len__(self) -> int:
            return 20

    later = Delayed()
    dataset = CachedDataset(Reading(), MemoryCache(12), executor=later)
    orders = shuffled(20, 3)
    sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=6, threshold=6)
    for index in sampler:
        if index == orders[0][2]:
            break
    later.do_all()
    assert reads == orders[0][:3]
    assert list(sampler) == orders[1]


def test_an_epoch_left_early_near_its_end_leaves_the_beginning_of_the_next() -> None:
    dataset = Noting(20, 12, 0)
    orders = shuffled(20, 3)
    sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=6, threshold=6)
    for index in sampler:
        if index == orders[0][18]:
            break
    assert dataset.missed(iter(sampler)) == []
    assert [*chain(*dataset.fetched)][:40] == orders[0] + orders[1]


def test_two_iterations_at_once_are_two_whole_epochs() -> None:
    sampler = PrefetchSampler(RandomSampler(range(20)), Noting(20, 12), fetch_size=6, threshold=6)
    one, other = iter(sampler), iter(sampler)
    found: tuple[list[int], list[int]] = ([], [])
    for _ in range(20):
        found[0].append(next(one))
        found[1].append(next(other))
    assert sorted(found[0]) == sorted(found[1]) == list(range(20))
    assert next(one, None) is next(other, None) is None


def distributed(rank: int = 0) -> DistributedSampler[int]:
    return DistributedSampler(range(30), num_replicas=2, rank=rank, seed=9)  # type: ignore[arg-type]  # any sized thing


def expected_epochs(*numbers: int) -> list[list[int]]:
    plain = distributed()
    epochs = []
    for number in numbers:
        plain.set_epoch(number)
        epochs.append(list(plain))
    return epochs


def test_a_distributed_sampler_gets_the_epoch_and_the_next_one_is_ready() -> None:
    dataset = Noting(30, 12, 3)
    sampler = PrefetchSampler(distributed(), dataset, fetch_size=6, threshold=6)
    missed = []
    for number in range(3):
        sampler.set_epoch(number)
        missed.append(len(dataset.missed(iter(sampler))))
    assert dataset.asked == expected_epochs(0, 1, 2)
    assert missed == [3, 0, 0]


def test_another_epoch_than_the_one_drawn_ahead_is_drawn_anew() -> None:
    sampler = PrefetchSampler(distributed(), Noting(30, 12), fetch_size=6, threshold=6)
    sampler.set_epoch(0)
    found = [list(sampler)]
    sampler.set_epoch(7)
    found.append(list(sampler))
    found.append(list(sampler))  # a loop that does not set the epoch repeats it, as it would without prefetching
    assert found == expected_epochs(0, 7, 7)


def test_a_distributed_sampler_without_an_epoch_repeats_it_and_is_still_ready() -> None:
    dataset = Noting(30, 12, 3)
    sampler = PrefetchSampler(distributed(), dataset, fetch_size=6, threshold=6)
    assert [len(dataset.missed(iter(sampler))) for _ in range(3)] == [3, 0, 0]
    assert dataset.asked == expected_epochs(0, 0, 0)


def test_setting_the_epoch_of_a_sampler_that_has_none_changes_nothing() -> None:
    dataset = Noting(20, 12, 3)
    orders = shuffled(20, 2)
    sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=6, threshold=6, epochs=2)
    sampler.set_epoch(0)
    assert len(dataset.missed(iter(sampler))) == 3
    sampler.set_epoch(1)
    assert dataset.missed(iter(sampler)) == []


def test_a_batch_sampler_goes_around_it_and_not_into_it() -> None:
    dataset = Noting(10, 8)
    around = BatchSampler(PrefetchSampler(range(10), dataset, fetch_size=4), 3, drop_last=True)
    assert list(around) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ConfigError, match=r"yields \[0, 1, 2\]; put a batch sampler around"):
        list(PrefetchSampler(BatchSampler(range(10), 3, drop_last=False), dataset, fetch_size=4))


def test_indices_as_tensors_are_yielded_as_the_numbers_they_are() -> None:
    sampler = PrefetchSampler(list(torch.arange(5)), Noting(5, 8), fetch_size=4)
    assert [type(index) for index in sampler] == [int] * 5


def test_a_type_that_the_cache_cannot_hold_stops_training_at_the_next_sample() -> None:
    dataset = CachedDataset([{1}] * 10, MemoryCache(10, max_bytes=1000), executor=Immediate())
    sampler = PrefetchSampler(range(10), dataset, fetch_size=10)
    indices = iter(sampler)
    assert next(indices) == 0
    with pytest.raises(SampleError, match=r"builtins\.set"):
        next(indices)


def test_a_loader_with_threads_gets_every_batch_as_it_would_without() -> None:
    data = torch.arange(200).reshape(100, 2)
    seeded: Callable[[], RandomSampler] = lambda: RandomSampler(data, generator=torch.Generator().manual_seed(1))  # noqa: E731
    plain: DataLoader[Any] = DataLoader(data, batch_size=8, sampler=seeded())  # type: ignore[arg-type]  # a tensor is a data set
    with CachedDataset(data, MemoryCache(40), threads=4) as dataset:
        loader = DataLoader(
            dataset, batch_size=8, sampler=PrefetchSampler.half_and_half(seeded(), dataset, unread_samples=8)
        )
        for _ in range(3):
            for one, other in zip(plain, loader, strict=True):
                assert torch.equal(one, other)
        assert dataset.stats().lookups == 300
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stoker-fetch")]


def test_the_wait_is_that_of_the_papers_model_too() -> None:
    """Table and figure of the paper compare waits: on a fake clock, a miss costs one read, and a hit nothing."""
    orders = shuffled(60, 2)
    now = 0.0

    class Remote:
        def __getitem__(self, index: int) -> int:
            nonlocal now
            now += 1.0 if is_training else 0.0
            return index

        def __len__(self) -> int:
            return 60

    is_training = False
    later = Delayed(5)
    dataset = CachedDataset(Remote(), MemoryCache(16), executor=later, clock=lambda: now, **PAPER)
    sampler = PrefetchSampler(Orders(orders), dataset, fetch_size=8, threshold=8, across_epochs=False)
    for _ in orders:
        for index in sampler:
            is_training = True
            assert dataset[index] == index
            is_training = False
            later.tick()
    misses = sum(map(len, paper_misses(orders, cache=16, fetch_size=8, threshold=8, delay=5)))
    assert dataset.stats().wait_seconds == dataset.stats().misses == misses > 0
