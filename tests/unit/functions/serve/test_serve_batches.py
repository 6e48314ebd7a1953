"""Batches: the samples of the order, in a file for any safetensors reader, and never more than an answer holds."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

import stoker
from stoker import Order, OrderConfig, open_store
from stoker._format.manifest import Manifest, version_key
from stoker._format.supersample import SuperSample
from stoker._format.versions import read_manifest
from stoker.testing import WatchedStore
from stoker_functions.serve import Request, Response, Service
from support.datasets import SCHEMA, pack_numbers, sample_of
from support.places import with_store
from support.served_requests import ask, error_of, serving, with_service
from support.supersamples import EVERY_KIND, samples_of
from support.waiting import until

SAMPLES = 300


@cache
def packed() -> str:
    return pack_numbers(SAMPLES)


@pytest.fixture
def url() -> str:
    return packed()


@pytest.fixture
def manifest(url: str) -> Manifest:
    found: Manifest = with_store(url, read_manifest)
    return found


def batch(url: str, position: int, query: str, **changes: Any) -> Response:
    return ask(serving(url, **changes), f"/v1/ds/batches/{position}", query)


def numbers_of(response: Response) -> list[int]:
    assert response.status == 200, response.body
    super_sample = SuperSample(response.body)
    super_sample.verify()
    found = super_sample.column("x").tolist()
    for row, number in enumerate(found):
        sample, wanted = super_sample[row], sample_of(number)
        assert sample["text"] == wanted["text"]
        assert sample["image"].tolist() == wanted["image"].tolist()
        assert sample["tokens"].tolist() == wanted["tokens"].tolist()
    return list(found)


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
def test_a_batch_has_the_samples_of_the_order_at_its_positions(url: str, manifest: Manifest, shuffle: Any) -> None:
    config = OrderConfig(seed=5, shuffle=shuffle, window=3, lanes=2)
    order = Order(manifest.rows.samples, config, 4)
    for position, size in ((0, 1), (17, 40), (290, 10), (295, 99)):
        query = f"size={size}&seed=5&epoch=4&shuffle={shuffle}&window=3&lanes=2"
        assert numbers_of(batch(url, position, query)) == order.at(position, min(position + size, SAMPLES)).tolist()


def test_batches_side_by_side_are_the_epoch_exactly_once(url: str) -> None:
    async def use(service: Service) -> list[int]:
        found: list[int] = []
        for position in range(0, SAMPLES, 64):
            query = "size=64&seed=9&version=1"
            request = Request(method="GET", path=f"/v1/ds/batches/{position}", query=query)
            found += numbers_of(await service.answer(request))
        return found

    found = with_service(serving(url), use)
    assert sorted(found) == list(range(SAMPLES))
    assert found != sorted(found)


def test_any_safetensors_reader_opens_a_batch(url: str) -> None:
    tensors = load(bytes(batch(url, 3, "size=5&shuffle=none").body))
    assert tensors["x"].tolist() == [3, 4, 5, 6, 7]
    assert tensors["image"].shape == (5, 4, 3)
    text = tensors["text"].tobytes()[: int(tensors["text.offsets"][1])].decode()
    assert text == sample_of(3)["text"]


def test_the_same_batch_has_the_same_bytes_and_tag_and_another_has_another_tag(url: str) -> None:
    one, again = (batch(url, 3, "size=5&version=1") for _ in range(2))
    assert (one.body, one.headers) == (again.body, again.headers)
    assert re.fullmatch('"[0-9a-f]{32}"', one.headers["ETag"])
    assert one.headers["Cache-Control"].endswith("immutable")
    others = [
        batch(url, 3, query).headers["ETag"]
        for query in (
            "size=6",
            "size=5&seed=1",
            "size=5&epoch=1",
            "size=5&shuffle=full",
            "size=5&window=2",
            "size=5&lanes=2",
        )
    ]
    assert len({one.headers["ETag"], *others}) == 7
    assert batch(url, 3, "size=5").headers["ETag"] == one.headers["ETag"], "version 1 is the newest"


def test_a_batch_that_is_known_is_not_read_again(url: str) -> None:
    watched = WatchedStore(open_store(url))
    etag = batch(url, 3, "size=5&version=1").headers["ETag"]
    response = ask(
        serving(url), "/v1/ds/batches/3", "size=5&version=1", headers={"if-none-match": etag}, store=lambda _: watched
    )
    assert response.status == 304
    assert not [call for call in watched.calls if "data/" in call]


def fitting(response: Response) -> int:
    match = re.search(r"size=([0-9]+) fits", json.loads(response.body)["message"])
    assert match
    return int(match[1])


@settings(max_examples=15)
@given(st.integers(6000, 14_000), st.integers(0, SAMPLES - 1))
def test_a_too_large_batch_is_refused_with_a_size_that_fits(limit: int, position: int) -> None:
    url = packed()
    response = batch(url, position, "size=16384", answer_bytes=limit)
    if response.status == 200:
        assert len(response.body) <= limit
        return
    assert (response.status, error_of(response)) == (413, "too-large")
    size = fitting(response)
    again = batch(url, position, f"size={size}", answer_bytes=limit)
    assert again.status == 200
    assert len(again.body) <= limit
    assert batch(url, position, f"size={size + 1}", answer_bytes=limit).status == 413


def test_a_batch_that_is_too_large_is_not_read_to_its_end() -> None:
    url = pack_numbers(3000)
    manifest: Manifest = with_store(url, read_manifest)
    watched = WatchedStore(open_store(url))
    config = serving(url, answer_bytes=8000)
    response = ask(config, "/v1/ds/batches/0", "size=3000&shuffle=none&version=1", store=lambda _: watched)
    assert response.status == 413
    read = {call for call in watched.calls if "data/" in call}
    assert len(read) < len(manifest) / 4


def test_batches_of_several_versions_take_turns_since_each_may_take_all_the_memory() -> None:
    url = pack_numbers(40)
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=800, mode="append") as packer:
        packer.extend(map(sample_of, range(40, 60)))
    reading, may_come = asyncio.Event(), asyncio.Event()

    class Held(WatchedStore):
        """A bucket whose super-samples come when they may."""

        async def before(self, number: int, operation: str, key: str) -> None:
            if key.startswith("data/"):
                reading.set()
                await may_come.wait()

    async def use(service: Service) -> None:
        def request_batch(version: int, position: int) -> asyncio.Task[Response]:
            query = f"size=4&shuffle=none&version={version}"
            request = Request(method="GET", path=f"/v1/ds/batches/{position}", query=query)
            return asyncio.get_running_loop().create_task(service.answer(request))

        first, beside = request_batch(1, 0), request_batch(1, 30)
        await reading.wait()
        await until(lambda: len(read()) == 2)
        other, gone, later = request_batch(2, 50), request_batch(2, 54), request_batch(1, 20)
        await until(lambda: held.calls.count(f"get {version_key(2)}") == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        gone.cancel()
        assert len(read()) == 2, "nothing of another version, and who came after that waits his turn"
        may_come.set()
        wanted = {first: 0, beside: 30, other: 50, later: 20}
        for task, number in wanted.items():
            assert numbers_of(await task) == list(range(number, number + 4))
        assert gone.cancelled()

    def read() -> list[str]:
        return [call for call in held.calls if "data/" in call]

    held = Held(open_store(url))
    with_service(serving(url), use, store=lambda _: held)


def test_a_sample_that_alone_is_too_large_is_referred_to_its_super_sample(url: str) -> None:
    response = batch(url, 0, "size=1", answer_bytes=100)
    assert (response.status, error_of(response)) == (413, "too-large")
    assert b"super-sample" in response.body


def test_values_of_every_kind_come_as_they_were_packed() -> None:
    url = "memory://every-kind-in-batches/ds"
    samples = samples_of(EVERY_KIND, 40, seed=3)
    with stoker.Packer(url, schema=EVERY_KIND, super_sample_bytes=700) as packer:
        packer.extend(samples)
    found = SuperSample(batch(url, 0, "size=40&shuffle=none").body)
    assert found.head.schema == EVERY_KIND
    for row, sample in enumerate(samples):
        for name, value in sample.items():
            assert np.array_equal(found[row][name], value)
