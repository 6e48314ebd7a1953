"""The batch pipeline of a run with materialized epochs: each is read from its own objects, or else as ``full``.

Both ways deliver the same: positions are sharded by lanes, and each position is the same sample. So each rank decides
on its own, for every epoch and every start, and again within an epoch if its objects are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingReader
from stoker._base.sizes import format_count
from stoker._cache.index import TierSet
from stoker._fetch.batch_stream import Batch, StoredDataset
from stoker._fetch.pipeline import BatchPipeline, OpenDataset
from stoker._format.manifest import Manifest, version_key
from stoker._order.epoch_layout import MAX_EPOCH, EpochLayout
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import (
    ChecksumError,
    FormatError,
    MemoryBudgetError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    StokerError,
)

_log = logging.getLogger("stoker")
_LOOKAHEAD_TIMEOUT_SECONDS = 2.0
"""Time limit to read the next epoch's manifest, while a gathered batch waits for it."""
EPOCH_VERSION = 1
"""Version of a materialized epoch's manifest; there is only one."""


async def load_manifest(store: Readable, key: str) -> tuple[Manifest, ObjectInfo]:
    """Return a manifest and its object information: one GET, or two if the first response is corrupt.

    Raises:
        NotFoundError: the object does not exist.
        FormatError: the object is not a manifest.
        ChecksumError: the object is corrupt.
        StoreError: the store failed.
    """
    reader = RetryingReader(store)
    data, info = await reader.get(key)
    try:
        return Manifest.from_bytes(data), info
    except ChecksumError:
        data, info = await reader.get(key)
        return Manifest.from_bytes(data), info


async def read_epoch(store: Store, layout: EpochLayout) -> Manifest | None:
    """Return the manifest of a materialized epoch; None if there is no usable one. One GET, and no LIST.

    Raises:
        StoreError: the store failed.
    """
    folder = FolderStore(store, layout.folder)
    try:
        manifest, _ = await load_manifest(folder, version_key(EPOCH_VERSION))
        _check_manifest(manifest, layout)
    except NotFoundError:
        return None
    except (ChecksumError, FormatError, PermissionDeniedError) as error:
        # Without permission to list, a store answers "permission denied" for objects that do not exist.
        _log.warning("the materialized epoch %s cannot be used: %s", folder.url, error)
        return None
    return manifest


def _check_manifest(manifest: Manifest, layout: EpochLayout) -> None:
    if manifest.dataset != layout.dataset or manifest.schema != layout.manifest.schema:
        raise FormatError("its manifest belongs to another data set, or has another schema")
    if manifest.samples != layout.samples:
        raise FormatError(f"its manifest has {manifest.samples} samples, but the data set has {layout.samples}")


