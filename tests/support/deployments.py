"""Deployments of functions over stores in memory, with raw objects to pack."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from stoker import open_store
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._format.supersample import SuperSample
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo, Store
from stoker.testing import WatchedStore
from stoker_functions._deployment import Deployment, DeploymentSettings, IngestSettings, InvocationDeadline
from stoker_functions._ingest import NotifiedObject

_serial = itertools.count()
PLENTY_SECONDS = 900.0


class Place:
    """A bucket of raw objects, a data set, and deployments that may access them.

    Attributes:
        raw: URL of the raw objects.
        dataset: URL of the data set.
    """

    def __init__(self) -> None:
        number = next(_serial)
        self.raw, self.dataset = f"memory://functions-raw-{number}", f"memory://functions-data-{number}/train"

    def deployment(self, wrap: Callable[[Store], Store] = lambda store: store, **changes: Any) -> Deployment:
        """Return the deployment of a new instance; ``wrap`` wraps each store that it opens."""
        given = {
            "datasets": {"train": self.dataset},
            "sources": (self.raw,),
            "ingest": IngestSettings(dataset="train", super_sample_bytes=2000),
            "memory_bytes": 512 << 20,
            **changes,
        }
        return Deployment(DeploymentSettings(**given), open_url=lambda url: wrap(open_store(url)))

    async def put(self, numbers: Iterable[int], value_bytes: int = 300) -> list[ObjectInfo]:
        """Write raw objects whose content is derived from their number."""
        store = open_store(self.raw)
        return [await store.put(f"{n:05d}.bin", content(n, value_bytes)) for n in numbers]

    def notified(self, objects: Iterable[ObjectInfo]) -> list[NotifiedObject]:
        """Return the notifications that a bucket would send for raw objects."""
        return [NotifiedObject(self.raw, info) for info in objects]

    def part(self, objects: Iterable[ObjectInfo], **changes: Any) -> SourcePart:
        """Return a part of raw objects, packed into super-samples of about six."""
        given = {
            "dataset": self.dataset,
            "dataset_id": "d" * 16,
            "source": self.raw,
            "kind": "files",
            "schema": files_schema(),
            "super_sample_bytes": 2000,
            "objects": tuple(objects),
        }
        return SourcePart(**{**given, **changes})

    async def manifest(self) -> Manifest | None:
        """Return the newest version of the data set."""
        return await versions.find_newest_manifest(open_store(self.dataset))

    async def numbers(self) -> list[int]:
        """Return the numbers of the raw objects in the data set, in its order; checks every value."""
        manifest = await self.manifest()
        found: list[int] = []
        store = open_store(self.dataset)
        for row in range(0 if manifest is None else len(manifest)):
            assert manifest is not None
            data, _ = await store.get(manifest.key(row))
            sample = SuperSample(data)
            sample.verify()
            for index in range(len(sample)):
                value = sample[index]
                number = int(value["path"].removesuffix(".bin"))
                assert bytes(value["data"]) == content(number, len(value["data"]))
                found.append(number)
        return found

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of the data set's objects."""
        return [info.key async for info in open_store(self.dataset).list(prefix)]


class DelayedStore(WatchedStore):
    """Delays every operation by ``seconds``."""

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__(store)
        self._seconds = seconds

    async def before(self, number: int, operation: str, key: str) -> None:
        await asyncio.sleep(self._seconds)


def content(number: int, value_bytes: int = 300) -> bytes:
    """Return the content of a raw object."""
    return (f"raw object {number} " * (value_bytes // 8)).encode()[:value_bytes]


def plenty() -> InvocationDeadline:
    """Return a deadline in the far future."""
    return InvocationDeadline.after(PLENTY_SECONDS)
