from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import FetchConfig, open_store
from stoker._base.sizes import parse_bytes
from stoker._stores.object_store import MemoryStore
from stoker.errors import (
    ConfigError,
    CopiedBucketWarning,
    FetchError,
    MemoryBudgetError,
    NotFoundError,
    ObjectDamagedError,
    StokerError,
)
from stoker.testing import run_virtual
from support.datasets import SCHEMA, pack_numbers, sample_of

SAMPLES = 200


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def is_sample(found: dict[str, Any], number: int) -> bool:
    """Return whether a sample is the one of this number, by type, dtype, shape and value."""
    wanted = sample_of(number)
    return (
        list(found) == list(SCHEMA)
        and all(isinstance(found[name], np.ndarray) for name in ("x", "image", "tokens"))
        and (found["x"].dtype, found["x"].shape, int(found["x"])) == (np.int64, (), number)
        and (found["image"].dtype, found["image"].tolist()) == (np.uint8, wanted["image"].tolist())
        and (found["tokens"].dtype, found["tokens"].tolist()) == (np.uint16, wanted["tokens"].tolist())
        and found["text"] == wanted["text"]
    )


UNHEDGED = FetchConfig(hedge=False)  # on a busy machine a hedge is one request more
IMPATIENT = FetchConfig(hedge=False, backoff_base_seconds=1e-6, backoff_cap_seconds=1e-5)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "stoker-dataset"]


# What is asked for.


def test_a_sample_is_what_was_packed_by_its_number_from_either_end(url: str) -> None:
    with stoker.open(url) as dataset:
        assert len(dataset) == SAMPLES
        for index in (0, 7, SAMPLES - 1, -1, -SAMPLES, np.int64(5), np.uint8(5), np.int16(-3)):
            assert is_sample(dataset[int(index)], int(index) % SAMPLES)
            assert is_sample(dataset[index], int(index) % SAMPLES)


@pytest.mark.parametrize(
    "indices",
    [
        [3, 190, 3, -1, 0],
        (5, np.int64(6), np.uint8(7)),
        range(150, 20, -9),
        np.array([8, 2, 2, -200], np.int32),
        np.array([199, 0], np.uint64),
        np.arange(SAMPLES)[::-1],
        list(range(SAMPLES)),
        [],
        np.array([], np.int64),
    ],
)
def test_many_samples_come_in_the_order_requested(url: str, indices: Any) -> None:
    with stoker.open(url) as dataset:
        found = dataset.samples(indices)
        assert len(found) == len(indices)
        assert all(is_sample(sample, int(index) % SAMPLES) for sample, index in zip(found, indices, strict=True))


@pytest.mark.parametrize("index", [SAMPLES, -SAMPLES - 1, 1 << 70, np.uint64((1 << 64) - 1)])
def test_an_index_out_of_range_is_an_error_that_says_how_many_there_are(url: str, index: Any) -> None:
    with stoker.open(url) as dataset:
        with pytest.raises(IndexError, match=f"sample {index} is out of range: the data set has 200"):
            dataset[index]
        if index < 1 << 64:
            with pytest.raises(IndexError, match=f"sample {index} is out of range: the data set has 200"):
                dataset.samples(np.array([index]))
        assert dataset.stats().samples == 0


@pytest.mark.parametrize("index", [slice(0, 5), 1.0, "1", None, [1], np.float64(1)])
def test_an_index_that_is_no_integer_is_an_error_with_the_remedy(url: str, index: Any) -> None:
    with stoker.open(url) as dataset, pytest.raises(TypeError, match=r"not an integer.*\.samples\("):
        dataset[index]


@pytest.mark.parametrize(
    "indices", [5, [1.0], ["1"], [True, False], [[1, 2]], np.zeros((2, 2), int), {1, 2}, iter([1]), None, [1 << 70]]
)
def test_indices_that_are_no_integers_in_a_row_are_an_error(url: str, indices: Any) -> None:
    with stoker.open(url) as dataset, pytest.raises(TypeError, match="indices must be a sequence"):
        dataset.samples(indices)


def test_a_loop_over_it_yields_every_sample_in_order_with_one_request_a_super_sample() -> None:
    with stoker.open(pack_numbers(100), fetch=UNHEDGED) as dataset:
        assert len(dataset.manifest) > 2
        before = dataset.stats().get_requests
        assert all(is_sample(sample, number) for number, sample in zip(range(100), dataset, strict=True))
        assert dataset.stats().get_requests - before == len(dataset.manifest)
        assert is_sample(next(iter(dataset)), 0)


