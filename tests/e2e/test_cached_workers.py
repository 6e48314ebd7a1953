"""The cached data set with worker processes, forked and spawned, and what a training leaves, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from stoker_torch import CachedDataset, DiskCache, PrefetchSampler
from support.executors import Immediate
from support.forked_programs import ForkedPrograms, RunningProgram, forked_programs
from support.same import same

_TIMEOUT_SECONDS = 300  # of a hang


class Images:
    """A data set that fails at given samples in all processes but the one that created it."""

    def __init__(self, count: int = 40, *, only_here: bool = False) -> None:
        self.count = count
        self.owner = os.getpid() if only_here else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.owner not in (None, os.getpid()):
            raise OSError(f"sample {index} is read by a worker")
        return {"x": torch.full((3, 5), index, dtype=torch.uint8), "label": index, "name": f"image {index}"}

    def __len__(self) -> int:
        return self.count


def loader(dataset: CachedDataset, sampler: Any, start: str = "fork", **settings: Any) -> DataLoader[Any]:
    settings = {"num_workers": 2, "multiprocessing_context": start, "timeout": 60, **settings}
    return DataLoader(dataset, batch_size=4, sampler=sampler, **settings)


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_get_from_disk_what_the_main_process_fetches_before_and_while_they_live(
    tmp_path: Path, start: str, workers: int
) -> None:
    with DiskCache(tmp_path, 40) as cache:
        dataset = CachedDataset(Images(only_here=True), cache, executor=Immediate())
        sampler = PrefetchSampler(RandomSampler(range(40)), dataset, fetch_size=8, threshold=32)
        batches = loader(dataset, sampler, start, num_workers=workers, persistent_workers=True)
        for _ in range(2):
            found = [label for batch in batches for label in batch["label"].tolist()]
            assert sorted(found) == list(range(40))
        statistics = dataset.stats()
        assert (statistics.lookups, statistics.misses, statistics.fetched) == (80, 0, 40)
        assert statistics.wait_seconds > 0
        del batches  # ends its workers
    assert not list(tmp_path.iterdir())


def test_batches_are_the_plain_ones_while_threads_fetch_and_workers_are_forked_beside_them(tmp_path: Path) -> None:
    def seeded() -> RandomSampler:
        return RandomSampler(range(40), generator=torch.Generator().manual_seed(5))

    plain: DataLoader[Any] = DataLoader(Images(), batch_size=4, sampler=seeded())  # type: ignore[arg-type]  # by methods
    with DiskCache(tmp_path, 24) as cache, CachedDataset(Images(), cache, threads=4) as dataset:
        sampler = PrefetchSampler.half_and_half(seeded(), dataset, epochs=5)
        cached = loader(dataset, sampler)
        for _ in range(5):
            for one, other in zip(plain, cached, strict=True):
                assert same(one, other)
        assert dataset.stats().lookups == 200


def test_a_damaged_file_is_read_again_from_the_data_set_and_counted(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 40) as cache:
        dataset = CachedDataset(Images(), cache, executor=Immediate())
        sampler = PrefetchSampler(range(40), dataset, fetch_size=40, epochs=1)
        dataset.service.fetch(range(40))
        for index in (3, 30):
            file = next(tmp_path.glob(f"*/{index}"))
            os.truncate(file, file.stat().st_size - 8)
        found = [label for batch in loader(dataset, sampler) for label in batch["label"].tolist()]
        assert found == list(range(40))
        assert (dataset.stats().misses, dataset.stats().damaged) == (2, 2)


def test_the_error_of_an_unreadable_sample_comes_from_the_worker(tmp_path: Path) -> None:
    class Failing(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 9:
                raise OSError("no sample 9")
            return super().__getitem__(index)

    with DiskCache(tmp_path, 40) as cache, CachedDataset(Failing(), cache, threads=2) as dataset:
        sampler = PrefetchSampler(range(40), dataset, fetch_size=20, epochs=1)
        batches = iter(loader(dataset, sampler, num_workers=1))  # torch takes 5 s to end each, after an error
        assert [next(batches)["label"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(OSError, match="no sample 9"):
            next(batches)
        del batches
        gc.collect()  # torch's iterator and the error keep each other: its workers would outlive the test


def test_two_ranks_that_share_a_folder_deliver_every_sample_once(tmp_path: Path) -> None:
    found: list[int] = []
    with DiskCache(tmp_path, 10) as first, DiskCache(tmp_path, 10) as second:
        for rank, cache in enumerate((first, second)):
            dataset = CachedDataset(Images(), cache, executor=Immediate())
            order: DistributedSampler[int] = DistributedSampler(range(40), num_replicas=2, rank=rank)  # type: ignore[arg-type]
            sampler = PrefetchSampler.half_and_half(order, dataset)
            sampler.set_epoch(1)
            found += [label for batch in loader(dataset, sampler) for label in batch["label"].tolist()]
            assert dataset.stats().lookups == 20
    assert sorted(found) == list(range(40))


PROGRAM = """
import os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader
from stoker_torch import CachedDataset, DiskCache, InformedDataLoader, PrefetchSampler

class Slow:
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(index)
    def __len__(self):
        return 4000

def main(folder, end, workers="1"):
    dataset = CachedDataset(Slow(), DiskCache(folder, 400), threads=4)
    sampler = PrefetchSampler.half_and_half(range(4000), dataset)
    loader = DataLoader if int(workers) else InformedDataLoader
    for number, batch in enumerate(loader(dataset, batch_size=8, sampler=sampler, num_workers=int(workers))):
        if number == 3:
            print("training", flush=True)
            if end == "return":
                return
            if end == "error":
                raise LookupError("of the training")
            while end == "wait":
                time.sleep(0.01)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedPrograms]:
    """What forks trainings that need not import torch each."""
    with forked_programs("-W", "error", imports=["stoker_torch"]) as forked:
        yield forked


def start(forked: ForkedPrograms, folder: Path, *arguments: str) -> RunningProgram:
    program = folder.with_suffix(".py")
    program.write_text(textwrap.dedent(PROGRAM))
    running = forked.start(program, folder, *arguments)
    assert running.stdout.readline() == "training\n"
    return running


@pytest.mark.parametrize(("end", "code", "said"), [("return", 0, ""), ("error", 1, "LookupError: of the training")])
def test_a_training_that_ends_leaves_no_file(
    forked: ForkedPrograms, tmp_path: Path, end: str, code: int, said: str
) -> None:
    folder = tmp_path / "cache"
    running = start(forked, folder, end)
    _, errors = running.communicate(_TIMEOUT_SECONDS)
    assert running.returncode == code
    assert errors.strip().endswith(said)
    assert bool(errors) == bool(said)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_interrupted_training_leaves_no_file(forked: ForkedPrograms, tmp_path: Path, workers: str) -> None:
    folder = tmp_path / "cache"
    running = start(forked, folder, "wait", workers)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(_TIMEOUT_SECONDS)
    assert running.returncode != 0
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not list(folder.iterdir())


def test_what_a_killed_training_leaves_goes_when_the_next_begins(forked: ForkedPrograms, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    running = start(forked, folder, "wait")
    running.send_signal(signal.SIGKILL)
    running.communicate(_TIMEOUT_SECONDS)  # its workers end by themselves, and have the pipe until then
    (left,) = folder.iterdir()
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while left.exists() and time.monotonic() < deadline:
        DiskCache(folder, 1).close()
        time.sleep(0.1)
    assert not list(folder.iterdir())
