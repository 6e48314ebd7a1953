"""The commit of an epoch, and the deletion of old epochs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingStore
from stoker._base.task_group import for_each
from stoker._fetch.materialized_pipeline import EPOCH_VERSION, read_epoch
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._order.epoch_layout import EpochLayout
from stoker._pack.part_writer import RECORD_FOLDER, PartRecord
from stoker.abc import Store
from stoker.errors import PackError, PreconditionFailedError

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
    return 0 if "/manifest" in key else 1 if f"/{RECORD_FOLDER}" in key else 2
