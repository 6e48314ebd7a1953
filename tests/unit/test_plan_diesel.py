"""DIESEL's experiments: chunks beside files, and metadata in one object beside lists and servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from stoker._diagnostics.latency import Constant
from stoker._format.manifest import POINTER_KEY
from stoker._format.versions import read_manifest
from stoker.errors import NotFoundError
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import BucketView, SimulatedBucket, synthetic_manifest


def held(size: int, **model: Any) -> tuple[BucketView, bytes]:
    data = synthetic_manifest(super_samples=size, samples=1, super_sample_bytes=8192).to_bytes()
    sizes = {POINTER_KEY: len(data)}
    bucket = SimulatedBucket(
        BucketModel(first_byte=Constant(0.1), **model), sizes.__getitem__, objects={POINTER_KEY: data}
    )
    return BucketView(bucket, random.Random(1)), data


def test_a_manifest_is_read_as_a_run_reads_it_in_the_time_that_its_bytes_take() -> None:
    view, data = held(1000, connection_bytes_per_second=1e6)

    async def main() -> tuple[bytes, float]:
        manifest = await read_manifest(view)
        return manifest.to_bytes(), asyncio.get_running_loop().time()

    read, seconds = run_virtual(main())
    assert read == data
    assert seconds == pytest.approx(0.1 + len(data) / 1e6)


def test_a_large_manifest_is_read_in_ranges_at_once() -> None:
    view, data = held(700_000, connection_bytes_per_second=10e6)
    assert len(data) > 3 * (8 << 20) - (1 << 20)

    async def main() -> tuple[int, float]:
        return len(await read_manifest(view)), asyncio.get_running_loop().time()

    rows, seconds = run_virtual(main())
    assert rows == 700_000
    assert seconds < 0.6 * len(data) / 10e6


def test_what_is_not_held_is_not_found() -> None:
    view, _ = held(1)
    with pytest.raises(NotFoundError):
        run_virtual(view.get("other"))
