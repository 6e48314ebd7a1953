"""Loaders and stream datasets with caches: delivered samples, and number of bucket requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker import Array, Bytes, Continuous, FetchConfig, FetchSize, Packer
from stoker.errors import ConfigError, MemoryBudgetError
from stoker_torch import Loader, StreamDataset
from support.datasets import numbers, pack_numbers
from support.materialized import materialize

SUPER_SAMPLE_BYTES = 2000
BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(1500, super_sample_bytes=SUPER_SAMPLE_BYTES)


def settings(**changed: Any) -> dict[str, Any]:
    """Settings of a small loader, without hedges: on a slow disk they would read the bucket, too."""
    return {"batch_size": 48, "seed": 5, "window": 4, "memory": "200KB", "fetch": FetchConfig(hedge=False)} | changed


def delivered(url: str, epochs: int, **changed: Any) -> tuple[list[list[int]], Any]:
    with Loader(url, **settings(epochs=epochs, **changed)) as loader:
        found = [numbers(loader) for _ in range(epochs)]
        return found, loader.stats()


def caches(folder: Path) -> list[Any]:
    memory, disk = "memory:?limit=60KB", f"disk:{folder / 'a'}?limit=100KB"
    return [memory, disk, [memory, f"disk:{folder / 'b'}?limit=100KB"], f"disk:{folder / 'c'}?limit=10GB&policy=lru"]


@pytest.mark.parametrize("shuffle", ["window", "block", "full", "none"])
def test_what_is_delivered_does_not_depend_on_caches(url: str, tmp_path: Path, shuffle: str) -> None:
    changed = {"shuffle": shuffle, "memory": "2MB" if shuffle == "full" else "200KB"}
    wanted, _ = delivered(url, 2, **changed)
    for cache in caches(tmp_path):
        found, stats = delivered(url, 2, cache=cache, **changed)
        assert found == wanted
        assert sum(each.hits for each in stats.caches.values()) > 0


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one at a time", "ahead"])
@pytest.mark.parametrize("shuffle", ["window", "block"])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_one_node_hits_as_often_as_any_policy_can(url: str, shuffle: str, share: float, is_ahead: bool) -> None:
    given = settings(shuffle=shuffle, memory="60KB", schedule=Continuous() if is_ahead else FetchSize(1, 0))
    with Loader(url, **given) as loader:
        objects, slots = len(loader.manifest), loader.plan.slots
        slot_bytes = -(-loader.manifest.largest_bytes // 64) * 64
    held, epochs = round(share * objects), 5
    _, stats = delivered(url, epochs, **given, cache=f"memory:?limit={held * slot_bytes}")
    found = stats.caches["memory"]
    assert (found.objects, found.lookups) == (held, epochs * objects)
    # Each object is needed once per epoch: hits are at most the cached objects, and those in flight at the border.
    most = held + (slots if is_ahead else 2)
    assert (epochs - 1) * held <= found.hits <= (epochs - 1) * most
    assert stats.get_requests == found.lookups - found.hits + 1  # and the manifest


def test_a_disk_that_holds_everything_leaves_the_bucket_alone_after_the_first_epoch(url: str, tmp_path: Path) -> None:
    cache = f"disk:{tmp_path}?limit=1GB"
    with Loader(url, **settings(cache=cache)) as loader:
        numbers(loader)
        objects = len(loader.manifest)
        for _ in range(3):
            numbers(loader)
        (found,) = loader.stats().caches.values()
        assert loader.stats().get_requests <= objects + 3  # the manifest, and what was under way at the first border
        assert (found.added, found.declined, found.objects) == (objects, 0, objects)


def test_the_next_run_begins_with_what_the_last_one_left(url: str, tmp_path: Path) -> None:
    cache = f"disk:{tmp_path}?limit=1GB"
    delivered(url, 1, cache=cache)
    first, stats = delivered(url, 1, cache=cache, seed=6)
    (found,) = stats.caches.values()
    assert (found.hits, found.lookups, stats.get_requests) == (found.lookups, found.lookups, 1)
    assert first == delivered(url, 1, seed=6)[0]


RANKS = 3
NODES = {"next-use": 0.416, "no-evict": 0.167, "fifo": 0.048}
"""Hit rates of three nodes that partition each epoch anew, with caches of half a partition (NoPFS, SC'21)."""


def hit_rate(url: str, policy: str, *, share: float, epochs: int, warm_up: int) -> float:
    """Return how much of what ranks need, once caches are warm, these have."""
    hits = lookups = 0
    for rank in range(RANKS):
        given = settings(rank=rank, world_size=RANKS, epochs=epochs, window=2, memory="60KB")
        with Loader(url, **given) as loader:
            slot_bytes = -(-loader.manifest.largest_bytes // 64) * 64
            held = round(share * len(loader.manifest) / RANKS)
        with Loader(url, **given, cache=f"memory:?limit={held * slot_bytes}&policy={policy}") as loader:
            before = None
            for epoch in range(epochs):
                numbers(loader)
                if epoch == warm_up - 1:
                    before = loader.stats().caches["memory"]
            after = loader.stats().caches["memory"]
            assert before is not None
            hits += after.hits - before.hits
            lookups += after.lookups - before.lookups
    return hits / lookups


def test_three_ranks_that_deal_anew_hit_as_often_as_the_order_allows(url: str) -> None:
    found = {policy: hit_rate(url, policy, share=0.5, epochs=12, warm_up=5) for policy in NODES}
    assert found == {policy: pytest.approx(rate, abs=0.06) for policy, rate in NODES.items()}
    assert found["next-use"] > 2 * found["no-evict"] > 2 * found["fifo"]


def test_a_run_continues_in_the_middle_of_an_epoch_with_a_cache_as_without(url: str, tmp_path: Path) -> None:
    whole, _ = delivered(url, 3)
    for cache in [None, *caches(tmp_path)]:
        with Loader(url, **settings(cache=cache)) as loader:
            numbers(loader)
            iteration = iter(loader)
            before = numbers(next(iteration) for _ in range(20))
            state = loader.state_dict()
        with Loader(url, **settings(cache=cache)) as loader:
            loader.load_state_dict(state)
            rest = numbers(loader)
            later = numbers(loader)
        assert (before + rest, later) == (whole[1], whole[2])


def test_leaving_an_epoch_early_keeps_the_caches(url: str) -> None:
    with Loader(url, **settings(cache="memory:?limit=10MB")) as loader:
        numbers(loader)
        for _ in range(3):
            next(iter(loader))
        requests = loader.stats().get_requests
        numbers(loader)
        assert loader.stats().get_requests == requests
        assert loader.stats().caches["memory"].objects == len(loader.manifest)


def test_hits_in_a_farther_cache_fill_the_nearer_one(url: str, tmp_path: Path) -> None:
    disk = f"disk:{tmp_path}?limit=1GB"
    delivered(url, 1, cache=disk)
    _, stats = delivered(url, 2, cache=["memory:?limit=10MB", disk])
    near, far = stats.caches["memory"], stats.caches[f"disk:{tmp_path}"]
    assert stats.get_requests == 1
    assert near.hits + far.hits == near.lookups
    assert near.hits >= near.lookups // 4  # of a half: what was under way came from disk twice


def test_reading_some_columns_uses_what_is_kept_and_adds_nothing(tmp_path: Path) -> None:
    url = "memory://caches-columns/ds"
    with Packer(url, schema={"x": Array("int64"), "sound": Bytes()}, super_sample_bytes=20_000) as packer:
        packer.extend({"x": number, "sound": bytes(900)} for number in range(400))
    cache = f"disk:{tmp_path}?limit=10MB"
    wanted, _ = delivered(url, 2, columns=["x"], memory="2MB")
    for whole_before in (False, True):
        if whole_before:
            delivered(url, 1, cache=cache, memory="2MB")
        found, stats = delivered(url, 2, columns=["x"], cache=cache, memory="2MB")
        (kept,) = stats.caches.values()
        assert found == wanted
        assert (kept.added, kept.hits) == (0, kept.lookups if whole_before else 0)


def test_full_beyond_memory_goes_past_the_caches() -> None:
    url = pack_numbers(1500, super_sample_bytes=50_000)
    wanted, _ = delivered(url, 2, shuffle="full", memory="2MB")
    found, stats = delivered(url, 2, shuffle="full", memory="180KB", cache="memory:?limit=10MB")
    assert found == wanted
    assert stats.caches == {}


@pytest.mark.parametrize(
    ("cache", "error", "says"),
    [
        ("20GB", ConfigError, "not a cache"),
        (["memory:?limit=1GB", "memory:?limit=1GB"], ConfigError, "use the same memory or folder"),
        ("memory:?limit=1KB", MemoryBudgetError, "is smaller than the largest super-sample"),
        ("disk:/nowhere?limit=1KB", MemoryBudgetError, "is smaller than the largest super-sample"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_when_the_loader_is_made(
    url: str, cache: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Loader(url, **settings(cache=cache))


def test_a_machines_limit_is_divided_by_its_ranks(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    shared: Sequence[str] = ["memory:?limit=node:400KB", f"disk:{tmp_path}?limit=800KB"]
    _, stats = delivered(url, 1, cache=shared, rank=2, world_size=4)
    assert 90_000 < stats.caches["memory"].limit_bytes <= 100_000
    assert stats.caches[f"disk:{tmp_path}"].limit_bytes == 200_000
    assert [each.name for each in next(tmp_path.iterdir()).iterdir()] == ["2"]
    _, stats = delivered(url, 1, cache="memory:?limit=400KB", rank=2, world_size=4)
    assert 390_000 < stats.caches["memory"].limit_bytes <= 400_000


def test_ranks_of_one_machine_share_a_disk_and_keep_for_each_other(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with Loader(url, **settings()) as loader:
        objects = len(loader.manifest)
    cache = f"disk:{tmp_path}?limit={objects // 2 * BLOCK_BYTES}"
    loaders = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        loaders.append(Loader(url, **settings(cache=cache, rank=rank, world_size=2, epochs=7)))
    seen = []
    for _ in range(7):
        pairs = zip(*loaders, strict=True)
        seen.append([number for pair in pairs for number in numbers(pair)])
    stats = [next(iter(loader.stats().caches.values())) for loader in loaders]
    for loader in loaders:
        loader.close()
    assert all(sorted(epoch) == list(range(1500)) for epoch in seen)
    rate = sum(each.hits for each in stats) / (6 * objects)
    assert rate > 0.42, rate  # together they hold half of what they read; each for itself would hit a third of that


def in_time(loader: Loader) -> int:
    """Return a loader's GETs but for those where the disk was late, as it may be on a busy machine."""
    stats = loader.stats()
    return stats.get_requests - sum(stats.tier_late.values())


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)])
def test_two_jobs_that_share_a_data_set_and_a_disk_of_its_size_both_hit(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    """Each has the settings of ``stoker allocate``: the whole limit, in any order of starts.

    What is read is written aside, and two ranks may write the same object, so a few may be missing. With a part for
    each job, each would hit about half of the time.
    """
    with Loader(url, **settings()) as loader:
        objects = len(loader.manifest)
    cache = f"disk:{tmp_path}?limit={objects * BLOCK_BYTES * 2}"
    loaders = []
    for job, world_size in enumerate(ranks):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size))
        for rank in range(world_size):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            given = settings(cache=cache, rank=rank, world_size=world_size, epochs=5, seed=job)
            loaders.append(Loader(url, **given))
    try:
        for epoch in range(5):
            before = [in_time(loader) for loader in loaders]
            for loader in loaders:
                assert len(numbers(loader)) in (1500, 750)
            if epoch >= 3:
                missed = [in_time(loader) - earlier for loader, earlier in zip(loaders, before, strict=True)]
                assert max(missed) <= objects / 8, missed
    finally:
        for loader in loaders:
            loader.close()
    held = sum(each.stat().st_blocks * 512 for each in tmp_path.rglob("*") if each.is_file())
    assert held <= objects * BLOCK_BYTES * 2


def test_a_stream_dataset_in_this_process_keeps_from_epoch_to_epoch(url: str, tmp_path: Path) -> None:
    def epochs(cache: str | None) -> list[list[int]]:
        data = StreamDataset(url, batch_size=16, seed=5, window=2, cache=cache, lanes=2)
        try:
            return [numbers(data) for _ in range(3)]
        finally:
            data.close()

    assert epochs(f"disk:{tmp_path}?limit=10MB") == epochs(None)
    assert len([each for each in tmp_path.rglob("*") if each.is_file()]) > 50


def test_an_epoch_that_has_objects_of_its_own_goes_past_the_caches() -> None:
    url = pack_numbers(300, super_sample_bytes=SUPER_SAMPLE_BYTES)
    materialize(url, lanes=1, slices=1, epoch=0, object_bytes=SUPER_SAMPLE_BYTES)
    given = {"shuffle": "materialized", "memory": "1MB", "seed": 7}
    wanted, _ = delivered(url, 3, **given)
    with Loader(url, **settings(**given, epochs=3, cache="memory:?limit=1MB")) as loader:
        assert numbers(loader) == wanted[0]
        assert loader.stats().caches == {}
        assert [numbers(loader), numbers(loader)] == wanted[1:]  # as full: the second of these comes from memory
        found = loader.stats().caches["memory"]
        assert found.lookups == 2 * found.hits == 2 * len(loader.manifest)