def test_counting_up_ends_behind_the_last_sample() -> None:
    with stoker.open(pack_numbers(5)) as dataset:
        assert [int(sample["x"]) for sample in _counted_up(dataset)] == list(range(5))


def _counted_up(dataset: stoker.Dataset) -> Iterator[dict[str, Any]]:
    for index in itertools.count():
        try:
            yield dataset[index]
        except IndexError:
            return


def test_values_own_their_memory_and_can_be_written_to(url: str) -> None:
    with stoker.open(url) as dataset:
        one, other = dataset.samples([9, 9])
        for name in ("x", "image", "tokens"):
            assert one[name].flags.owndata
            assert one[name].flags.writeable
        one["image"][:] = 0
        assert is_sample(other, 9)
        assert is_sample(dataset[9], 9)


def test_columns_are_read_in_the_order_in_which_they_are_named(url: str) -> None:
    with stoker.open(url, columns=["text", "x"]) as dataset:
        assert list(dataset.schema) == list(dataset[3]) == ["text", "x"]
        assert list(dataset.manifest.schema) == list(SCHEMA)
        assert dataset[3]["text"] == sample_of(3)["text"]


def test_samples_are_handed_to_a_data_loader_a_batch_at_a_time(url: str) -> None:
    with stoker.open(url) as dataset:
        assert [int(sample["x"]) for sample in dataset.__getitems__([4, 2])] == [4, 2]


def test_it_says_what_it_is(url: str) -> None:
    with stoker.open(url, columns=["x", "text"]) as dataset:
        assert repr(dataset).startswith(f"<Dataset {url} version 1: 200 samples (x: int64, text: text) in ")


# What it takes.


def test_it_counts_requests_bytes_and_samples() -> None:
    url = pack_numbers(SAMPLES)
    with stoker.open(url, columns=["x", "image"], fetch=UNHEDGED) as dataset:
        manifest_bytes = dataset.manifest.file_bytes
        opened = dataset.stats()
        assert (opened.samples, opened.get_requests, opened.read_bytes) == (0, 1, manifest_bytes)
        x, image = 0, SCHEMA["image"].element_bytes
        assert image == 12, "a small column: it lies in the head"
        dataset.samples([x, 1, 2])
        head_bytes = int(dataset.manifest.rows.head_bytes[0])
        first = dataset.stats()
        assert (first.samples, first.get_requests, first.read_bytes) == (3, 2, manifest_bytes + head_bytes)
        dataset.samples([2, 2])
        assert dataset.stats() == first.__class__(**{**_fields(first), "samples": 5})
    with stoker.open(url, columns=["tokens"], fetch=UNHEDGED) as dataset:
        dataset[5]
        one = dataset.stats()
        assert (one.get_requests, one.read_bytes) == (3, manifest_bytes + head_bytes + 2 * 5)
        dataset[6]
        two = dataset.stats()
        assert (two.get_requests, two.read_bytes) == (4, one.read_bytes + 2 * 6)
        assert (two.retries, two.hedges, two.hedge_wins, two.dollars) == (0, 0, 0, 0.0)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_dollars_are_those_of_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker import Operation, Prices

    monkeypatch.setattr(Prices, "store", lambda self, url: self.stores["s3"])
    with stoker.open(url) as dataset:
        dataset[0]
        stats = dataset.stats()
        assert stats.dollars == stats.get_requests * Prices.load().stores["s3"].request_dollars(Operation.GET) > 0


# Settings.


@pytest.mark.parametrize(
    ("settings", "error", "problem"),
    [
        ({"columns": ["x", "y"]}, ConfigError, "the data set has no column y; its columns are x, image"),
        ({"columns": []}, ConfigError, "columns"),
        ({"columns": "x"}, ConfigError, r"columns=\['x'\]"),
        ({"memory": "lots"}, ConfigError, "bytes"),
        ({"memory": "5KB"}, MemoryBudgetError, "give memory="),
        ({"version": 0}, ConfigError, "version must be a positive integer, not 0"),
        ({"version": "1"}, ConfigError, "version must be a positive integer, not '1'"),
        ({"version": 9}, NotFoundError, "no version 9; its newest is 1"),
        ({"options": stoker.S3Options()}, ConfigError, "S3Options"),
    ],
)
def test_a_wrong_setting_is_an_error_and_leaves_no_thread(url: str, settings: Any, error: Any, problem: str) -> None:
    with pytest.raises(error, match=problem):
        stoker.open(url, **settings)
    assert threads() == []


def test_where_there_is_no_data_set_the_error_says_how_to_pack_one(tmp_path: Any) -> None:
    with pytest.raises(NotFoundError, match=r"there is no data set: the folder .* does not exist"):
        stoker.open(tmp_path / "nothing")
    assert threads() == []


