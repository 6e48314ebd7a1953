"""The function that serves by default, as Google runs it: behind identity tokens, on the functions framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest

import stoker
import stoker_functions.gcp
from stoker import GcsOptions, ServedOptions
from stoker.errors import CredentialsError
from stoker_local import GcsConfig, LocalGcs, running_server
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, GoogleSpec, function_cloud
from stoker_torch import Loader
from support.google_metadata import machine_account

DATASET = "gs://stoker/train"
SAMPLES = 60
IDENTITY = "MARKER-identity"
GOOGLE = ServedOptions(auth="google")
Clouds = tuple[LocalGcs, FunctionCloud]


@asynccontextmanager
async def both() -> AsyncIterator[Clouds]:
    serve = GoogleSpec(
        name="stoker-serve",
        source=str(stoker_functions.gcp.__file__),
        target="serve",
        environment={"STOKER_DATASETS": f"train={DATASET}"},
        concurrency=8,
        instances=1,
        token=IDENTITY,
    )
    config = FunctionCloudConfig(google=(serve,), init_seconds=60.0)
    async with LocalGcs(GcsConfig(buckets=("stoker",))) as gcs, function_cloud(config, gcs=gcs) as cloud:
        yield gcs, cloud


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of the function."""
    with running_server(both) as (gcs, cloud):
        schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (50_000,))}
        options = GcsOptions(endpoint_url=gcs.url)
        with stoker.Packer(DATASET, schema=schema, super_sample_bytes=4 << 20, options=options) as packer:
            packer.extend({"x": number, "image": np.full(50_000, number, "u1")} for number in range(SAMPLES))
        yield cloud.google_urls["stoker-serve"].rstrip("/")


def test_a_google_account_suffices_to_train_from_the_function(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        machine_account(monkeypatch, lambda: IDENTITY) as audiences,
        Loader(f"stoker+{url}/v1/train", batch_size=16, epochs=1, options=GOOGLE) as loader,
    ):
        batches = list(loader)
        assert set(audiences) == {url}
    assert sorted(number for batch in batches for number in batch["x"].tolist()) == list(range(SAMPLES))
    assert all((batch["image"][:, -1] == batch["x"]).all() for batch in batches)


def test_full_beyond_memory_takes_one_request_for_several_values(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        machine_account(monkeypatch, lambda: IDENTITY),
        Loader(
            f"stoker+{url}/v1/train", batch_size=2, shuffle="full", memory=3 << 20, epochs=2, options=GOOGLE
        ) as loader,
    ):
        batches = [batch for _ in range(2) for batch in loader]
        assert loader.stats().get_requests <= len(batches) * 1.02
    assert sorted(number for batch in batches for number in batch["x"].tolist()) == sorted([*range(SAMPLES)] * 2)
    assert all((batch["image"][:, -1] == batch["x"]).all() for batch in batches)


def test_an_account_refused_by_the_platform_is_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine_account(monkeypatch, lambda: "MARKER-of-another"), pytest.raises(PermissionError) as caught:
        stoker.open(f"stoker+{url}/v1/train", options=GOOGLE)
    assert "MARKER" not in str(caught.value)
    with pytest.raises(CredentialsError, match="auth='google'"):
        stoker.open(f"stoker+{url}/v1/train", options=ServedOptions(anonymous=True))


def test_a_server_carries_answers_in_pieces_and_those_without_a_body(url: str) -> None:
    async def main() -> None:
        headers = {"Authorization": f"Bearer {IDENTITY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            at = f"{url}/v1/train/super-samples/0?version=1"
            async with session.get(at) as whole:
                body = await whole.read()
                assert (whole.status, whole.headers["Content-Length"]) == (200, str(len(body)))
                assert len(body) > 2 << 20
            async with session.get(at, headers={"If-None-Match": whole.headers["ETag"]}) as known:
                assert (known.status, await known.read()) == (304, b"")
            async with session.head(at) as head:
                assert (head.status, await head.read()) == (200, b"")
            async with session.get(at, headers={"Range": "bytes=1000-2000000"}) as part:
                assert (part.status, await part.read()) == (206, body[1000:2_000_001])
            async with session.head(f"{url}/v1/train/nothing") as nothing:
                assert (nothing.status, await nothing.read()) == (404, b"")

    asyncio.run(main())
