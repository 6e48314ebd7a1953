"""One value is prepared ahead of a busy consumer, and none ahead of an idle one; in order, in any thread."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

import stoker
from stoker_torch import Loader
from stoker_torch._readahead import Readahead
from stoker_torch._user_functions import ThreadPool

BUSY_SECONDS = 0.02


@pytest.fixture
def threads() -> Iterator[ThreadPool]:
    threads = ThreadPool(1, "test-ahead")
    yield threads
    assert threads.close()


class Maker:
    """Makes 0, 1, 2 …, and notes on which thread."""

    def __init__(self, fails_at: int = -1, ends_at: int = 1000) -> None:
        self.made: list[str] = []
        self.fails_at, self.ends_at = fails_at, ends_at
        self.done = threading.Condition()

    def __call__(self) -> tuple[int] | None:
        with self.done:
            number = len(self.made)
            self.made.append("asker" if threading.current_thread() is threading.main_thread() else "other")
            self.done.notify_all()
        if number == self.fails_at:
            raise ValueError(f"value {number}")
        return (number,) if number < self.ends_at else None

    def wait_for(self, count: int) -> None:
        with self.done:
            assert self.done.wait_for(lambda: len(self.made) >= count, timeout=30)


def busy_loop(ahead: Readahead[tuple[int]], maker: Maker, steps: int) -> list[int]:
    """Take values with time between them; each is made while the loop is busy with the one before."""
    found = []
    for step in range(steps):
        value = ahead.next()
        assert value is not None
        found.append(value[0])
        time.sleep(BUSY_SECONDS)
        maker.wait_for(min(step + 2, steps))
    return found


def test_a_busy_loop_finds_its_values_made(threads: ThreadPool) -> None:
    maker = Maker()
    ahead = Readahead(maker, 10, lambda: True, threads)
    assert busy_loop(ahead, maker, 10) == list(range(10))
    assert maker.made == ["asker"] + ["other"] * 9
    assert ahead.next() is None


def test_a_loop_that_asks_at_once_makes_its_values_itself(threads: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_torch._readahead._MIN_BUSY_SECONDS", 1.0)
    maker = Maker()
    ahead = Readahead(maker, 100, lambda: True, threads)
    assert [ahead.next() for _ in range(100)] == [(number,) for number in range(100)]
    assert set(maker.made) == {"asker"}


def test_nothing_is_made_ahead_that_would_have_to_wait(threads: ThreadPool) -> None:
    maker = Maker()
    ahead = Readahead(maker, 10, lambda: False, threads)
    for number in range(4):
        ahead.prepare()
        assert len(maker.made) == number
        assert ahead.next() == (number,)


def test_what_becomes_ready_while_the_loop_is_busy_is_made_ahead(threads: ThreadPool) -> None:
    maker, is_ready = Maker(), threading.Event()
    ahead = Readahead(maker, 10, is_ready.is_set, threads)
    for number in range(4):
        is_ready.clear()
        assert ahead.next() == (number,)
        time.sleep(BUSY_SECONDS)
        assert len(maker.made) == number + 1
        is_ready.set()
        maker.wait_for(number + 2)
    assert maker.made == ["asker"] + ["other"] * 4


def test_a_check_for_a_value_ends_when_the_loop_asks_for_it(threads: ThreadPool) -> None:
    ahead = Readahead(Maker(), 3, lambda: False, threads)
    assert ahead.next() == (0,)
    assert ahead.is_due(1) is False
    assert ahead.next() == (1,)
    assert ahead.is_due(1) is None
    assert ahead.is_due(2) is False
    assert ahead.next() == (2,)
    assert ahead.is_due(3) is None


def test_an_error_comes_where_its_value_would_have(threads: ThreadPool) -> None:
    maker = Maker(fails_at=2)
    ahead = Readahead(maker, 10, lambda: True, threads)
    assert ahead.next() == (0,)
    ahead.prepare()
    assert ahead.next() == (1,)
    ahead.prepare()
    with pytest.raises(ValueError, match="value 2"):
        ahead.next()


def test_a_consumer_makes_its_values_itself_once_the_threads_are_closed(threads: ThreadPool) -> None:
    maker = Maker()
    ahead = Readahead(maker, 10, lambda: True, threads)
    assert busy_loop(ahead, maker, 3) == [0, 1, 2]
    threads.close()
    found = []
    for _ in range(7):
        found.append(ahead.next())
        time.sleep(BUSY_SECONDS)
    assert found == [(number,) for number in range(3, 10)]


def test_where_values_end_early_nothing_more_is_requested(threads: ThreadPool) -> None:
    maker = Maker(ends_at=1)
    ahead = Readahead(maker, 10, lambda: True, threads)
    assert ahead.next() == (0,)
    ahead.prepare()
    assert ahead.next() is None
    assert ahead.next() is None
    assert len(maker.made) == 2


def test_a_fork_waits_for_the_value_that_is_being_made(threads: ThreadPool) -> None:
    lock, begun = threading.Lock(), threading.Event()

    def make() -> int:
        with lock:
            begun.set()
            time.sleep(0.1)
        return 1

    ahead = Readahead(make, 10, lambda: True, threads)
    preparing = threading.Thread(target=ahead.prepare)
    preparing.start()
    assert begun.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    preparing.join()


def test_closing_waits_for_what_is_being_made_and_makes_nothing_more(threads: ThreadPool) -> None:
    begun, may_end = threading.Event(), threading.Event()
    made = []

    def slow() -> int:
        begun.set()
        assert may_end.wait(30)
        made.append(1)
        return 1

    ahead = Readahead(slow, 10, lambda: True, threads)
    preparing = threading.Thread(target=ahead.prepare)
    preparing.start()
    assert begun.wait(30)
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    assert made == [1]
    preparing.join()
    ahead.prepare()
    assert ahead.next() is None
    assert made == [1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ahead") / "train"
    schema = {"x": stoker.Array("int64", (4,)), "name": stoker.Text()}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=2000) as packer:
        for number in range(500):
            packer.write({"x": [number] * 4, "name": f"sample {number}"})
    return str(folder)


def test_a_busy_training_loop_gets_the_batches_of_one_that_is_not(url: str) -> None:
    def batches(seconds: float) -> list[tuple[list[int], list[str]]]:
        found = []
        with Loader(url, batch_size=32, seed=3, epochs=2) as loader:
            for _ in range(2):
                for batch in loader:
                    found.append((batch["x"][:, 0].tolist(), list(batch["name"])))
                    time.sleep(seconds)
        return found

    assert batches(0.005) == batches(0.0)


def test_the_state_is_that_of_the_batch_yielded_last_whatever_was_gathered_ahead(url: str) -> None:
    with Loader(url, batch_size=32, seed=3) as loader:
        iterator = iter(loader)
        seen = []
        for _ in range(5):
            seen += next(iterator)["x"][:, 0].tolist()
            time.sleep(BUSY_SECONDS)  # the next batch has been gathered by now
        state = loader.state_dict()
        assert state["position"] == 160
    with Loader(url, batch_size=50, seed=3) as other:
        other.load_state_dict(state)
        seen += torch.cat([batch["x"][:, 0] for batch in other]).tolist()
    assert sorted(seen) == list(range(500))


def test_leaving_a_busy_loop_early_leaves_no_thread_behind_the_loader(url: str) -> None:
    before = set(threading.enumerate())
    with Loader(url, batch_size=32) as loader:
        for number, _ in enumerate(loader):
            time.sleep(BUSY_SECONDS)
            if number == 3:
                break
    assert set(threading.enumerate()) <= before


def test_an_iteration_that_is_dropped_is_freed_at_once(url: str) -> None:
    loader = Loader(url, batch_size=32)
    iterator = iter(loader)
    next(iterator)
    before = set(threading.enumerate())
    assert any(thread.name == "stoker-loader" for thread in before)
    del iterator, loader
    assert not any(thread.name == "stoker-loader" for thread in threading.enumerate())