class MaterializedPipeline(BatchPipeline):
    """A pipeline for a ``full`` order that is sharded by lanes; a stream ends with its epoch.

    An epoch's own objects are read only once, so tiers are used only for the super-samples of the data set.

    Raises:
        MemoryBudgetError: the memory is too small for an epoch's own objects, assuming that they are as large as the
            data set's.
        ConfigError: a column is not in the schema.

    Attributes:
        check_fallback: called with the pipeline before an epoch is read as ``full``; raises MemoryBudgetError to
            refuse it.
    """

    store: Store
    check_fallback: Callable[[BatchPipeline], object] = staticmethod(lambda pipeline: None)

    def _open_initial(self) -> OpenDataset:
        return self._open_epoch(StoredDataset(self.store, self.manifest))

    def _open_current(self) -> OpenDataset:
        epoch = self._position[0]
        origin = self._find_epoch(epoch)
        if origin is not None:
            return self._open_epoch(origin)
        self._warn_missing(epoch)
        return self._open_full()

    def _open_epoch(self, origin: StoredDataset) -> OpenDataset:
        """Return the data set of an epoch's own objects, which are stored in its order."""
        order = replace(self.config.order, shuffle="none")
        try:
            return self._open(origin, replace(self.config, order=order, held_bytes=self.manifest.file_bytes), TierSet())
        except MemoryBudgetError as error:
            raise MemoryBudgetError(f"an epoch's own objects are read in their order: {error}") from None

    def _open_full(self) -> OpenDataset:
        before = self.source
        try:
            self.source = super()._open_initial()
            self.check_fallback(self)
        except MemoryBudgetError as error:
            self.source = before
            raise MemoryBudgetError(
                f"epoch {self._position[0]} has no objects of its own, and cannot be read as 'full' instead: {error}"
            ) from None
        return self.source

    def _find_epoch(self, epoch: int, timeout_seconds: float | None = None) -> StoredDataset | None:
        """Return a materialized epoch; None if the epoch is not materialized.

        Raises:
            TimeoutError: the bucket did not answer in time.
            StoreError: the store failed.
        """
        if epoch > MAX_EPOCH:
            return None
        order = self.config.order
        layout = EpochLayout(self.manifest, seed=order.seed, lanes=order.lanes, epoch=epoch)

        async def read() -> StoredDataset | None:
            async with asyncio.timeout(timeout_seconds):
                manifest = await read_epoch(self.store, layout)
            return None if manifest is None else StoredDataset(FolderStore(self.store, layout.folder), manifest, layout)

        return self._thread.run(read())

    def _warn_missing(self, epoch: int) -> None:
        url, version, order = self.store.url, self.manifest.version, self.config.order
        if url.startswith("stoker+"):
            _log.warning("%s: a function serves no materialized epochs; epoch %d is read as 'full'", url, epoch)
            return
        _log.warning(
            "%s has no materialized epoch %d of version %d for seed %d and %s: it is read as 'full'. To make it: "
            "stoker shuffle %s --at %d --seed %d --lanes %d --epoch %d",
            *(url, epoch, version, order.seed, format_count(order.lanes, "lane")),
            *(url, version, order.seed, order.lanes, epoch),
        )

    @property
    def _stream_end_epoch(self) -> int:
        return self._position[0] + 1

    def next(self) -> Batch | None:
        """Return the next batch; None at the end of the run, or if it started at the end of an epoch.

        If objects of a materialized epoch are missing or corrupt, the rest of the epoch is read as ``full``.

        Raises:
            StokerError: a super-sample of the batch could not be read; names it. Or the pipeline was stopped.
        """
        self._check_started()
        if self.position is None:
            self._start_at_position()
        try:
            batch = super().next()
        except StokerError as error:
            if not self.is_materialized or not _is_lost(error):
                raise
            _log.warning("the rest of epoch %d, from position %d on, is read as 'full': %s", *self._position, error)
            self._start_stream(self._open_full())
            batch = super().next()
        if batch is not None and batch.is_last:
            self._end_stream()
            self._start_next_epoch()
        return batch

    def _start_next_epoch(self) -> None:
        """Start fetching the next epoch while the last batch of the previous one is used, if it is materialized.

        An epoch that is not materialized yet may be so when its first batch is requested; only then is that decided and
        logged. A bucket that does not answer delays the last batch only briefly, and no error here loses the batch.
        """
        if self._is_at_end:
            return
        epoch = self._position[0]
        try:
            origin = self._find_epoch(epoch, timeout_seconds=_LOOKAHEAD_TIMEOUT_SECONDS)
            if origin is not None:
                self._start_stream(self._open_epoch(origin))
        except Exception as error:  # noqa: BLE001 - the batch must be returned; the epoch's first batch raises it again
            _log.info("epoch %d is not fetched ahead: %s: %s", epoch, type(error).__name__, error)


def _is_lost(error: StokerError) -> bool:
    """Return whether an object is missing, replaced or corrupt, so that other objects may still be readable.

    Without permission to list, a store answers "permission denied" for a missing object.
    """
    lost = NotFoundError, PermissionDeniedError, ObjectChangedError, FormatError, ChecksumError
    return isinstance(error, lost) or isinstance(error.__cause__, ChecksumError)
