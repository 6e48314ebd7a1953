"""The informed loader: the batches of a plain loader, prefetched to the given depth, without leftovers."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from stoker.errors import ConfigError, StokerError
from stoker_torch import InformedDataLoader
from stoker_torch._sample_cache import LookupStatistics
from support.same import same


class Pairs(Dataset[Any]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), index), "y": index * index}

    def __len__(self) -> int:
        return self.count


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def as_list(samples: list[Any]) -> list[Any]:
    return [sample["y"] for sample in samples]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "stoker-informed-0"]


LOADERS: dict[str, Callable[[], tuple[Dataset[Any], dict[str, Any]]]] = {
    "in order": lambda: (Pairs(), {"batch_size": 4}),
    "last dropped": lambda: (Pairs(), {"batch_size": 4, "drop_last": True}),
    "shuffled": lambda: (Pairs(), {"batch_size": 4, "shuffle": True}),
    "shuffled by its generator": lambda: (
        Pairs(),
        {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(1)},
    ),
    "a sampler": lambda: (Pairs(), {"batch_size": 4, "sampler": RandomSampler(range(9), generator=torch.Generator())}),
    "a batch sampler": lambda: (Pairs(), {"batch_sampler": BatchSampler(SequentialSampler(range(9)), 2, False)}),
    "single samples": lambda: (Pairs(), {"batch_size": None}),
    "collated": lambda: (Pairs(), {"batch_size": 4, "collate_fn": as_list}),
    "iterable": lambda: (Counting(), {"batch_size": 4}),
    "a single batch": lambda: (Pairs(), {"batch_size": 40}),
    "nothing": lambda: (Pairs(0), {"batch_size": 4}),
}


@pytest.mark.parametrize("depth", [1, 3, 50])
@pytest.mark.parametrize("made", LOADERS.values(), ids=LOADERS)
def test_every_epoch_is_that_of_a_plain_loader(
    made: Callable[[], tuple[Dataset[Any], dict[str, Any]]], depth: int
) -> None:
    epochs: list[list[Any]] = []
    for kind in (DataLoader, lambda *args, **settings: InformedDataLoader(*args, depth=depth, **settings)):
        dataset, settings = made()
        torch.manual_seed(3)
        loader = kind(dataset, **settings)
        epochs.append([list(loader) for _ in range(3)])
        if not isinstance(dataset, IterableDataset):
            assert len(loader) == len(epochs[-1][0])
    assert same(epochs[0], epochs[1])
    assert not threads()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_all_batches_are_in_page_locked_memory() -> None:
    assert all(batch["x"].is_pinned() for batch in InformedDataLoader(Pairs(), batch_size=4, pin_memory=True))


class Watched(Pairs):
    """Says which samples are being read, and on which thread; each read waits for a permit."""

    def __init__(self, count: int = 8, failing: tuple[int, ...] = (), error: type[BaseException] = OSError) -> None:
        super().__init__(count)
        self.permits = threading.Semaphore(0)
        self.reading = threading.Semaphore(0)
        self.reads: list[tuple[int, str]] = []
        self.failing, self.error = failing, error

    def __getitem__(self, index: int) -> int:
        self.reads.append((index, threading.current_thread().name))
        self.reading.release()
        assert self.permits.acquire(timeout=60)
        if index in self.failing:
            raise self.error(f"no sample {index}")
        return index

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()

    def await_reads(self, count: int) -> None:
        for _ in range(count):
            assert self.reading.acquire(timeout=60)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_first_batch_is_loaded_in_the_loop_and_the_next_ones_during_it(depth: int) -> None:
    watched = Watched()
    batches = iter(InformedDataLoader(watched, batch_size=None, depth=depth))
    assert watched.reads == []
    watched.allow(1)
    assert next(batches) == 0
    watched.allow(depth)  # and not one more, or the permits would not suffice for what is asked for below
    watched.await_reads(1 + depth)
    assert watched.reads == [(0, "MainThread"), *((index, "stoker-informed-0") for index in range(1, depth + 1))]
    assert [next(batches) for _ in range(depth)] == list(range(1, depth + 1))
    watched.await_reads(1)
    watched.allow(8)
    assert list(batches) == list(range(depth + 1, 8))


def test_no_more_than_depth_batches_are_ever_ahead() -> None:
    ahead: list[int] = []
    taken = 0

    class Measuring(Pairs):
        def __getitem__(self, index: int) -> int:
            ahead.append(index - taken)
            return index

    for _batch in InformedDataLoader(Measuring(200), batch_size=None, depth=3):
        taken += 1
    assert max(ahead) <= 3


def test_batches_waits_and_what_was_not_there_when_requested_are_counted() -> None:
    now = 0.0
    watched = Watched(4)
    loader = InformedDataLoader(watched, batch_size=None, depth=2, clock=lambda: now)
    assert loader.stats() == LookupStatistics(lookups=0, misses=0, wait_seconds=0)

    class Late:
        """Lets time pass while a batch is waited for."""

        def __enter__(self) -> None:
            self.timer = threading.Timer(0.01, self.run)
            self.timer.start()

        def run(self) -> None:
            nonlocal now
            now += 5
            watched.allow(1)

        def __exit__(self, *_: object) -> None:
            self.timer.join()

    batches = iter(loader)
    with Late():
        next(batches)
    with Late():
        next(batches)
    watched.allow(2)
    watched.await_reads(4)
    line = batches._queue  # type: ignore[attr-defined]
    while line.loaded.qsize() < 2:
        pass
    next(batches)
    assert loader.stats() == LookupStatistics(lookups=3, misses=2, wait_seconds=10)
    assert loader.stats().miss_rate == 2 / 3
    assert len(list(batches)) == 1


@pytest.mark.parametrize("failing", [0, 1, 3, 7])
def test_an_error_is_raised_for_its_batch_and_the_next_ones_come_as_from_a_plain_loader(failing: int) -> None:
    outcomes: list[list[Any]] = []
    for kind in (DataLoader, InformedDataLoader):
        watched = Watched(failing=(failing,))
        watched.allow(8)
        batches = iter(kind(watched, batch_size=None))
        outcomes.append([])
        for _ in range(8):
            try:
                outcomes[-1].append(next(batches))
            except OSError as error:
                outcomes[-1].append(str(error))
        assert next(batches, None) is None
        assert next(batches, None) is None
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][failing] == f"no sample {failing}"


@pytest.mark.parametrize("failing", [0, 2])
def test_an_exit_in_the_data_set_reaches_the_loop_and_ends_the_epoch(failing: int) -> None:
    watched = Watched(failing=(failing,), error=SystemExit)
    watched.allow(8)
    batches = iter(InformedDataLoader(watched, batch_size=None))
    assert [next(batches) for _ in range(failing)] == list(range(failing))
    with pytest.raises(SystemExit):
        next(batches)
    assert next(batches, None) is None
    assert not threads()


def test_an_error_of_the_sampler_is_raised_for_its_batch() -> None:
    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            yield 1
            raise LookupError("no more order")

    batches = iter(InformedDataLoader(Pairs(), batch_size=1, sampler=Failing()))
    assert next(batches)["y"].item() == 0
    assert next(batches)["y"].item() == 1
    with pytest.raises(LookupError, match="no more order"):
        next(batches)


def test_an_error_that_was_handled_keeps_no_iteration_and_no_thread() -> None:
    watched = Watched(failing=(2,))
    watched.allow(8)
    gc.disable()
    try:
        with pytest.raises(OSError, match="no sample 2"):
            for _ in InformedDataLoader(watched, batch_size=None):
                pass
        assert not threads()
    finally:
        gc.enable()


def test_leaving_early_ends_the_thread_after_the_batch_it_is_loading() -> None:
    watched = Watched()
    watched.allow(2)
    for batch in InformedDataLoader(watched, batch_size=None, depth=5):
        if batch == 1:
            watched.await_reads(3)
            opening = threading.Timer(0.05, watched.allow, (1,))
            opening.start()
            break
    opening.join()
    gc.collect()
    assert not threads()
    assert [index for index, _ in watched.reads] == [0, 1, 2]


def test_a_data_set_that_does_not_return_is_left_behind_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stoker_torch._user_functions._CLOSE_SECONDS", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def collate(samples: list[Any]) -> list[Any]:
        if samples[0] >= 4:
            entered.set()
            leave.wait()
        return samples

    batches = iter(InformedDataLoader(range(20), batch_size=4, collate_fn=collate))
    next(batches)
    entered.wait()
    del batches
    gc.collect()
    leave.set()
    assert caplog.messages == [
        "a loading thread is still running: the data set has not returned the batch being loaded ahead"
    ]
    while threads():
        pass


def test_two_epochs_at_once_do_not_disturb_each_other() -> None:
    loader = InformedDataLoader(Pairs(), batch_size=None, depth=2)
    pairs = [(one["y"], other["y"]) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [(index * index, index * index) for index in range(23)]


def test_a_batch_that_was_yielded_is_the_loops_alone() -> None:
    class Sample:
        pass

    class Samples(Pairs):
        def __getitem__(self, index: int) -> Sample:
            return Sample()

    batches = iter(InformedDataLoader(Samples(3), batch_size=None, collate_fn=lambda sample: sample))
    for _ in range(2):
        seen = weakref.ref(next(batches))
        assert seen() is None
    assert len(list(batches)) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_recorded_on_the_thread_if_they_are_in_the_loop(mode: Callable[[], Any]) -> None:
    class Modes(Pairs):
        def __getitem__(self, index: int) -> tuple[bool, bool]:
            return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with mode():
        first, *others = InformedDataLoader(Modes(5), batch_size=None, collate_fn=lambda sample: sample)
    assert others == [first] * 4


def test_a_forked_child_cannot_continue_an_iteration_but_may_begin_another() -> None:
    loader = InformedDataLoader(Pairs(), batch_size=None)
    batches = iter(loader)
    next(batches)
    child = multiprocessing.get_context("fork").Process(target=_go_on, args=(loader, batches))
    child.start()
    child.join(60)
    assert child.exitcode == 42
    assert len(list(batches)) == 22


def _go_on(loader: InformedDataLoader, batches: Iterator[Any]) -> None:
    try:
        next(batches)
    except StokerError:
        raise SystemExit(42 if len(list(loader)) == 23 else 1) from None


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"num_workers": 1}, "num_workers=1"), ({"depth": 0}, "depth"), ({"depth": -1}, "depth")],
)
def test_worker_processes_and_no_depth_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        InformedDataLoader(Pairs(), **settings)
