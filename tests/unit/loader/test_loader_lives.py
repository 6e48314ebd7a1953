"""Closing a loader ends all of its work, whatever is in progress; nothing of it starts again."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from stoker._fetch.pipeline import BatchPipeline
from stoker.errors import StokerError
from stoker_torch import Loader
from support.loader_lives import live, pack_wide

LIVES = 8
"""``make soak`` lives more of them."""


@pytest.fixture(scope="module")
def url() -> str:
    return pack_wide("memory://loader-lives/ds")


@pytest.mark.parametrize("seeds", [range(start, start + 4) for start in range(0, LIVES, 4)], ids=str)
def test_random_breaks_deletes_and_closes_leave_nothing_and_hang_nowhere(url: str, seeds: range) -> None:
    for seed in seeds:
        live(url, seed)


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stoker-loader"]


@pytest.mark.parametrize("way", ["close", "delete", "iterate"])
def test_gathering_for_an_abandoned_iteration_ends_with_the_close(
    url: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that gathers ahead is about to ask the feed when the loader is closed, deleted or iterated anew."""
    wrapped, begun, may_go_on = BatchPipeline.next, threading.Event(), threading.Event()
    most_loops = 0

    def slow(self: BatchPipeline) -> Any:
        nonlocal most_loops
        if threading.current_thread().name.startswith("stoker-gather") and not begun.is_set():
            begun.set()
            assert may_go_on.wait(30)
            time.sleep(0.02)
        most_loops = max(most_loops, len(loops()))
        return wrapped(self)

    monkeypatch.setattr(BatchPipeline, "next", slow)
    loader: Loader | None = Loader(url, batch_size=20, memory="4MB")
    assert loader is not None
    for _ in loader:
        assert begun.wait(30)
        break
    threading.Timer(0.05, may_go_on.set).start()
    if way == "iterate":
        assert len(list(loader)) == 10
        assert loader.state_dict() | {"sources": []} == {"format": 1, "epoch": 2, "position": 0, "sources": []}
    if way != "delete":
        loader.close()
    del loader
    assert (most_loops, loops()) == (1, [])


@pytest.mark.parametrize("way", ["close", "iterate"])
@pytest.mark.parametrize("settings", [{}, {"transform": lambda sample: sample}], ids=["plain", "pool"])
def test_a_loop_that_waits_for_the_bucket_is_ended_by_another_thread_at_once(
    url: str, way: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[StokerError] = []
    is_waiting = threading.Event()

    async def silent(*arguments: Any, **others: Any) -> None:
        is_waiting.set()
        await asyncio.sleep(3600)

    def loop(loader: Loader) -> None:
        try:
            next(iter(loader))
        except StokerError as error:
            errors.append(error)

    with Loader(url, batch_size=20, memory="4MB", **settings) as loader, monkeypatch.context() as patch:
        patch.setattr("stoker._fetch.fetcher.Fetcher.fetch_whole", silent)
        waiting = threading.Thread(target=loop, args=(loader,))
        waiting.start()
        assert is_waiting.wait(30)
        time.sleep(0.02)
        begun = time.monotonic()
        if way == "close":
            loader.close()
        else:
            patch.undo()
            assert len(list(loader)) == 10
        waiting.join(30)
        assert time.monotonic() - begun < 10
    assert len(errors) == 1
    assert loops() == []


def test_threads_that_share_an_iteration_lose_no_sample_and_get_none_twice(url: str) -> None:
    def take(batches: Any) -> None:
        seen.extend(batch["x"][:, 0].tolist() for batch in batches)

    each: list[dict[str, Any]] = [{}, {"transform": lambda sample: {"x": sample["x"][:1]}}]
    for settings in each:
        seen: list[list[int]] = []
        with Loader(url, batch_size=5, memory="4MB", workers=4, **settings) as loader:
            batches = iter(loader)
            threads = [threading.Thread(target=take, args=(batches,)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert loader.state_dict()["epoch"] == 1
        assert sorted(number for batch in seen for number in batch) == list(range(200))
