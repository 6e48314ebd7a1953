"""A loader begins, ends, is abandoned and begins again, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from stoker.errors import NotFoundError
from stoker_torch import Loader
from support.datasets import numbers, pack_numbers


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


@pytest.fixture
def threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_break_abandons_the_epoch_and_the_next_loop_is_the_next_epoch(url: str) -> None:
    with Loader(url, batch_size=50) as whole:
        epochs = [numbers(whole) for _ in range(3)]
    with Loader(url, batch_size=50) as loader:
        for batch in loader:
            assert batch["x"].tolist() == epochs[0][:50]
            break
        assert loader.state_dict()["position"] == 50
        assert numbers(loader) == epochs[1]
        assert numbers(loader) == epochs[2]


def test_a_new_iteration_ends_an_older_one(url: str) -> None:
    with Loader(url, batch_size=50) as loader:
        old = iter(loader)
        next(old)
        next(iter(loader))
        with pytest.raises(StopIteration):
            next(old)


def test_two_loops_over_one_loader_do_not_share_a_place(url: str) -> None:
    with Loader(url, batch_size=50) as one, Loader(url, batch_size=50) as two:
        for left, right in zip(one, two, strict=True):
            assert left["x"].tolist() == right["x"].tolist()


def test_a_missing_data_set_is_reported_and_leaves_no_thread(threads: None) -> None:
    with pytest.raises(NotFoundError, match="memory://nothing/here"):
        Loader("memory://nothing/here", batch_size=1)


def test_leaving_early_leaves_no_thread(url: str, threads: None) -> None:
    with Loader(url, batch_size=8, decode={"text": len}) as loader:
        for _ in loader:
            break


@pytest.mark.parametrize("settings", [{}, {"decode": {"text": len}}], ids=["plain", "pool"])
def test_a_forgotten_loader_leaves_no_thread(url: str, threads: None, settings: Any) -> None:
    loader = Loader(url, batch_size=8, **settings)
    next(iter(loader))
    del loader
    gc.collect()


def test_a_loader_that_is_collected_on_its_own_thread_leaves_no_thread(url: str, threads: None) -> None:
    loader = Loader(url, batch_size=8)
    next(iter(loader))

    async def collect() -> None:
        loader._resources.close()

    loader._resources.thread.run(collect())


def test_a_closed_loader_iterates_again(url: str) -> None:
    loader = Loader(url, batch_size=50)
    first = numbers(loader)
    loader.close()
    loader.close()
    loader.set_epoch(0)
    assert numbers(loader) == first
    loader.close()


def test_it_works_inside_a_running_event_loop(url: str) -> None:
    async def notebook() -> list[int]:
        with Loader(url, batch_size=50) as loader:
            return numbers(loader)

    assert sorted(asyncio.run(notebook())) == list(range(500))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_continues_by_itself(url: str) -> None:
    with Loader(url, batch_size=50, decode={"text": len}) as loader:
        batches = iter(loader)
        next(batches)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                with os.fdopen(writer, "w") as out:
                    json.dump([batch["x"].tolist() for batch in iter(loader)], out)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            theirs = json.load(answer)
        os.waitpid(child, 0)
        mine = [batch["x"].tolist() for batch in batches]
        assert len(mine) == 9
        assert sorted(chain.from_iterable(theirs)) == list(range(500))
