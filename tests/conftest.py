"""Settings of the whole suite, and buckets: each server starts at its first use and serves the whole run."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: small models gain nothing from idle threads

import gc
import logging
import signal
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from stoker import GcsOptions, HttpOptions, S3Options
from stoker_local import BucketConfig, LocalBucket, LocalGcs, running_bucket, running_gcs
from support.local_bucket import s3_client, s3_options
from support.stores import Deviation, Place

# Timed assertions fail on a busy machine and say nothing; the same examples every run keep a failure repeatable.
# HYPOTHESIS_PROFILE=explore draws fresh ones.
_QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("repeatable", _QUIET, derandomize=True)
settings.register_profile("explore", _QUIET, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell starts what it runs in the background with interrupts ignored, and so would be every program that a test
# starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests, which are nearly a million objects and never garbage, out of garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """The endpoint of a moto server with the bucket ``stoker``."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with s3_client(SimpleNamespace(url=url)) as client:
        client.create_bucket(Bucket="stoker")
    yield url
    server.stop()


@pytest.fixture(scope="session")
def local_bucket() -> Iterator[LocalBucket]:
    """A local bucket server in its default configuration, unshaped and faultless."""
    with running_bucket(BucketConfig()) as bucket:
        yield bucket


@pytest.fixture
def client(request: pytest.FixtureRequest, server: str) -> Iterator[Any]:
    """A boto3 client of the S3 server that a test is parametrized with: ``local-bucket`` or ``moto``."""
    is_moto = server == "moto"
    endpoint = (
        SimpleNamespace(url=request.getfixturevalue("moto_url")) if is_moto else request.getfixturevalue("local_bucket")
    )
    with s3_client(endpoint) as created:
        yield created


@pytest.fixture(scope="session")
def local_gcs() -> Iterator[LocalGcs]:
    """A local GCS in its default configuration."""
    with running_gcs() as gcs:
        yield gcs


@pytest.fixture(scope="session")
def gcs_emulator_url() -> Iterator[str]:
    """The endpoint of a gcp-storage-emulator with the bucket ``stoker``."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="stoker")
    server.start()
    port = server._api._httpd.server_address[1]  # it has no public way to tell
    yield f"http://127.0.0.1:{port}"
    server.stop()


def _memory_place(_: pytest.FixtureRequest) -> Place:
    return Place(name="memory", url="memory://contract", missing_url="memory://no-such-bucket")


def _folder_place(request: pytest.FixtureRequest) -> Place:
    folder: Path = request.getfixturevalue("tmp_path")
    return Place(name="folder", url=str(folder / "bucket"), missing_url=str(folder / "missing"))


def _moto_place(request: pytest.FixtureRequest) -> Place:
    return Place(
        name="moto",
        url="s3://stoker",
        missing_url="s3://no-such-bucket",
        options=s3_options(SimpleNamespace(url=request.getfixturevalue("moto_url"))),
        deviations=frozenset({Deviation.WRITES_WITHOUT_LOCK, Deviation.SLOW}),
    )


def _bucket_place(request: pytest.FixtureRequest) -> Place:
    return Place(
        name="local-bucket",
        url="s3://stoker",
        missing_url="s3://no-such-bucket",
        options=s3_options(request.getfixturevalue("local_bucket")),
    )


def _bucket_through_aiohttp(request: pytest.FixtureRequest) -> Place:
    direct = _bucket_place(request)
    assert isinstance(direct.options, S3Options)
    options = replace(direct.options, http=HttpOptions(transport="aiohttp"))
    return replace(direct, name="local-bucket-aiohttp", options=options)


def _emulator_place(request: pytest.FixtureRequest) -> Place:
    return Place(
        name="gcs-emulator",
        url="gs://stoker",
        missing_url="gs://no-such-bucket",
        options=GcsOptions(endpoint_url=request.getfixturevalue("gcs_emulator_url")),
        deviations=frozenset(Deviation) - {Deviation.WRITES_WITHOUT_LOCK},
    )


def _gcs_place(request: pytest.FixtureRequest) -> Place:
    return Place(
        name="local-gcs",
        url="gs://stoker",
        missing_url="gs://no-such-bucket",
        options=GcsOptions(endpoint_url=request.getfixturevalue("local_gcs").url),
    )


def _gcs_through_aiohttp(request: pytest.FixtureRequest) -> Place:
    direct = _gcs_place(request)
    assert isinstance(direct.options, GcsOptions)
    options = replace(direct.options, http=HttpOptions(transport="aiohttp"))
    return replace(direct, name="local-gcs-aiohttp", options=options)


_PLACES = {
    "memory": _memory_place,
    "folder": _folder_place,
    "moto": _moto_place,
    "local-bucket": _bucket_place,
    "local-bucket-aiohttp": _bucket_through_aiohttp,
    "gcs-emulator": _emulator_place,
    "local-gcs": _gcs_place,
    "local-gcs-aiohttp": _gcs_through_aiohttp,
}


@pytest.fixture(params=list(_PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    """Each place that a store can be opened in, with a prefix of the test's own."""
    return _PLACES[request.param](request).with_new_prefix()
