"""One moment of the functions' demo, seen without a single request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker._cost.prices import Prices
from stoker._format.manifest import POINTER_KEY, Manifest
from stoker_local._bucket import LocalBucket
from stoker_local._demo.functions.bill import Bill
from stoker_local._demo.functions.config import DATASET_KEY
from stoker_local._demo.functions.images import RawImages
from stoker_local.functions import FunctionCloud, FunctionStatistics, Happening

__all__ = ["Observer", "Snapshot"]

_BUCKET, _PREFIX = DATASET_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment.

    Attributes:
        phase: what is being done, in a word.
        seconds: since the start.
        images: how many raw objects there are to be.
        put: how many there are.
        waiting: messages that no function has.
        delivered: messages that a function has, or had when it died.
        dead: messages that were given up.
        functions: figures by function.
        super_samples: in the bucket, visible or not.
        version: of the manifest, 0 before the first.
        visible_super_samples: that it has.
        visible: samples that it has.
        bill: up to this moment.
        happenings: all that has happened to instances, oldest first.
    """

    phase: str
    seconds: float
    images: int
    put: int
    waiting: int
    delivered: int
    dead: int
    functions: Mapping[str, FunctionStatistics]
    super_samples: int
    version: int
    visible_super_samples: int
    visible: int
    bill: Bill
    happenings: Sequence[Happening]


class Observer:
    """Looks at the clouds from inside, so that looking costs nothing and is on no bill.

    Attributes:
        phase: what is being done, in a word.
    """

    def __init__(self, bucket: LocalBucket, cloud: FunctionCloud, images: RawImages, prices: Prices) -> None:
        self.phase = ""
        self._bucket, self._cloud, self._images, self._prices = bucket, cloud, images, prices
        self._started_at = asyncio.get_running_loop().time()
        self._manifest: tuple[str, Manifest | None] = ("", None)

    def look(self) -> Snapshot:
        """Return this moment."""
        queue, functions, manifest = self._cloud.queues["raw"], self._cloud.statistics(), self._newest()
        counts = self._bucket.counts.as_dict()
        return Snapshot(
            phase=self.phase,
            seconds=asyncio.get_running_loop().time() - self._started_at,
            images=len(self._images),
            put=self._images.put,
            waiting=len(queue.bodies),
            delivered=len(queue) - len(queue.bodies),
            dead=len(self._cloud.queues["dead"]),
            functions=functions,
            super_samples=sum(key.startswith(f"{_PREFIX}data/") for key in self._bucket.objects[_BUCKET]),
            version=0 if manifest is None else manifest.version,
            visible_super_samples=0 if manifest is None else len(manifest),
            visible=0 if manifest is None else manifest.samples,
            bill=Bill.of(functions, counts, self._prices, raw_puts=self._images.begun),
            happenings=self._cloud.events(),
        )

    def _newest(self) -> Manifest | None:
        stored = self._bucket.objects[_BUCKET].get(f"{_PREFIX}{POINTER_KEY}")
        if stored is not None and stored.tag != self._manifest[0]:
            self._manifest = stored.tag, Manifest.from_bytes(stored.data)
        return self._manifest[1]
