"""A stream data set in the worker processes of DataLoaders, forked and spawned, of several ranks."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import stoker
from stoker import Order, OrderConfig
from stoker._cache.index import TierSet
from stoker.errors import ConfigError, MemoryBudgetError, SampleError, StateError, StokerError
from stoker_torch import Budget, RaggedColumn, StreamDataset, _shared_batches, merge_states
from support.datasets import SCHEMA, numbers, sample_of
from support.preloaded import preloaded_forkserver

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # newer Pythons' of every fork
]
SAMPLES = 403
COLUMNS = ["x", "image", "text"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stream") / "train"
    with stoker.Packer(folder, schema=SCHEMA, super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(SAMPLES)))
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _forkserver() -> Iterator[None]:
    """Processes that get a pickled data set as spawned ones do, but need not import torch each."""
    with preloaded_forkserver("stoker_torch", "torchdata.stateful_dataloader", "pytest"):
        yield


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are read in many chunks, as those of a large data set are."""
    monkeypatch.setattr("stoker_torch._stream_reader._MAX_CHUNK_SAMPLES", 11)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No thread, open file or process outlives a test."""
    resource_tracker.ensure_running()  # the process that Python keeps where others are spawned
    multiprocessing.RawArray("b", 1 << 20)  # a pool of memory for boards, which stays open
    gc.collect()
    threads, files = set(threading.enumerate()), len(list(Path("/dev/fd").iterdir()))
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:  # torch's queues have such that linger
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads
    assert not multiprocessing.active_children()
    assert len(list(Path("/dev/fd").iterdir())) <= files


def dataset(url: str, **settings: Any) -> StreamDataset:
    return StreamDataset(url, **{"columns": COLUMNS, "seed": 6, **settings})


def forked(data: StreamDataset, workers: int, batch_size: int | None = 16, **settings: Any) -> DataLoader[Any]:
    """Return a DataLoader with forked workers."""
    if workers:
        settings.setdefault("multiprocessing_context", "fork")
    return DataLoader(data, batch_size=batch_size, num_workers=workers, **settings)


def stateful(data: StreamDataset, workers: int, batch_size: int | None = 16, context: Any = "fork") -> Any:
    return StatefulDataLoader(
        data, batch_size=batch_size, num_workers=workers, multiprocessing_context=context if workers else None
    )


def epoch_of(data: StreamDataset, epoch: int, lanes: int, **settings: Any) -> list[int]:
    order = Order(data.manifest.rows.samples, OrderConfig(seed=6, lanes=lanes, **settings), epoch)
    return list(order.at(0, SAMPLES).tolist())


def failure_of(loader: DataLoader[Any]) -> StokerError:
    """Return what a loop ends with; torch would wait seconds for workers that only the collector finds."""
    batches: Any = None
    try:
        batches = iter(loader)
        for _ in batches:
            pass
    except StokerError as error:
        return error.with_traceback(None)
    finally:
        if batches is not None:
            batches._shutdown_workers()
    raise AssertionError("the loop ended well")


def with_epoch(sample: dict[str, Any]) -> dict[str, Any]:
    """Say in a sample which worker it comes through."""
    info = get_worker_info()
    return {"x": sample["x"], "worker": -1 if info is None else info.id}


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["x"]) == 200:
        raise ZeroDivisionError("two hundred")
    return sample


# Exactly once.


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_has_every_sample_once_and_each_worker_every_so_manyth(url: str, workers: int) -> None:
    data = dataset(url, transform=with_epoch, columns=None)
    loader = forked(data, workers)
    for epoch in range(2):
        batches = list(loader)
        assert sorted(numbers(batches)) == list(range(SAMPLES))
        for worker in range(workers):
            mine = numbers(batch for batch in batches if batch["worker"][0] == worker)
            assert mine == epoch_of(data, epoch, workers)[worker::workers]


@pytest.mark.parametrize(("context", "workers", "batch_size"), [("forkserver", 2, None), ("spawn", 1, 16)])
def test_spawned_workers_do_as_forked_ones_and_keep_count_of_epochs(
    url: str, context: str, workers: int, batch_size: int | None
) -> None:
    data = dataset(url, batch_size=batch_size)
    loader = forked(
        data,
        workers,
        None if batch_size else 16,
        multiprocessing_context=context,
        persistent_workers=True,
        pin_memory=False,
    )
    spawned = [numbers(loader) for _ in range(2)]
    assert [sorted(each) for each in spawned] == [list(range(SAMPLES))] * 2
    assert spawned[0] != spawned[1]
    loader._iterator = None
    del loader
    other = forked(data, 1, None if batch_size else 16)
    assert numbers(other) != spawned[1]


@pytest.mark.parametrize(("world_size", "workers"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("settings", [{}, {"lanes": 12, "window": 2}, {"shuffle": "full"}, {"batch_size": 16}])
def test_ranks_with_workers_make_equally_many_batches_and_share_the_samples(
    url: str, world_size: int, workers: int, settings: dict[str, Any]
) -> None:
    batch_size = None if "batch_size" in settings else 16
    by_rank = [
        list(forked(dataset(url, rank=rank, world_size=world_size, **settings), workers, batch_size))
        for rank in range(world_size)
    ]
    assert len({tuple(len(batch["x"]) for batch in batches) for batches in by_rank}) == 1
    every = [number for batches in by_rank for number in numbers(batches)]
    assert set(every) == set(range(SAMPLES))
    assert len(every) - SAMPLES < world_size
    assert len(every) == world_size * -(-SAMPLES // world_size)


def test_workers_that_have_nothing_end_at_once(url: str) -> None:
    assert len(numbers(forked(dataset(url, limit=2), 3))) == 2


def test_an_evaluation_on_two_ranks_has_every_sample_once(url: str) -> None:
    every = [
        number
        for rank in range(2)
        for number in numbers(forked(dataset(url, rank=rank, world_size=2, evaluation=True), 3))
    ]
    assert sorted(every) == list(range(SAMPLES))


@pytest.mark.parametrize("memory", ["512MB", "120KB"])
def test_full_is_full_with_workers_too_also_beyond_memory(url: str, memory: str) -> None:
    data = dataset(url, shuffle="full", memory=memory, budget=Budget(max_dollars_per_epoch=100))
    batches = list(forked(data, 2, 16))
    assert sorted(numbers(batches)) == list(range(SAMPLES))
    order = epoch_of(data, 0, 2, shuffle="full")
    assert numbers(batches[::2])[:160] == order[::2][:160]
    assert numbers(batches[1::2])[:160] == order[1::2][:160]


def test_ragged_columns_come_whole_from_workers(url: str) -> None:
    seen = 0
    for batch in forked(dataset(url, columns=None, batch_size=50), 2, None):
        assert isinstance(batch["tokens"], RaggedColumn)
        for number, text, tokens in zip(batch["x"].tolist(), batch["text"], batch["tokens"], strict=True):
            packed = sample_of(number)
            assert (text, tokens.tolist()) == (packed["text"], packed["tokens"].tolist())
            seen += 1
    assert seen == SAMPLES


# Epochs.


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("is_kept", [False, True])
def test_break_abandons_an_epoch_in_workers_made_anew_or_kept(url: str, is_kept: bool) -> None:
    data = dataset(url)
    loader = forked(data, 2, persistent_workers=is_kept)
    wanted = [sorted(epoch_of(data, epoch, 2)[0::2][:16]) for epoch in range(4)]
    assert [sorted(next(iter(loader))["x"].tolist()) for _ in range(3)] == wanted[:3]
    assert sorted(numbers(loader)) == list(range(SAMPLES))
    data.set_epoch(1)
    assert sorted(next(iter(loader))["x"].tolist()) == wanted[1]
    data.set_epoch(3)
    assert sorted(next(iter(loader))["x"].tolist()) == wanted[3]


@pytest.mark.usefixtures("nothing_is_left")
def test_iterators_side_by_side_are_two_epochs(url: str) -> None:
    loader = forked(dataset(url), 2)
    one, other = [], []
    for first, second in zip(loader, loader, strict=True):
        one += first["x"].tolist()
        other += second["x"].tolist()
    assert sorted(one) == sorted(other) == list(range(SAMPLES))
    assert one != other


def test_iterations_in_this_process_and_in_workers_follow_one_another(url: str) -> None:
    data = dataset(url, lanes=2)
    assert numbers(forked(data, 0)) == epoch_of(data, 0, 2)
    assert numbers(islice(forked(data, 2), 1)) == epoch_of(data, 1, 2)[0::2][:16]
    assert numbers(forked(data, 0)) == epoch_of(data, 2, 2)


# State.


@pytest.mark.parametrize(
    ("workers", "batch_size", "steps"),
    [(0, None, 4), (0, 16, 20), (1, None, 1), (1, 16, 25), (3, None, 0), (3, None, 25), (3, 16, 4)],
)
def test_a_stateful_dataloader_resumes_exactly_and_continues_to_the_next_epoch(
    url: str, workers: int, batch_size: int | None, steps: int
) -> None:
    outer = None if batch_size else 16
    loader = stateful(dataset(url, batch_size=batch_size), workers, outer)
    first = numbers(loader)
    before = numbers(islice(loader, steps))
    state = json.loads(json.dumps(loader.state_dict()))
    del loader
    resumed = stateful(dataset(url, batch_size=None if outer else 5), workers, outer and 5)
    resumed.load_state_dict(state)
    rest = numbers(resumed)
    if steps:
        assert sorted(before + rest) == list(range(SAMPLES))
        assert before + rest != first
    else:
        assert sorted(rest) == list(range(SAMPLES))
    after = numbers(resumed)
    assert sorted(after) == list(range(SAMPLES))
    assert after not in (first, rest)


def test_a_stateful_dataloader_whose_workers_inherit_nothing_resumes_exactly(url: str) -> None:
    loader = stateful(dataset(url), 2, context="forkserver")
    before = numbers(islice(loader, 5))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert sorted(before + numbers(loader)) == list(range(SAMPLES))


@pytest.mark.usefixtures("nothing_is_left")
def test_a_stateful_dataloader_goes_back_to_an_earlier_epoch(url: str) -> None:
    data = dataset(url)
    loader = stateful(data, 2)
    before = numbers(islice(loader, 3))
    state = loader.state_dict()
    epochs = [numbers(loader) for _ in range(2)]
    loader.load_state_dict(state)
    assert sorted(before + numbers(loader)) == list(range(SAMPLES))
    assert [numbers(loader) for _ in range(2)] == epochs


def test_the_state_of_an_epoch_that_is_over_begins_the_next(url: str) -> None:
    for workers in (0, 2):
        loader = stateful(dataset(url), workers)
        epochs = [numbers(loader)]
        state = loader.state_dict()
        epochs.append(numbers(loader))
        other = stateful(dataset(url), workers)
        other.load_state_dict(state)
        assert numbers(other) == epochs[1] != epochs[0]


def test_a_plain_dataloader_with_workers_has_no_state_and_says_who_has(url: str) -> None:
    data = dataset(url, lanes=2)
    numbers(forked(data, 0))
    state = data.state_dict()
    next(iter(forked(data, 2)))
    with pytest.raises(StateError, match=r"StatefulDataLoader.*stoker_torch\.Loader"):
        data.state_dict()
    data.set_epoch(0)
    assert data.state_dict()["epoch"] == 0
    data.load_state_dict(state)
    assert data.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2, 6])
def test_the_merged_states_of_workers_are_resumed_by_another_number_of_them(url: str, workers: int) -> None:
    loader = stateful(dataset(url, lanes=6), 3)
    before = numbers(islice(loader, 7))
    data = dataset(url)
    data.load_state_dict(merge_states([loader.state_dict()]))
    plain = forked(data, workers)
    assert sorted(before + numbers(plain)) == list(range(SAMPLES))
    assert sorted(numbers(plain)) == list(range(SAMPLES))


def test_merged_states_of_two_ranks_are_resumed_by_three_that_make_equally_many_batches(url: str) -> None:
    before: list[int] = []
    states = []
    for rank in range(2):
        loader = stateful(dataset(url, rank=rank, world_size=2, lanes=12), 2)
        before += numbers(islice(loader, 5))
        states.append(loader.state_dict())
    by_rank = []
    for rank in range(3):
        data = dataset(url, rank=rank, world_size=3)
        data.load_state_dict(merge_states(states))
        by_rank.append(list(forked(data, 2)))
    assert len({tuple(len(batch["x"]) for batch in batches) for batches in by_rank}) == 1
    rest = [number for batches in by_rank for number in numbers(batches)]
    assert set(rest) == set(range(SAMPLES)) - set(before)


def test_a_state_that_cannot_reach_workers_that_run_is_an_error_not_a_repetition(url: str) -> None:
    data = dataset(url, lanes=2)
    next(iter(data))
    state = data.state_dict()
    loader = forked(data, 2, persistent_workers=True)
    numbers(loader)
    data.load_state_dict(state)
    error = failure_of(loader)
    assert isinstance(error, StateError)
    assert "persistent_workers" in str(error)


def test_the_state_of_one_worker_is_not_enough_for_another(url: str) -> None:
    loader = stateful(dataset(url), 2)
    next(iter(loader))
    snapshots = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    data = dataset(url)
    data.load_state_dict(snapshots["worker_1"]["dataset_state"])
    error = failure_of(forked(data, 2))
    assert isinstance(error, StateError)
    assert "merge_states" in str(error)


@pytest.mark.parametrize(("settings", "match"), [({"version": 1}, "lanes=6"), ({"lanes": 6}, "version=1")])
def test_a_worker_refuses_a_state_that_later_workers_would_know_nothing_of(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    url = str(tmp_path / "ds")
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(50)))
    loader = stateful(dataset(url, lanes=6), 1)
    next(iter(loader))
    state = loader.state_dict()
    with stoker.Packer(url, schema=SCHEMA, mode="append", super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(50, 60)))
    other = stateful(dataset(url, **settings), 1)
    other.load_state_dict(state)
    error = failure_of(other)
    assert isinstance(error, StateError)
    assert match in str(error)


# Errors and limits.


@pytest.mark.usefixtures("nothing_is_left")
def test_an_error_in_a_worker_reaches_the_loop_with_its_type_and_message(url: str) -> None:
    error = failure_of(forked(dataset(url, transform=fail), 2))
    assert isinstance(error, SampleError)
    assert re.search(r"sample 200 .*ZeroDivisionError: two hundred", str(error))


def test_lanes_that_the_workers_cannot_share_are_an_error_that_names_what_fits(url: str) -> None:
    error = failure_of(forked(dataset(url, rank=0, world_size=2, lanes=4), 3))
    assert isinstance(error, ConfigError)
    assert re.search(r"lanes must be a multiple of 6 \(world_size=2, workers=3\), not 4; give lanes=6", str(error))


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_memory_is_the_ranks_and_an_error_names_the_figure_for_it(url: str, shuffle: Any) -> None:
    settings: dict[str, Any] = {"shuffle": shuffle, "budget": Budget(max_dollars_per_epoch=100)}
    error = failure_of(forked(dataset(url, memory=60_000, **settings), 3))
    assert isinstance(error, MemoryBudgetError)
    assert "divided by 3 workers" in str(error)
    needed = int(str(error).partition("give memory=")[2].split()[0])
    assert sorted(numbers(forked(dataset(url, memory=needed, **settings), 3))) == list(range(SAMPLES))
    assert isinstance(failure_of(forked(dataset(url, memory=needed - 3, **settings), 3)), MemoryBudgetError)


def tell_of_closing(path: Path, _: int) -> None:
    """Have this worker process touch a file when it closes its tiers."""

    async def close(_: TierSet) -> None:
        os.close(os.open(path, os.O_CREAT))

    TierSet.close = close  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("context", "leaves_early"), [("fork", False), ("fork", True), ("forkserver", True), ("spawn", False)]
)
def test_a_worker_process_closes_its_tiers_before_it_ends(
    url: str, tmp_path: Path, context: str, leaves_early: bool
) -> None:
    """What it has offered to a tier must arrive there."""
    file = tmp_path / "closed"
    loader = forked(dataset(url), 1, multiprocessing_context=context, worker_init_fn=partial(tell_of_closing, file))
    batches: Any = iter(loader)
    next(batches)
    if not leaves_early:
        list(batches)
    batches._shutdown_workers()
    assert file.exists()


def test_a_data_set_that_was_changed_meanwhile_is_read_in_the_version_that_was_pinned(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "ds"
    with stoker.Packer(folder, schema=SCHEMA, super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(50)))
    data = StreamDataset(folder, columns=COLUMNS)
    with stoker.Packer(folder, schema=SCHEMA, mode="append", super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(50, 60)))
    for context in ("fork", "forkserver"):
        assert sorted(numbers(forked(data, 1, multiprocessing_context=context))) == list(range(50))


def test_a_length_that_workers_exceed_is_warned_of_where_a_framework_trusts_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(url)
    loader = forked(data, 2, 50)
    assert (len(loader), len(list(loader)), len(list(loader))) == (9, 10, 10)  # 202 and 201 samples
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    assert len(loader) == 9
    with pytest.raises(UserWarning, match=r"2 workers .* up to 1 batches .* stoker_torch\.Loader"):
        list(loader)
    assert len(list(forked(data, 1, 50))) == 9


def test_values_that_were_decoded_in_workers_are_collated(url: str) -> None:
    decode: dict[str, Callable[[Any], Any]] = {"text": len, "image": lambda image: image.float().mean()}
    for batch in forked(dataset(url, decode=decode), 2):
        for number, text, image in zip(*(batch[name].tolist() for name in ("x", "text", "image")), strict=True):
            packed = sample_of(number)
            assert text == len(packed["text"])
            assert image == pytest.approx(float(np.mean(packed["image"])))
    assert torch.is_tensor(batch["image"])


@pytest.mark.filterwarnings("ignore:the limit epochs=2 is reached")
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "kept"])
def test_workers_read_nothing_behind_the_last_epoch(url: str, persistent: bool) -> None:
    batches = forked(dataset(url, epochs=2), 2, persistent_workers=persistent)
    assert [len(numbers(batches)) for _ in range(4)] == [SAMPLES, SAMPLES, 0, 0]


# Batches in shared memory.

PIXELS = 12_000


def image_of(number: int) -> dict[str, Any]:
    file = bytes([number % 249]) * (PIXELS + number)
    return {"x": number, "image": np.full(PIXELS, number % 251, np.uint8), "file": file}


@pytest.fixture(scope="module")
def images_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a data set whose batches are large enough for shared memory."""
    folder = tmp_path_factory.mktemp("images") / "train"
    schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (PIXELS,)), "file": stoker.Bytes()}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=500_000) as packer:
        packer.extend(
            {
                "x": index,
                "image": np.full(PIXELS, index % 251, np.uint8),
                "file": bytes([index % 249]) * (PIXELS + index),
            }
            for index in range(SAMPLES)
        )
    return str(folder)