def test_the_memory_that_an_error_names_is_enough(url: str) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        stoker.open(url, memory=1)
    figure = parse_bytes(str(refused.value).partition("memory=")[2].split()[0])
    with stoker.open(url, memory=figure) as dataset:
        assert all(is_sample(sample, number) for number, sample in enumerate(dataset.samples(range(SAMPLES))))


def test_the_version_is_pinned_when_it_is_opened() -> None:
    url = pack_numbers(20)
    with stoker.open(url) as first:
        with stoker.Packer(url, schema=SCHEMA, mode="append") as packer:
            packer.extend(map(sample_of, range(20, 30)))
        assert (len(first), first.manifest.version) == (20, 1)
        with pytest.raises(IndexError):
            first[20]
        with stoker.open(url) as second, stoker.open(url, version=1) as third:
            assert (len(second), len(third)) == (30, 20)
            assert is_sample(second[29], 29)


# Threads, processes, the end.


def test_nothing_but_the_manifest_is_read_before_the_first_sample(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    asked: list[str] = []
    get_range, get = MemoryStore.get_range, MemoryStore.get

    async def noted_range(self: MemoryStore, key: str, *args: Any, **settings: Any) -> Any:
        asked.append(key)
        return await get_range(self, key, *args, **settings)

    async def noted(self: MemoryStore, key: str) -> Any:
        asked.append(key)
        return await get(self, key)

    monkeypatch.setattr(MemoryStore, "get_range", noted_range)
    monkeypatch.setattr(MemoryStore, "get", noted)
    with stoker.open(url) as dataset:
        assert (len(dataset), list(dataset.schema), asked) == (SAMPLES, list(SCHEMA), ["manifest.safetensors"])
        dataset[0]
        assert set(asked[1:]) == {dataset.manifest.key(0)}


def test_closing_ends_the_thread_and_reading_again_starts_anew_with_counts_going_on(url: str) -> None:
    dataset = stoker.open(url, fetch=UNHEDGED)
    for turn in (1, 2, 3):
        assert is_sample(dataset[7], 7)
        assert threads() == ["stoker-dataset"]
        dataset.close()
        dataset.close()
        assert threads() == []
        assert dataset.stats().samples == turn
    assert dataset.stats().get_requests == 1 + 3 * 2, "the manifest, and each time head and values"


def test_retries_are_counted_over_a_close(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.errors import ServerError

    get_range, calls = MemoryStore.get_range, [0]

    async def flaky(self: MemoryStore, *args: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2:
            raise ServerError("try again")
        return await get_range(self, *args, **settings)

    monkeypatch.setattr(MemoryStore, "get_range", flaky)
    dataset = stoker.open(
        url, columns=["x"], fetch=FetchConfig(hedge=False, backoff_base_seconds=1e-6, backoff_cap_seconds=1e-5)
    )
    for turn in (1, 2):
        assert int(dataset[3]["x"]) == 3
        assert dataset.stats().retries == turn
        dataset.close()
        assert dataset.stats().retries == turn


def test_one_that_is_garbage_ends_its_thread(url: str) -> None:
    dataset = stoker.open(url)
    dataset[0]
    del dataset
    gc.collect()
    assert threads() == []


def test_many_threads_read_at_once(url: str) -> None:
    with stoker.open(url, memory="40KB") as dataset, ThreadPoolExecutor(6) as pool:
        asked = [np.random.default_rng(call).integers(-SAMPLES, SAMPLES, 40) for call in range(30)]
        for indices, found in zip(asked, pool.map(dataset.samples, asked), strict=True):
            assert all(
                is_sample(sample, index % SAMPLES) for sample, index in zip(found, indices.tolist(), strict=True)
            )
        assert dataset.stats().samples == 30 * 40


def test_it_works_beside_an_event_loop(url: str) -> None:
    async def notebook() -> bool:
        with stoker.open(url) as dataset:
            return is_sample(dataset[3], 3)

    assert asyncio.run(notebook())


def test_closing_cancels_a_call_that_is_under_way(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    async def endless(*args: Any, **settings: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    dataset = stoker.open(url)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(MemoryStore, "get_range", endless)
        call = pool.submit(dataset.__getitem__, 0)
        started.wait(60)
        dataset.close()
        with pytest.raises(StokerError, match="was closed before the call ended"):
            call.result(60)
    assert is_sample(dataset[0], 0)
    dataset.close()


def pickled(dataset: Any) -> Any:
    return pickle.loads(pickle.dumps(dataset))  # noqa: S301 - what a worker process of a DataLoader does


@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
def test_a_copy_is_opened_anew_with_the_same_settings_and_version(copied: Any) -> None:
    url = pack_numbers(20)
    with stoker.open(url, columns=["text", "x"], memory="1MB", fetch=FetchConfig(attempts=3)) as dataset:
        with stoker.Packer(url, schema=SCHEMA, mode="append") as packer:
            packer.extend(map(sample_of, range(20, 30)))
        with copied(dataset) as other:
            assert other is not dataset
            assert (len(other), other.manifest.version, list(other.schema)) == (20, 1, ["text", "x"])
            assert other._settings == dataset._settings
            assert other[5] == dataset[5]
            assert other.stats().samples == 1


def test_sizes_are_those_of_the_encoded_values(url: str) -> None:
    indices = [5, 190, 5, -1, 0]
    with stoker.open(url) as dataset:
        samples = dataset.samples(indices)
        for name, column in dataset.schema.items():
            wanted = [len(column.encode(sample[name])) for sample in samples]
            found = dataset.value_sizes(name, indices)
            assert (str(found.dtype), found.tolist()) == ("int64", wanted)
            assert dataset.value_sizes(name, []).tolist() == []
        with pytest.raises(IndexError, match="sample 200 is out of range"):
            dataset.value_sizes("text", [SAMPLES])
        with pytest.raises(ConfigError, match="no column y"):
            dataset.value_sizes("y", [0])
    with stoker.open(url, columns=["x"]) as dataset, pytest.raises(ConfigError, match="no column text"):
        dataset.value_sizes("text", [0])


def test_sizes_are_known_from_heads_which_are_read_once(url: str) -> None:
    with stoker.open(url, fetch=UNHEDGED) as dataset:
        before = dataset.stats()
        dataset.value_sizes("x", range(SAMPLES))
        assert dataset.stats() == before
        dataset.value_sizes("text", range(SAMPLES))
        dataset.value_sizes("tokens", range(SAMPLES))
        after = dataset.stats()
        assert after.get_requests - before.get_requests == len(dataset.manifest)
        assert after.read_bytes - before.read_bytes == dataset.manifest.rows.head_bytes.sum()


def test_an_object_is_read_whole_or_in_part(url: str) -> None:
    with stoker.open(url, columns=["x"]) as dataset:
        key, size_bytes = dataset.manifest.key(1), int(dataset.manifest.rows.size_bytes[1])
        data, _ = run_virtual(open_store(url).get(key))
        assert dataset.read_object(1) == data
        assert dataset.read_object(1, 5, 9) == data[5:9]
        assert dataset.read_object(1, size_bytes) == b""
        for start, end in ((-1, 3), (3, 2), (0, size_bytes + 1)):
            with pytest.raises(IndexError, match=rf"range \[{start}, {end}\) is not within {key}"):
                dataset.read_object(1, start, end)
        for row in (-1, len(dataset.manifest)):
            with pytest.raises(IndexError, match=f"row {row} is out of range"):
                dataset.read_object(row)


def test_a_damaged_object_is_not_returned_whole() -> None:
    url = pack_numbers(20)
    with stoker.open(url, fetch=IMPATIENT) as dataset:
        key = dataset.manifest.key(0)

        async def spoil() -> None:
            store = open_store(url)
            data = bytearray((await store.get(key))[0])
            data[-1] ^= 1
            await store.put(key, data)

        run_virtual(spoil())
        with pytest.raises(ObjectDamagedError, match=key):
            dataset.read_object(0)


def test_after_a_fork_both_sides_read(url: str) -> None:
    with stoker.open(url) as dataset:
        dataset[0]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if is_sample(dataset[150], 150) and is_sample(dataset[0], 0) and dataset.stats().samples == 3:
                    dataset.close()
                    status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_sample(dataset[150], 150)
        assert dataset.stats().samples == 2


def test_a_copied_bucket_is_reported_once_and_a_damaged_value_is_a_typed_error() -> None:
    url = pack_numbers(20)
    with stoker.open(url, fetch=IMPATIENT) as dataset:
        key = dataset.manifest.key(0)
        last = int(dataset.manifest.rows.samples[0]) - 1

        async def spoil() -> None:
            store = open_store(url)
            data = bytearray((await store.get(key))[0])
            data[-1] ^= 1
            await store.put(key, data)

        run_virtual(spoil())
        with (
            pytest.warns(CopiedBucketWarning),
            pytest.raises(FetchError, match=rf"{key} is corrupt: .*column 'text' of row {last}\b"),
        ):
            dataset[last]
        assert dataset.stats().retries == 2
        assert is_sample(dataset[0], 0)
