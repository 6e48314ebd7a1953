"""Each rank gets its share in the order of ``full``, whichever parts of a materialized epoch exist or disappear."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker import Order, OrderConfig, open_store
from stoker._base.threads import LoopThread
from stoker._fetch.batch_stream import Batch
from stoker._fetch.config import PipelineConfig
from stoker._fetch.materialized_pipeline import MaterializedPipeline
from stoker._format.versions import read_manifest
from stoker._order.epoch_layout import EpochLayout
from stoker.abc import Store
from stoker.errors import (
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    RangeBeyondEndError,
    StokerError,
    StoreError,
)
from stoker.testing import WatchedStore
from support.datasets import SCHEMA, pack_numbers, sample_of
from support.leftovers import flipped
from support.materialized import materialize
from support.serving_host import running_service
from support.stores import run_check

SAMPLES = 90
LANES = (1, 2, 3, 4, 7)


@pytest.fixture(scope="module")
def url() -> str:
    """A data set of which epoch 0 is materialized for several lanes, in small objects, and epoch 1 is not."""
    found = pack_numbers(SAMPLES, super_sample_bytes=900)
    for lanes in LANES:
        materialize(found, lanes=lanes, slices=lanes, object_bytes=400)
    return found


class Vanishing(WatchedStore):
    """A store that has no object of an epoch any more once it was told so, or never had: their manifests stay."""

    answer: StoreError = NotFoundError("404")

    def __init__(self, url: str) -> None:
        super().__init__(open_store(url))
        self.is_gone = False

    async def before(self, number: int, operation: str, key: str) -> None:
        if self.is_gone and key.startswith("epochs/") and "/data/" in key:
            raise self.answer


def feed_of(store: Any, thread: LoopThread, **config: Any) -> MaterializedPipeline:
    manifest = thread.run(read_manifest(store))
    given_config = {"memory_bytes": 40_000, **config}
    return MaterializedPipeline(store, manifest, PipelineConfig(by_lanes=True, **given_config), thread)


def full_order(lanes: int) -> OrderConfig:
    return OrderConfig(shuffle="full", seed=7, lanes=lanes)


@given(
    lanes=st.sampled_from(LANES),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 20),
    start=st.integers(0, SAMPLES - 1),
    drop_last=st.booleans(),
    gone_after=st.one_of(st.none(), st.integers(0, 12)),
)
@settings(max_examples=60, deadline=None)
def test_every_rank_gets_the_positions_that_are_dealt_to_it(
    url: str, lanes: int, world_size: int, batch_size: int, start: int, drop_last: bool, gone_after: int | None
) -> None:
    full = Order(np.array([SAMPLES]), full_order(lanes), epoch=0).at(0, SAMPLES)
    thread = LoopThread()
    try:
        for rank in range(world_size):
            store = Vanishing(url)
            feed = feed_of(
                store,
                thread,
                order=full_order(lanes),
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=drop_last,
                end_epoch=1,
            )
            feed.start(0, start)
            assert feed.is_materialized
            for number, (step, is_last) in enumerate(feed.partition.steps(start)):
                store.is_gone = gone_after is not None and number >= gone_after
                batch = feed.next()
                assert batch is not None
                positions = np.concatenate([part.positions(lanes) for part in step.slices])
                assert batch.sample_ids().tolist() == full[positions].tolist()
                assert batch.columns["x"].tolist() == full[positions].tolist()  # type: ignore[union-attr]
                assert (batch.end, batch.is_last, batch.repeated) == (step.end, is_last, step.repeated)
            assert feed.next() is None
            assert "Walk._run" not in thread.run(running())
    finally:
        thread.close()


async def running() -> set[str]:
    """Return the names of the coroutines that run on a thread."""
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]


class Hiding(Vanishing):
    """Answers like a bucket without the permission to list it."""

    answer = PermissionDeniedError("403")


class Cutting(Vanishing):
    """Has objects that became shorter."""

    answer = RangeBeyondEndError("416")


@pytest.mark.parametrize("kind", [Vanishing, Hiding, Cutting])
def test_batches_taken_before_objects_vanish_still_know_their_samples(url: str, kind: type[Vanishing]) -> None:
    thread = LoopThread()
    try:
        store = kind(url)
        feed = feed_of(store, thread, order=full_order(2), batch_size=9, end_epoch=2)
        batches: list[Batch] = []
        while (batch := feed.next()) is not None:
            batches.append(batch)
            store.is_gone = True
        assert not feed.is_materialized
        assert len(batches) == 2 * SAMPLES // 9
        for batch in batches:
            assert batch.sample_ids().tolist() == batch.columns["x"].tolist()  # type: ignore[union-attr]
        assert "/epochs/" in batches[0].sample_name(0)
        assert "/epochs/" not in batches[-1].sample_name(0)
    finally:
        thread.close()


def test_an_error_that_full_would_meet_too_is_not_evaded(url: str) -> None:
    class Expired(Vanishing):
        async def before(self, number: int, operation: str, key: str) -> None:
            if self.is_gone:
                raise CredentialsError("the credentials have expired")

    thread = LoopThread()
    try:
        store = Expired(url)
        feed = feed_of(store, thread, order=full_order(1), batch_size=5, memory_bytes=40_000)
        assert feed.next() is not None
        store.is_gone = True
        with pytest.raises(CredentialsError):
            list(iter(feed.next, None))
        store.is_gone = False
        assert feed.next() is not None, "it continues at the same place"
    finally:
        thread.close()


def test_a_bucket_that_hides_what_is_not_there_is_read_as_full(caplog: pytest.LogCaptureFixture) -> None:
    class HidingAll(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if key.startswith("epochs/"):
                raise PermissionDeniedError("403")

    thread = LoopThread()
    try:
        feed = feed_of(HidingAll(open_store(pack_numbers(20))), thread, order=full_order(1), batch_size=20, end_epoch=1)
        batch = feed.next()
        assert batch is not None
        assert sorted(batch.sample_ids().tolist()) == list(range(20))
        assert "403" in caplog.text
    finally:
        thread.close()


def test_what_a_function_serves_has_no_epochs_and_the_warning_gives_no_command(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    thread = LoopThread()
    with running_service({"train": url}) as hosted:
        store = open_store(hosted.dataset("train"))
        try:
            feed = feed_of(store, thread, order=full_order(1), batch_size=20, end_epoch=1)
            batch = feed.next()
            assert batch is not None
            assert "a function serves no materialized epochs; epoch 0 is read as 'full'" in caplog.text
            assert "stoker shuffle" not in caplog.text
            assert not [request for request in hosted.requests if "epochs" in request.path]
            feed.stop()
            thread.run(store.close())
        finally:
            thread.close()


@pytest.mark.parametrize(("lanes", "said"), [(1, "1 lane:"), (8, "8 lanes:")])
def test_the_warning_counts_lanes(url: str, lanes: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread()
    try:
        feed = feed_of(open_store(url), thread, order=full_order(lanes), batch_size=20)
        feed.start(5)
        assert f"for seed 7 and {said} it is read" in caplog.text
        assert f"--lanes {lanes} --epoch 5" in caplog.text
        feed.stop()
    finally:
        thread.close()


# From one epoch to the next.


@pytest.fixture(scope="module")
def three() -> str:
    """A data set of which epochs 0, 1 and 3 are materialized."""
    found = pack_numbers(SAMPLES, super_sample_bytes=900)
    for epoch in (0, 1, 3):
        materialize(found, epoch=epoch, object_bytes=400, keep=99)
    return found


def read_numbers(feed: MaterializedPipeline, epoch: int) -> list[int]:
    """Take the batches of an epoch, and return the numbers of their samples."""
    found: list[int] = []
    while (batch := feed.next()) is not None:
        assert batch.epoch == epoch
        assert batch.sample_ids().tolist() == batch.columns["x"].tolist()  # type: ignore[union-attr]
        found += batch.sample_ids().tolist()
        if batch.is_last:
            break
    return found


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def full_of(epoch: int) -> list[int]:
    return [int(number) for number in Order(np.array([SAMPLES]), full_order(1), epoch).at(0, SAMPLES)]


def read_kinds(store: WatchedStore, feed: MaterializedPipeline, epoch: int) -> list[str]:
    folder = EpochLayout(feed.manifest, seed=7, lanes=1, epoch=epoch).folder
    return [call.removeprefix(f"get {folder}").split("/")[0] for call in store.calls if folder in call]


def test_the_next_epoch_is_fetched_while_the_last_batch_of_the_one_before_is_used(three: str) -> None:
    thread = LoopThread()
    try:
        store = WatchedStore(open_store(three))
        feed = feed_of(store, thread, order=full_order(1), batch_size=10, end_epoch=2)
        assert read_numbers(feed, 0) == full_of(0)
        assert feed.position == (1, 0)
        until(feed.is_ready)
        before = replace(feed.counters)
        batch = feed.next()
        assert batch is not None
        after = feed.counters
        assert (after.misses, after.wait_seconds) == (before.misses, before.wait_seconds), "nothing is waited for"
        assert batch.sample_ids().tolist() + read_numbers(feed, 1) == full_of(1)
        assert feed.next() is None
        asked = read_kinds(store, feed, 1)
        assert (asked[0], asked.count("manifests"), asked.count("data")) == ("manifests", 1, len(asked) - 1)
        assert read_kinds(store, feed, 2) == [], "the run ends before"
    finally:
        thread.close()


def test_an_epoch_that_is_made_after_the_last_batch_before_it_is_read_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = pack_numbers(SAMPLES, super_sample_bytes=900)
    materialize(url, object_bytes=400)
    thread = LoopThread()
    try:
        feed = feed_of(open_store(url), thread, order=full_order(1), batch_size=10, end_epoch=2)
        assert read_numbers(feed, 0) == full_of(0)
        assert feed.position is None
        materialize(url, epoch=1, object_bytes=400)
        assert read_numbers(feed, 1) == full_of(1)
        assert feed.is_materialized
        assert "is read as 'full'" not in caplog.text
    finally:
        thread.close()


def test_epochs_with_and_without_objects_follow_each_other(three: str) -> None:
    thread = LoopThread()
    try:
        feed = feed_of(WatchedStore(open_store(three)), thread, order=full_order(1), batch_size=7, end_epoch=5)
        assert [read_numbers(feed, epoch) for epoch in range(5)] == [full_of(epoch) for epoch in range(5)]
    finally:
        thread.close()


@pytest.mark.parametrize("error", [CredentialsError("expired"), ValueError("not JSON"), TimeoutError()], ids=repr)
def test_a_bucket_that_fails_between_two_epochs_costs_no_batch(three: str, error: Exception) -> None:
    class Failing(WatchedStore):
        is_failing = False

        async def before(self, number: int, operation: str, key: str) -> None:
            if self.is_failing and "/manifests/" in key:
                raise error

    thread = LoopThread()
    try:
        store = Failing(open_store(three))
        feed = feed_of(store, thread, order=full_order(1), batch_size=10, end_epoch=2)
        assert feed.next() is not None
        store.is_failing = True
        assert full_of(0)[10:] == read_numbers(feed, 0)
        with pytest.raises(type(error)):
            feed.next()
        store.is_failing = False
        assert read_numbers(feed, 1) == full_of(1)
    finally:
        thread.close()


def test_a_bucket_that_is_silent_between_two_epochs_does_not_keep_the_last_batch_back(
    three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(WatchedStore):
        is_silent = False

        async def before(self, number: int, operation: str, key: str) -> None:
            if self.is_silent and "/manifests/" in key:
                await asyncio.sleep(3600)

    monkeypatch.setattr("stoker._fetch.materialized_pipeline._LOOKAHEAD_TIMEOUT_SECONDS", 0.05)
    thread = LoopThread()
    try:
        store = Silent(open_store(three))
        feed = feed_of(store, thread, order=full_order(1), batch_size=10, end_epoch=2)
        assert feed.next() is not None
        store.is_silent = True
        assert full_of(0)[10:] == read_numbers(feed, 0)
        store.is_silent = False
        assert read_numbers(feed, 1) == full_of(1)
    finally:
        thread.close()


def test_a_feed_that_was_stopped_begins_nothing_until_it_is_started(three: str) -> None:
    thread = LoopThread()
    try:
        feed = feed_of(open_store(three), thread, order=full_order(1), batch_size=10, end_epoch=2)
        assert read_numbers(feed, 0) == full_of(0)
        feed.stop()
        with pytest.raises(StokerError, match="stopped"):
            feed.next()
        feed.start(1)
        assert read_numbers(feed, 1) == full_of(1)
    finally:
        thread.close()


@pytest.mark.parametrize("harm", ["missing", "shorter", "corrupt", "empty"])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_an_epoch_whose_object_is_missing_shorter_or_corrupt_is_read_as_full_from_there_on(
    place: str, harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "ds") if place == "folder" else pack_numbers(SAMPLES, super_sample_bytes=900)
    if place == "folder":
        with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=900) as packer:
            packer.extend(sample_of(number) for number in range(SAMPLES))
    materialize(url, object_bytes=400)

    async def spoil(store: Store) -> None:
        layout = EpochLayout(await read_manifest(store, None), seed=7, lanes=1, epoch=0)
        keys = sorted([info.key async for info in store.list(f"{layout.folder}data/")])
        key = keys[len(keys) // 2]
        data, _ = await store.get(key)
        if harm == "missing":
            await store.delete(key)
        else:
            await store.put(key, {"shorter": data[:-9], "corrupt": flipped(data), "empty": b""}[harm])

    run_check(open_store(url), spoil)
    thread = LoopThread()
    try:
        feed = feed_of(open_store(url), thread, order=full_order(1), batch_size=10, end_epoch=1)
        assert read_numbers(feed, 0) == full_of(0)
        assert "the rest of epoch 0, from position" in caplog.text
        assert not feed.is_materialized
    finally:
        thread.close()
