"""Stores and tiers that the caller has made, in place of a URL."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import stoker
from stoker.abc import ObjectInfo, ObjectRef
from stoker.errors import ConfigError, NotFoundError
from stoker_torch import Loader, StreamDataset
from support.datasets import SCHEMA, numbers, sample_of

SAMPLES = 60


class FolderStore:
    """A store that a user might write: the files of a folder, read only."""

    prices = "file"

    def __init__(self, folder: Path) -> None:
        self.folder, self.url, self.closed = folder, f"mine://{folder}", 0

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            data = (self.folder / key).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"{self.url}/{key} is not there") from None
        return data, ObjectInfo(key=key, size_bytes=len(data), tag="")

    async def head(self, key: str) -> ObjectInfo:
        return (await self.get(key))[1]

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        data, info = await self.get(key)
        into[:] = data[start:end]
        return info

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        keys = (file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file())
        for key in sorted(key for key in keys if key.startswith(prefix) and key > start_after):
            yield await self.head(key)

    async def close(self) -> None:
        self.closed += 1


class DictTier:
    """A tier that a user might write: it keeps all that it is offered."""

    name = "mine"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.closed = 0

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        if ref.key not in self.held:
            return False
        into[:] = self.held[ref.key]
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        self.held[ref.key] = bytes(data)

    async def close(self) -> None:
        self.closed += 1


class Unpicklable(FolderStore):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lock = threading.Lock()


class UnpicklableTier(DictTier):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    with stoker.Packer(folder, schema=SCHEMA, super_sample_bytes=4096) as packer:
        packer.extend(map(sample_of, range(SAMPLES)))
    return folder


def test_a_loader_reads_from_a_store_of_the_user(folder: Path) -> None:
    store = FolderStore(folder)
    with Loader(store, batch_size=8, memory="1MB") as mine, Loader(folder, batch_size=8, memory="1MB") as other:
        assert mine.url == store.url
        assert store.url in repr(mine)
        assert numbers(mine) == numbers(other)
        assert mine.stats().dollars == 0
    assert store.closed == 1


def test_one_store_serves_several_loaders_and_the_same_one_again(folder: Path) -> None:
    store = FolderStore(folder)
    with Loader(store, batch_size=8, seed=1) as one, Loader(store, batch_size=8, seed=1) as two:
        first = numbers(one)
        one.close()
        assert numbers(two) == first
        assert sorted(numbers(one)) == list(range(SAMPLES))


def test_a_store_that_stoker_opens_is_one_too(folder: Path) -> None:
    with Loader(stoker.open_store(folder), batch_size=8) as loader:
        assert sorted(numbers(loader)) == list(range(SAMPLES))


def test_samples_are_read_by_number_from_a_store_of_the_user(folder: Path) -> None:
    with stoker.open(FolderStore(folder)) as dataset:
        assert [sample["x"] for sample in dataset.samples([5, 3])] == [5, 3]
        with pickle.loads(pickle.dumps(dataset)) as again:  # noqa: S301 - its own
            assert again[7]["x"] == 7
    problem = r"^a store is pickled for other processes, and .* cannot be pickled"
    with stoker.open(Unpicklable(folder)) as dataset, pytest.raises(ConfigError, match=problem):
        pickle.dumps(dataset)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # newer Pythons' of every fork
@pytest.mark.parametrize("store", [FolderStore, Unpicklable])
def test_worker_processes_read_from_a_store_of_the_user(folder: Path, store: type[FolderStore]) -> None:
    dataset = StreamDataset(store(folder), memory="1MB", columns=["x"], tier=DictTier())
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert sorted(numbers(loader)) == list(range(SAMPLES))


@pytest.mark.parametrize("settings", [{"place": Unpicklable}, {"tier": UnpicklableTier()}])
def test_what_cannot_go_to_a_spawned_process_is_refused_where_it_would_have_to(folder: Path, settings: Any) -> None:
    place = settings.pop("place", FolderStore)(folder)
    dataset = StreamDataset(place, **settings)
    with pytest.raises(ConfigError, match=r"^a (store|tier) is pickled for .*cannot pickle.*use fork"):
        pickle.dumps(dataset)
    with pytest.raises(ConfigError, match="is pickled for other processes"):
        next(iter(DataLoader(dataset, num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))))
    copied = pickle.loads(pickle.dumps(StreamDataset(FolderStore(folder), tier=DictTier())))  # noqa: S301 - its own
    assert sorted(int(sample["x"]) for sample in copied) == list(range(SAMPLES))
    copied.close()


@pytest.mark.parametrize("name", ["tier", "warm"])
def test_a_tier_of_the_user_is_filled_and_read_and_left_open(folder: Path, name: str) -> None:
    tier = DictTier()
    given: Any = {name: tier}
    with Loader(folder, batch_size=8, memory="1MB", **given) as filling:
        first = numbers(filling)
    assert len(tier.held) == len(filling.manifest)
    with Loader(folder, batch_size=8, memory="1MB", **given) as reading:
        assert numbers(reading) == first
        assert reading.stats().tier_hits["mine"] >= len(reading.manifest)
    assert tier.closed == 0
    asyncio.run(tier.close())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tier": []}, r"^tier must be a URL or a sequence of server URLs, not \[\]"),
        ({"tier": ["https://10.0.0.9:7412", 7]}, r"^tier must be a URL or a sequence of server URLs, not "),
        ({"tier": 7}, r"^tier 7 is neither a URL, such as 'warm://10\.0\.0\.5:7411', nor a stoker.abc.Tier: it lacks "),
        ({"tier": "nowhere"}, r"^a tier must be a URL such as warm://"),
        ({"tier": "none://x"}, r"none"),
        ({"tier": DictTier(), "warm": "warm://10.0.0.5:7411"}, r"^tier= and warm= name the same setting"),
        ({"tier": DictTier}, r"^tier must be an instance of DictTier, not the class itself"),
        ({"url": FolderStore}, r"^the store must be an instance of FolderStore, not the class itself"),
        ({"url": 7}, r"^7 is neither a path or URL, nor a stoker.abc.Store: it lacks url, get"),
        ({"options": stoker.S3Options()}, r"^options= is for a URL, but mine://"),
    ],
)
def test_what_is_neither_url_nor_store_or_tier_is_refused(folder: Path, settings: dict[str, Any], said: str) -> None:
    for kind in (Loader, StreamDataset):
        with pytest.raises(ConfigError, match=said):
            kind(**{"url": FolderStore(folder), "batch_size": 8, **settings})


def test_a_store_without_prices_is_refused_with_the_line_that_names_them(folder: Path) -> None:
    class Nameless(FolderStore):
        prices = ""

    with pytest.raises(ConfigError, match=r"no prices for mine:// stores.*prices = 's3', or 'file' for none"):
        Loader(Nameless(folder), batch_size=8)