def check_images(batch: dict[str, Any]) -> list[int]:
    """Check that the rows of a batch belong together, and return their numbers."""
    for number, image, file in zip(batch["x"].tolist(), batch["image"], batch["file"], strict=True):
        packed = image_of(number)
        assert np.array_equal(image, packed["image"])
        assert file == packed["file"]
    return list(batch["x"].tolist())


def only_images(batch: dict[str, Any]) -> dict[str, Any]:
    return {"image": batch["image"], "x": batch["x"].float()}


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("context", "workers", "is_kept"),
    [("fork", 2, False), ("fork", 2, True), ("forkserver", 2, False), ("spawn", 1, True)],
)
def test_large_batches_are_whole_in_every_epoch_and_leave_no_memory(
    images_url: str, context: str, workers: int, is_kept: bool
) -> None:
    data = StreamDataset(images_url, batch_size=64, memory="30MB")
    loader = forked(data, workers, None, multiprocessing_context=context, persistent_workers=is_kept)
    for _ in range(2):
        assert sorted(number for batch in loader for number in check_images(batch)) == list(range(SAMPLES))
    kept = list(loader)
    assert sorted(number for batch in kept for number in check_images(batch)) == list(range(SAMPLES))
    del loader, data
    gc.collect()
    assert not _shared_batches._mappings
    assert sorted(number for batch in kept for number in check_images(batch)) == list(range(SAMPLES))


