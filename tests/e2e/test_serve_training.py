"""Training, and all else that reads, from a data set that a function serves over HTTP: every sample exactly once."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import stoker
from stoker import FetchConfig, Order, OrderConfig, ServedOptions, cli
from stoker._stores.access_token import Grant
from stoker.errors import BucketNotFoundError, CredentialsError, OutdatedFunctionWarning, PermissionDeniedError
from stoker_functions.serve import HttpError, Request, Response, TokenKeys
from stoker_local import LocalBucket
from stoker_torch import Loader
from support.datasets import SCHEMA, numbers, pack_numbers, sample_of
from support.local_bucket import s3_options
from support.serving_host import running_service

SAMPLES = 400


@pytest.mark.parametrize("shuffle", ["none", "window", "full"])
def test_an_epoch_over_http_is_the_orders(shuffle: Any) -> None:
    with (
        running_service({"train": pack_numbers(SAMPLES)}) as hosted,
        Loader(hosted.dataset("train"), batch_size=32, shuffle=shuffle, seed=5, epochs=2) as loader,
    ):
        for epoch in range(2):
            order = Order(loader.manifest.rows.samples, OrderConfig(seed=5, shuffle=shuffle), epoch)
            assert numbers(loader) == order.at(0, SAMPLES).tolist()
        assert loader.stats().dollars == 0
        assert set(hosted.statuses) <= {200, 206}


def test_an_epoch_over_redirects_to_the_bucket_is_the_orders(local_bucket: LocalBucket) -> None:
    options = s3_options(local_bucket)
    url = "s3://stoker/served-training"
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=2000, options=options) as packer:
        packer.extend(map(sample_of, range(SAMPLES)))
    with (
        running_service({"train": url}, options, answer_bytes=1000) as hosted,
        Loader(hosted.dataset("train"), batch_size=32, seed=5, epochs=1) as loader,
    ):
        order = Order(loader.manifest.rows.samples, OrderConfig(seed=5), 0)
        assert numbers(loader) == order.at(0, SAMPLES).tolist()
        assert hosted.statuses.count(307) >= len(loader.manifest)


SMALL_BUDGET = 11 << 20  # for less than half of the samples of ``pack_beyond_memory``


def pack_beyond_memory() -> str:
    """Pack 24 MB of samples with two large columns, one ragged, in 24 super-samples, and return the URL."""
    url, rng = "memory://served-full/ds", np.random.default_rng(0)
    schema = {"x": stoker.Array("int64"), "text": stoker.Bytes(), "image": stoker.Array("uint8", (40, 300))}
    with stoker.Packer(url, schema=schema, super_sample_bytes=1 << 20) as packer:
        for number in range(1000):
            image = rng.integers(0, 256, (40, 300), np.uint8)
            packer.write({"x": number, "text": rng.bytes(int(rng.integers(0, 24_000))), "image": image})
    return url


def read_full(url: str) -> tuple[list[bytes], list[str]]:
    """Return the bytes of each batch of two epochs of ``full``, and the warnings."""
    with (
        warnings.catch_warnings(record=True) as caught,
        Loader(url, batch_size=21, shuffle="full", seed=5, epochs=2, memory=SMALL_BUDGET) as loader,
    ):
        warnings.simplefilter("always")
        batches = [
            b"".join([*batch["text"], batch["x"].numpy().tobytes(), batch["image"].numpy().tobytes()])
            for _ in range(2)
            for batch in loader
        ]
        return batches, [str(warning.message) for warning in caught if warning.category is OutdatedFunctionWarning]


def refuse_post(request: Request, _before: int, response: Response) -> Response:
    """Answer as functions of versions that have no request for values."""
    if request.method != "POST":
        return response
    return HttpError(405, "method-not-allowed", "only GET and HEAD are answered").response()


@pytest.fixture(scope="module")
def beyond_memory() -> tuple[str, list[bytes]]:
    """A data set, and its batches as read from where it is packed."""
    url = pack_beyond_memory()
    return url, read_full(url)[0]


def test_full_beyond_memory_takes_at_most_one_request_a_batch(beyond_memory: tuple[str, list[bytes]]) -> None:
    url, wanted = beyond_memory
    with running_service({"train": url}) as hosted:
        batches, warned = read_full(hosted.dataset("train"))
        assert batches == wanted
        assert len(hosted.requests) <= len(batches) * 1.02
        assert {request.path.rpartition("/")[2] for request in hosted.requests} == {"manifest", "values"}
        assert not warned


def test_batches_larger_than_an_answer_take_several_requests(beyond_memory: tuple[str, list[bytes]]) -> None:
    url, wanted = beyond_memory
    with running_service({"train": url}, answer_bytes=100_000) as hosted:
        assert read_full(hosted.dataset("train"))[0] == wanted
        answers = sum(request.method == "POST" for request in hosted.requests)
        assert 2 * 24_000_000 / 100_000 <= answers <= 3 * 24_000_000 / 100_000, "two epochs of 24 MB"
        assert 413 not in hosted.statuses[3:], "the limit is known from the first answer on"


def test_a_function_that_has_no_request_for_values_is_read_by_ranges(beyond_memory: tuple[str, list[bytes]]) -> None:
    url, wanted = beyond_memory
    with running_service({"train": url}, spoil=refuse_post) as hosted:
        batches, warned = read_full(hosted.dataset("train"))
        assert batches == wanted
        assert len(warned) == 1
        assert "deploy the function of this version" in warned[0]
        assert [request.method for request in hosted.requests].count("POST") == 1
        assert hosted.statuses.count(206) > len(batches)


def test_full_beyond_memory_is_exact_over_a_service_that_fails(beyond_memory: tuple[str, list[bytes]]) -> None:
    url, wanted = beyond_memory
    with running_service({"train": url}, spoil=fail_at_first) as hosted:
        assert read_full(hosted.dataset("train"))[0] == wanted
        assert 503 in hosted.statuses


def fail_at_first(request: Request, before: int, response: Response) -> Response:
    """Refuse first requests, truncate their bytes, or flip a bit of them."""
    body = bytes(response.body)
    way = crc32(f"{request.path} {request.headers.get('range')}".encode() + request.body) % 4
    if before or way == 0 or response.status >= 400:
        return response
    if way == 1 or len(body) < 2:
        return HttpError(503, "unavailable", "later", headers={"Retry-After": "0"}).response()
    if way == 2:
        return replace(response, body=body[: len(body) // 2])
    return replace(response, body=body[:-1] + bytes([body[-1] ^ 1]))


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_an_epoch_is_exact_over_a_service_that_fails_at_first(shuffle: Any) -> None:
    fetch = FetchConfig(backoff_base_seconds=0.001, hedge=False)
    url = pack_numbers(SAMPLES, super_sample_bytes=800)
    with (
        running_service({"train": url}, spoil=fail_at_first) as hosted,
        Loader(hosted.dataset("train"), batch_size=32, seed=5, epochs=1, shuffle=shuffle, fetch=fetch) as loader,
    ):
        order = Order(loader.manifest.rows.samples, OrderConfig(seed=5, shuffle=shuffle), 0)
        assert numbers(loader) == order.at(0, SAMPLES).tolist()
        assert loader.stats().retries > len(loader.manifest) / 2
        assert 503 in hosted.statuses


def test_samples_by_number_and_the_command_line_read_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with running_service({"train": pack_numbers(60)}) as hosted:
        with stoker.open(hosted.dataset("train")) as dataset:
            assert len(dataset) == 60
            for number, found in zip((7, 59, 7), dataset.samples([7, -1, 7]), strict=True):
                assert np.array_equal(found["tokens"], sample_of(number)["tokens"])
            assert dataset.stats().dollars == 0
        for command in (["info"], ["verify", "--deep"], ["head", "-n", "2"]):
            assert cli.main([command[0], hosted.dataset("train"), *command[1:]]) == 0
        assert "60" in capsys.readouterr().out


def test_only_a_token_allows_training(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = TokenKeys({"k": b"s" * 32})
    now_seconds = int(time.time())

    def token(*datasets: str, start: int = now_seconds) -> str:
        return keys.sign(Grant(datasets=datasets, not_before_seconds=start, expires_seconds=start + 600))

    url = pack_numbers(60)
    with running_service({"train": url, "val": url}, token_keys=keys, with_token=True) as hosted:
        monkeypatch.setenv("STOKER_TOKEN", token("train"))
        with Loader(hosted.dataset("train"), batch_size=16, epochs=1) as loader:
            assert sorted(numbers(loader)) == list(range(60))
        with pytest.raises(PermissionDeniedError):
            stoker.open(hosted.dataset("val"))
        options = ServedOptions(token=token("val", "nothing"))
        stoker.open(hosted.dataset("val"), options=options).close()
        with pytest.raises(BucketNotFoundError):
            stoker.open(hosted.dataset("nothing"), options=options)
        for bad in (token("train", start=now_seconds - 4000), "nonsense"):
            with pytest.raises(CredentialsError, match="STOKER_TOKEN"):
                stoker.open(hosted.dataset("train"), options=ServedOptions(token=bad))
