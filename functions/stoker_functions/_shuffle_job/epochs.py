"""The records of a materialized epoch's tasks, the commit of an epoch, and the deletion of old epochs.

The record of a task is a manifest, stored beside the objects that it lists: the task is complete when its record has
all of its samples. Records only grow, so any number of processes may execute the same task at the same time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingStore
from stoker._base.task_group import for_each
from stoker._fetch.materialized_pipeline import EPOCH_VERSION, load_manifest, read_epoch
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._order.order import EpochLayout
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError

_RECORD_FOLDER = "parts/"


class PartRecord:
    """The record of one task, constructed by :meth:`open`.

    Args:
        store: folder of the epoch.
        run: name of the record.
        dataset: id of the epoch's data set.
    """

    def __init__(self, store: Store, run: str, dataset: str) -> None:
        self._store = RetryingStore(store)
        self._key = f"{_RECORD_FOLDER}{run}.safetensors"
        self._dataset = dataset
        self._tag: str | None = None
        self.written: Manifest | None = None
        """Manifest of the super-samples that this process knows to be stored; None if there are none."""

    @classmethod
    async def open(cls, store: Store, run: str, dataset: str) -> PartRecord:
        """Return the record in the store, or an empty one if there is none: one GET."""
        record = cls(store, run, dataset)
        await record._read()
        return record

    def __len__(self) -> int:
        return 0 if self.written is None else len(self.written)

    @property
    def samples(self) -> int:
        """Number of samples that are stored."""
        return 0 if self.written is None else self.written.samples

    async def save(self, written: Manifest) -> None:
        """Save a manifest, unless the stored one, perhaps of another process, has as many super-samples or more.

        Raises:
            PackError: the record was deleted, and perhaps the objects that it lists.
        """
        while len(self) < len(written):
            try:
                info = await self._store.put(
                    self._key, written.to_bytes(), if_absent=self._tag is None, if_tag=self._tag
                )
            except PreconditionFailedError:
                await self._read()
                if self.written is None:
                    raise PackError(f"{self._name} was deleted while it was written; shuffle it again") from None
            else:
                self.written, self._tag = written, info.tag

    async def _read(self) -> None:
        try:
            written, info = await load_manifest(self._store, self._key)
        except NotFoundError:
            self.written = self._tag = None
            return
        except (FormatError, ChecksumError) as error:
            raise PackError(f"{self._name} is damaged: {error}; delete it, and shuffle again") from None
        if written.dataset != self._dataset:
            raise PackError(f"{self._name} is of another data set; delete it, and shuffle again")
        self.written, self._tag = written, info.tag

    @property
    def _name(self) -> str:
        return f"{self._store.url}/{self._key}"


SCATTERED_FOLDER = "scattered/"
"""Folder of the cells in an epoch's folder, from the scatters until the commit."""
_CONCURRENCY = 32


async def commit_epoch(
    store: Store, layout: EpochLayout, runs: Sequence[str], *, keep: int, stop_at_seconds: float = math.inf
) -> dict[str, Any]:
    """Make an epoch with all its slices visible, and delete its cells and old epochs.

    Args:
        store: store of the data set.
        layout: layout of the epoch.
        runs: runs of the slices that have samples, in order.
        keep: number of epochs of the run before this one to keep; older ones are deleted.
        stop_at_seconds: time on the clock of the event loop when deleting stops; another commit continues it.

    Returns:
        ``state``, the ``folder`` of the epoch, the number of ``deleted`` objects, and the older epochs that they
        belonged to, ``deleted_epochs``.

    Raises:
        PackError: a slice is not complete, or another object is where the epoch belongs; nothing was committed.
    """
    folder = FolderStore(store, layout.folder)
    if await read_epoch(store, layout) is None:
        built = await _build_manifest(folder, layout, runs)
        with suppress(PreconditionFailedError):  # another process was first
            await versions.publish(folder, built)
        if await read_epoch(store, layout) is None:
            raise PackError(
                f"epoch {layout.epoch} was committed, and is not there: it was deleted meanwhile, or another object is "
                f"in its place; delete {folder.url}, and shuffle again"
            )
    deleted = await delete_epochs(store, layout, keep=keep, stop_at_seconds=stop_at_seconds)
    return {
        "state": "complete" if deleted.is_all else "packing",
        "folder": layout.folder,
        "deleted": deleted.objects,
        "deleted_epochs": list(deleted.epochs),
    }


async def _build_manifest(folder: FolderStore, layout: EpochLayout, runs: Sequence[str]) -> Manifest:
    """Return the manifest of the super-samples of all slices."""
    manifests: dict[str, Manifest] = {}

    async def read(run: str) -> None:
        record = await PartRecord.open(folder, run, layout.dataset)
        if record.written is not None:
            manifests[run] = record.written

    await for_each(runs, read, concurrency=_CONCURRENCY)
    parts = [manifests[run].rows for run in runs if run in manifests]
    written = sum(int(rows.samples.sum(dtype="i8")) for rows in parts)
    if written != layout.samples or len(manifests) < len(runs):
        raise PackError(
            f"{written} of {layout.samples} samples of epoch {layout.epoch} are written, in {len(manifests)} of "
            f"{len(runs)} slices; shuffle the rest before the epoch is committed"
        )
    return Manifest(
        dataset=layout.dataset,
        version=EPOCH_VERSION,
        schema=layout.manifest.schema,
        rows=parts[0].concatenate(*parts[1:]),
        runs=tuple(part for run in runs for part in manifests[run].runs),
    )


class DeletedEpochs(NamedTuple):
    """The result of a deletion: number of objects, the older epochs they belonged to, and whether it is complete."""

    objects: int
    epochs: tuple[int, ...]
    is_all: bool


async def delete_epochs(
    store: Store, layout: EpochLayout, *, keep: int, stop_at_seconds: float = math.inf
) -> DeletedEpochs:
    """Delete the epochs of a run that are more than ``keep`` before this one, and the cells of this one.

    An epoch's manifest is deleted first and its super-samples last, so no manifest ever names a deleted object.
    """
    retrying = RetryingStore(store)
    first_kept = layout.folder_of(max(0, layout.epoch - keep))
    keys = await _list_keys(retrying, layout.run_folder, first_kept)
    numbers = {key.removeprefix(layout.run_folder).partition("/")[0] for key in keys}
    keys += await _list_keys(retrying, layout.folder + SCATTERED_FOLDER)
    deleted = 0

    async def delete(key: str) -> None:
        nonlocal deleted
        if asyncio.get_running_loop().time() < stop_at_seconds:
            await retrying.delete(key)
            deleted += 1

    for turn in range(3):
        await for_each([key for key in keys if _deletion_rank(key) == turn], delete, concurrency=_CONCURRENCY)
    epochs = sorted(int(number) for number in numbers if number.isascii() and number.isdecimal())
    return DeletedEpochs(deleted, tuple(epochs) if deleted else (), deleted == len(keys))


async def _list_keys(store: RetryingStore, prefix: str, end: str = "\U0010ffff") -> list[str]:
    """Return the keys that begin with ``prefix`` and come before ``end``."""
    keys: list[str] = []
    async with aclosing(store.list(prefix)) as infos:
        async for info in infos:
            if info.key >= end:
                break
            keys.append(info.key)
    return keys


def _deletion_rank(key: str) -> int:
    """Return the turn in which to delete an object: manifests first, then records, then super-samples."""
    return 0 if "/manifest" in key else 1 if f"/{_RECORD_FOLDER}" in key else 2