@pytest.mark.usefixtures("nothing_is_left")
def test_large_batches_of_functions_come_whole_too(images_url: str) -> None:
    decode: dict[str, Callable[[Any], Any]] = {"image": lambda image: image.float() / 2}
    data = StreamDataset(images_url, batch_size=64, decode=decode, memory="30MB")
    seen = []
    for batch in forked(data, 2, None):
        assert batch["image"].dtype == torch.float32
        assert batch["image"][:, -1].tolist() == [number % 251 / 2 for number in batch["x"].tolist()]
        seen += batch["x"].tolist()
    assert sorted(seen) == list(range(SAMPLES))
    del batch


@pytest.mark.usefixtures("nothing_is_left")
def test_large_batches_pass_through_the_functions_of_a_dataloader_and_iterators_side_by_side(images_url: str) -> None:
    loader = forked(StreamDataset(images_url, batch_size=64, memory="30MB"), 2, None, collate_fn=only_images)
    ones: list[float] = []
    others: list[float] = []
    for one, other in zip(loader, loader, strict=True):
        for batch, seen in ((one, ones), (other, others)):
            assert batch["image"][:, 7].tolist() == [int(number) % 251 for number in batch["x"].tolist()]
            seen += batch["x"].tolist()
    assert sorted(ones) == sorted(others) == list(range(SAMPLES))
    del one, other, batch


def test_batches_that_arrived_stay_whole_when_their_worker_is_killed(images_url: str) -> None:
    batches: Any = iter(forked(StreamDataset(images_url, batch_size=8, memory="30MB"), 1, None))
    kept = [next(batches) for _ in range(5)]
    worker = batches._workers[0]

    def kill_and_read_on() -> None:
        os.kill(worker.pid, signal.SIGKILL)  # torch's handler may raise at once
        kept.extend(batches)

    with pytest.raises((RuntimeError, StokerError), match=rf"worker .*\b{worker.pid}\b.*(killed|exited|ended)"):
        kill_and_read_on()
    with suppress(RuntimeError):  # of torch's handler, if the worker's end is noticed only now
        worker.join()
    for batch in kept:
        check_images(batch)
