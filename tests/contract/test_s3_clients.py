"""Clients of S3 that are not ours, on the local bucket: they read what stoker writes, and stoker what they write."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
import safetensors.numpy

import stoker
from stoker.cli import main
from stoker_local import LocalBucket, running_bucket
from support.s3_clients import CLIENTS, S3Client, open_client

DATA = Random(1).randbytes(11 << 20)
SCHEMA = {"data": stoker.Bytes(), "number": stoker.Array("int64")}


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalBucket]:
    with running_bucket() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(params=CLIENTS, scope="module")
def client(request: pytest.FixtureRequest, bucket: LocalBucket) -> Iterator[S3Client]:
    with open_client(request.param, bucket) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(bucket: LocalBucket) -> None:
    bucket.service.buckets["stoker"].objects.clear()
    bucket.counts.reset()


def test_what_it_writes_in_parts_it_reads_whole_and_by_ranges(client: S3Client, bucket: LocalBucket) -> None:
    client.write("folder/large", DATA)
    assert (bucket.counts.requests["UploadPart"], bucket.counts.requests["CompleteMultipartUpload"]) == (3, 1)
    assert bytes(bucket.objects["stoker"]["folder/large"].data) == DATA
    assert client.read("folder/large") == DATA
    for start, end in ((0, 10), (5 << 20, (5 << 20) + 1), (len(DATA) - 7, len(DATA))):
        assert client.read_range("folder/large", start, end) == DATA[start:end]
    assert not bucket.service.buckets["stoker"].uploads


def test_what_it_writes_it_lists_and_deletes(client: S3Client, bucket: LocalBucket) -> None:
    keys = [f"a b/ü+{number}%" for number in range(3)]
    for key in (*keys, "other"):
        client.write(key, key.encode())
    assert client.list("a b/") == keys
    client.delete(keys[1])
    assert client.list("a b/") == [keys[0], keys[2]]
    assert client.read(keys[2]) == keys[2].encode()
    assert set(bucket.objects["stoker"]) == {keys[0], keys[2], "other"}


def test_a_listing_of_more_than_a_page_is_whole(client: S3Client, bucket: LocalBucket) -> None:
    for number in range(1203):
        bucket.put("stoker", f"many/{number:04}", b"")
    assert len(client.list("many/")) == 1203
    assert bucket.counts.requests["ListObjectsV2"] == 2


def test_it_reads_a_data_set_of_stokers(client: S3Client) -> None:
    samples = [{"data": DATA[start:end], "number": start} for start, end in pairwise(range(0, 200_001, 1000))]
    with stoker.Packer("s3://stoker/set", schema=SCHEMA, super_sample_bytes=50_000) as packer:
        for sample in samples:
            packer.write(sample)
    packed = [client.read(key) for key in client.list("set/data/")]
    assert len(packed) > 3
    numbers = [number for data in packed for number in safetensors.numpy.load(data)["number"].tolist()]
    assert sorted(numbers) == [sample["number"] for sample in samples]


def test_stoker_packs_what_it_writes(client: S3Client) -> None:
    files = {f"raw/{number}.bin": DATA[number * 100 : number * 200] for number in range(1, 6)}
    for key, data in files.items():
        client.write(key, data)
    assert main(["pack", "s3://stoker/raw", "s3://stoker/set", "--kind", "files", "--quiet"]) == 0
    with stoker.open("s3://stoker/set") as dataset:
        found = [dataset[number] for number in range(len(dataset))]
    assert sorted(bytes(sample["data"]) for sample in found) == sorted(files.values())
