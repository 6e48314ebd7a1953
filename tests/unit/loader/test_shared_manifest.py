"""The manifest that loaders of a job read once: who uses what another one has read, and who reads it again."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker._cluster.shared_reads import SharedReads
from stoker_local import LocalBucket, running_bucket
from stoker_torch import Loader, _shared_manifest
from support.cluster import node_processes, own_runtime_folder
from support.local_bucket import s3_options

URL, CLUSTER = "s3://stoker/train", "memory:?limit=32MB"
SCHEMA = {"id": stoker.Array("int64")}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBucket]:
    monkeypatch.setattr(_shared_manifest, "_used", {})
    with own_runtime_folder(), running_bucket() as bucket:
        extend(bucket, 1)
        yield bucket


def extend(bucket: LocalBucket, samples: int) -> None:
    """Commit a version with more samples."""
    with stoker.Packer(URL, schema=SCHEMA, mode="overwrite", options=s3_options(bucket)) as packer:
        packer.extend({"id": number} for number in range(samples))
    bucket.counts.reset()


def opened(bucket: LocalBucket, url: str = URL, *, world_size: int = 2, cluster: str | None = CLUSTER) -> int:
    """Open the data set as a rank does; return the version."""
    options = s3_options(bucket) if url == URL else None
    with Loader(url, batch_size=1, rank=0, world_size=world_size, cluster=cluster, options=options) as loader:
        return loader.manifest.version


def reads(bucket: LocalBucket) -> int:
    return bucket.counts.requests["GetObject"]


def test_another_process_uses_what_one_has_read(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(bucket) == 1
    monkeypatch.setattr(_shared_manifest, "_used", {})  # of another process
    assert opened(bucket) == 1
    assert reads(bucket) == 1
    assert len(node_processes()) == 1


def test_a_process_that_opens_the_data_set_again_gets_what_was_committed_meanwhile(bucket: LocalBucket) -> None:
    assert opened(bucket) == 1
    extend(bucket, 5)
    assert opened(bucket) == 2
    assert opened(bucket) == 2
    assert reads(bucket) == 2


def test_what_was_read_before_a_process_began_or_long_ago_is_not_used(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(bucket) == 1
    extend(bucket, 5)
    monkeypatch.setattr(_shared_manifest, "_used", {})
    with monkeypatch.context() as patch:
        patch.setattr(_shared_manifest, "process_seconds", lambda: 0.0)
        assert opened(bucket) == 2
    extend(bucket, 5)
    monkeypatch.setattr(_shared_manifest, "_used", {})
    monkeypatch.setattr(_shared_manifest, "_MAX_AGE_SECONDS", 0.0)
    assert opened(bucket) == 3


def test_another_job_reads_for_itself(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert opened(bucket) == 1
    monkeypatch.setattr(_shared_manifest, "_used", {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert opened(bucket) == 1
    assert reads(bucket) == 2


def test_one_process_or_one_without_a_cache_process_reads_for_itself(bucket: LocalBucket) -> None:
    assert opened(bucket, world_size=1) == opened(bucket, cluster=None) == 1
    assert reads(bucket) == 2
    assert not node_processes()


@pytest.mark.parametrize("url", ["", "memory://own/train"])
def test_what_is_on_the_machine_is_read_there(url: str, bucket: LocalBucket, tmp_path: Path) -> None:
    place = url or str(tmp_path)
    with stoker.Packer(place, schema=SCHEMA) as packer:
        packer.extend([{"id": 1}])
    assert opened(bucket, place) == 1
    assert not node_processes()


def test_a_damaged_or_missing_data_set_is_an_error_of_each_loader(bucket: LocalBucket) -> None:
    for _ in range(2):
        with pytest.raises(stoker.NotFoundError, match="there is no data set"):
            Loader("s3://stoker/none", batch_size=1, rank=0, world_size=2, cluster=CLUSTER, options=s3_options(bucket))


def test_a_process_that_commits_gets_its_commit_though_another_one_has_just_read(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(bucket) == 1
    monkeypatch.setattr(_shared_manifest, "_used", {})  # the commit is of a process that has not opened the data set
    extend(bucket, 5)
    assert opened(bucket) == 2


def test_another_endpoint_is_another_data_set(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(bucket) == 1
    monkeypatch.setattr(_shared_manifest, "_used", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the options' is used
    assert opened(bucket) == 1
    assert reads(bucket) == 2


@pytest.mark.parametrize("length", [32, 64])
def test_any_secret_will_do(length: int, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CLUSTER_SECRET", secrets.token_urlsafe(length))
    assert opened(bucket) == 1
    monkeypatch.setattr(_shared_manifest, "_used", {})
    assert opened(bucket) == 1
    assert reads(bucket) == 1


def test_a_manifest_that_makes_no_sense_is_read_from_the_bucket(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lie(*_: object, **__: object) -> tuple[bytes, float]:
        return b"no manifest", 0.0

    monkeypatch.setattr(SharedReads, "read", lie)
    assert opened(bucket) == 1
    assert reads(bucket) == 1
