"""The batch pipeline of a run whose epochs are materialized: each is read from its own objects, else as ``full``.

The two deliver the same: positions are dealt by lanes in both, and a position is the same sample. So it is decided
anew for every epoch and every start, by each rank for itself, and in the middle of an epoch if its objects are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingReader
from stoker._base.sizes import counted
from stoker._cache.keeper import Nearer
from stoker._fetch.batch_stream import Batch, Origin
from stoker._fetch.pipeline import BatchPipeline, OpenDataSet
from stoker._format.manifest import Manifest, version_key
from stoker._order.order import MAX_EPOCH, EpochLayout
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import (
    BudgetError,
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    StokerError,
)

_log = logging.getLogger("stoker")
_AHEAD_SECONDS = 2.0
"""In which the next epoch's manifest must be read while a gathered batch waits for it."""
EPOCH_VERSION = 1
"""The only one that an epoch's data set has."""


async def stored_manifest(store: Readable, key: str) -> tuple[Manifest, ObjectInfo]:
    """Return a manifest, and what the store says of it: one GET, or two where it was damaged on its way.

    Raises:
        NotFoundError: there is none.
        FormatError: what is there is no manifest.
        ChecksumError: it is damaged.
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
    """Return the manifest of an epoch, None if there is none, or none that can be used: one GET, nothing is listed.

    Raises:
        StoreError: the store failed.
    """
    folder = FolderStore(store, layout.folder)
    try:
        manifest, _ = await stored_manifest(folder, version_key(EPOCH_VERSION))
        _check(manifest, layout)
    except NotFoundError:
        return None
    except (ChecksumError, FormatError, PermissionDeniedError) as error:
        # Those who may not list a bucket are told that they may not read what does not exist.
        _log.warning("the materialized epoch %s cannot be used: %s", folder.url, error)
        return None
    return manifest


def _check(manifest: Manifest, layout: EpochLayout) -> None:
    if manifest.dataset != layout.dataset or manifest.schema != layout.manifest.schema:
        raise FormatError("its manifest is of another data set, or has another schema")
    if manifest.samples != layout.samples:
        raise FormatError(f"its manifest has {manifest.samples} samples, the data set {layout.samples}")


class MaterializedPipeline(BatchPipeline):
    """A pipeline whose order is ``full`` and dealt by lanes; a stream ends with its epoch.

    An epoch's own objects are read once, so nearer places are asked for the data set's super-samples alone.

    Raises:
        BudgetError: the memory is too small for an epoch's own objects, if these are as large as the data set's.
        ConfigError: a column is not in the schema.

    Attributes:
        check: is given the pipeline when an epoch is about to be read as ``full``; raises BudgetError to refuse.
    """

    store: Store
    check: Callable[[BatchPipeline], object] = staticmethod(lambda pipeline: None)

    def _open_first(self) -> OpenDataSet:
        return self._open_epoch(Origin(self.store, self.manifest))

    def _open_here(self) -> OpenDataSet:
        epoch = self._place[0]
        origin = self._find(epoch)
        if origin is not None:
            return self._open_epoch(origin)
        self._tell_missing(epoch)
        return self._open_full()

    def _open_epoch(self, origin: Origin) -> OpenDataSet:
        """Return an epoch's own objects, which lie in its order."""
        order = replace(self.config.order, shuffle="none")
        try:
            return self._open(origin, replace(self.config, order=order, held_bytes=self.manifest.file_bytes), Nearer())
        except BudgetError as error:
            raise BudgetError(f"an epoch's own objects are read in their order: {error}") from None

    def _open_full(self) -> OpenDataSet:
        before = self.opened
        try:
            self.opened = super()._open_first()
            self.check(self)
        except BudgetError as error:
            self.opened = before
            raise BudgetError(
                f"epoch {self._place[0]} has no objects of its own, and cannot be read as 'full' instead: {error}"
            ) from None
        return self.opened

    def _find(self, epoch: int, timeout_seconds: float | None = None) -> Origin | None:
        """Return an epoch that has objects of its own, None if it has none.

        Raises:
            TimeoutError: the bucket has not answered in time.
            StoreError: the store failed.
        """
        if epoch > MAX_EPOCH:
            return None
        order = self.config.order
        layout = EpochLayout(self.manifest, seed=order.seed, lanes=order.lanes, epoch=epoch)

        async def read() -> Origin | None:
            async with asyncio.timeout(timeout_seconds):
                manifest = await read_epoch(self.store, layout)
            return None if manifest is None else Origin(FolderStore(self.store, layout.folder), manifest, layout)

        return self._thread.run(read())

    def _tell_missing(self, epoch: int) -> None:
        url, version, order = self.store.url, self.manifest.version, self.config.order
        if url.startswith("stoker+"):
            _log.warning("%s: a function serves no materialized epochs; epoch %d is read as 'full'", url, epoch)
            return
        _log.warning(
            "%s has no materialized epoch %d of version %d for seed %d and %s: it is read as 'full'. To make it: "
            "stoker shuffle %s --at %d --seed %d --lanes %d --epoch %d",
            *(url, epoch, version, order.seed, counted(order.lanes, "lane")),
            *(url, version, order.seed, order.lanes, epoch),
        )

    @property
    def _end_of_stream(self) -> int:
        return self._place[0] + 1

    def next(self) -> Batch | None:
        """Return the next batch, or None where the run ends, or had nothing left of the epoch that it was started in.

        Objects of an epoch that are gone, or not what its manifest says, are done without: the rest of the epoch is
        read as ``full``.

        Raises:
            StokerError: a super-sample that the batch needs could not be had; names it. Or the pipeline was stopped.
        """
        self._check_started()
        if self.place is None:
            self._begin()
        try:
            batch = super().next()
        except StokerError as error:
            if not self.is_materialized or not _is_lost(error):
                raise
            _log.warning("the rest of epoch %d, from position %d on, is read as 'full': %s", *self._place, error)
            self._read(self._open_full())
            batch = super().next()
        if batch is not None and batch.is_last:
            self._end_stream()
            self._go_ahead()
        return batch

    def _go_ahead(self) -> None:
        """Begin with the next epoch while the last batch of the one before is used, if it has objects of its own.

        One that has none may yet be made before it is asked for: then that is decided, and told. The last batch is not
        kept back for long by a bucket that is out, and never lost by what fails here.
        """
        if self._is_over:
            return
        epoch = self._place[0]
        try:
            origin = self._find(epoch, timeout_seconds=_AHEAD_SECONDS)
            if origin is not None:
                self._read(self._open_epoch(origin))
        except Exception as error:  # noqa: BLE001 - a batch is to be given out; whoever asks for the epoch meets it too
            _log.info("epoch %d is not begun ahead: %s: %s", epoch, type(error).__name__, error)


def _is_lost(error: StokerError) -> bool:
    """Return whether an object is gone, replaced or spoilt: then others than it may still be had.

    Those who may not list a bucket are told that they may not read what is gone.
    """
    lost = NotFoundError, PermissionDeniedError, ObjectChangedError, FormatError, ChecksumError
    return isinstance(error, lost) or isinstance(error.__cause__, ChecksumError)
