"""Short ways to pack and read a data set, and a store that delays uploads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pytest

from stoker import Array, Bytes, RetryPolicy, Schema, open_store
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._format.supersample import SuperSample
from stoker._pack.packer import AsyncPacker
from stoker._pack.plan import PackConfig
from stoker.abc import Store
from stoker.testing import WatchedStore

T = TypeVar("T")

SCHEMA = Schema({"data": Bytes(), "label": Array("int64")})
NO_WAIT = RetryPolicy(attempts=8, backoff_base_seconds=0.0, backoff_cap_seconds=0.0, seed=1)
_serial = itertools.count()


def fresh_store() -> Store:
    """Return an empty store in memory."""
    return open_store(f"memory://packing/{next(_serial)}")


def config(**changes: Any) -> PackConfig:
    """Return settings with super-samples of three samples of SCHEMA."""
    settings = {"schema": SCHEMA, "super_sample_bytes": 400, "source": "numbers", "concurrency": 3, "retry": NO_WAIT}
    return PackConfig(**{**settings, **changes})


def numbered_samples(count: int, start: int = 0) -> list[dict[str, object]]:
    """Return samples whose label is their number."""
    return [{"data": f"sample {i} ".encode() * 9, "label": i} for i in range(start, start + count)]


async def pack(store: Store, samples: Iterable[Mapping[str, object]], **changes: Any) -> Manifest:
    """Pack and commit samples."""
    async with AsyncPacker(store, config(**changes)) as packer:
        for sample in samples:
            await packer.write(sample)
    assert packer.manifest is not None
    return packer.manifest


def failing_after(samples: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the samples, then raise an error of a source."""
    yield from samples
    raise ZeroDivisionError


async def pack_interrupted(store: Store, samples: list[dict[str, object]], **changes: Any) -> None:
    """Pack the samples of a source that fails at its end."""
    with pytest.raises(ZeroDivisionError):
        await pack(store, failing_after(samples), **changes)


def puts(store: WatchedStore, prefix: str = "data/") -> list[str]:
    """Return the writes below a prefix, in order."""
    return [call for call in store.calls if call.startswith(f"put {prefix}")]


async def contents(store: Store, manifest: Manifest | None = None) -> list[dict[str, Any]]:
    """Return every sample of a data set, in order."""
    manifest = manifest or await versions.read_manifest(store)
    samples: list[dict[str, Any]] = []
    for row in range(len(manifest)):
        data, _ = await store.get(manifest.key(row))
        super_sample = SuperSample(data)
        samples += [super_sample[i] for i in range(len(super_sample))]
    return samples


async def labels(store: Store) -> list[int]:
    """Return the labels of a data set's samples, in order."""
    return [int(sample["label"]) for sample in await contents(store)]


async def read_objects(store: Store, prefix: str = "") -> dict[str, bytes]:
    """Return every object under a prefix."""
    return {info.key: (await store.get(info.key))[0] async for info in store.list(prefix)}


class SlowStore(WatchedStore):
    """Blocks every upload of a super-sample until its event is set."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.uploading = 0
        self.most_uploading = 0

    async def before(self, number: int, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("data/"):
            self.uploading += 1
            self.most_uploading = max(self.most_uploading, self.uploading)
            await self.gate.wait()
            self.uploading -= 1
