"""What the tasks of a materialized epoch have recorded in its store; its commit; and the deletion of old ones.

The record of a task is a manifest, stored beside what it lists: the task is complete when its record has all of its
samples. Records only grow, so any number of processes may carry out the same task at the same time.
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
from stoker._fetch.materialized_pipeline import EPOCH_VERSION, read_epoch, stored_manifest
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._order.order import EpochLayout
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError

_RECORD_FOLDER = "parts/"


class PartRecord:
    """The record of one task; made by :meth:`opened`.

    Args:
        store: the epoch's folder.
        run: that the record is called by.
        dataset: id of the epoch's data set.
    """

    def __init__(self, store: Store, run: str, dataset: str) -> None:
        self._store = RetryingStore(store)
        self._key = f"{_RECORD_FOLDER}{run}.safetensors"
        self._dataset = dataset
        self._tag: str | None = None
        self.written: Manifest | None = None
        """What is stored, as far as is known here; None if nothing is."""

    @classmethod
    async def opened(cls, store: Store, run: str, dataset: str) -> PartRecord:
        """Return what the store has, with or without a record: one GET."""
        record = cls(store, run, dataset)
        await record._read()
        return record

    def __len__(self) -> int:
        return 0 if self.written is None else len(self.written)

    @property
    def samples(self) -> int:
        """How many samples are stored."""
        return 0 if self.written is None else self.written.samples

    async def save(self, written: Manifest) -> None:
        """Record it, unless what is there, perhaps of another process, is as far or farther.

        Raises:
            PackError: the record was deleted, and what it lists may be too.
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
            written, info = await stored_manifest(self._store, self._key)
        except NotFoundError:
            self.written = self._tag = None
            return
        except (FormatError, ChecksumError) as error:
            raise PackError(f"{self._name} is damaged: {error}; delete it, and it is made again") from None
        if written.dataset != self._dataset:
            raise PackError(f"{self._name} is of another data set; delete it, and it is made again")
        self.written, self._tag = written, info.tag

    @property
    def _name(self) -> str:
        return f"{self._store.url}/{self._key}"


SCATTERED_FOLDER = "scattered/"
"""Of an epoch: what lies between the scatters and the slices, until the commit."""
_REQUESTS_AT_ONCE = 32


async def commit_epoch(
    store: Store, layout: EpochLayout, runs: Sequence[str], *, keep: int, stop_at_seconds: float = math.inf
) -> dict[str, Any]:
    """Make an epoch visible that all slices are there of, and delete what nobody needs any more.

    Args:
        store: where the data set is.
        layout: of the epoch.
        runs: of its slices that have samples, in order.
        keep: how many epochs of the run before this one to keep; what is older is deleted.
        stop_at_seconds: on the clock of the event loop, when deleting ends; committed again, it goes on.

    Returns:
        ``state``, the ``folder`` of the epoch, how many objects were ``deleted``, and ``deleted_epochs``, which older
        epochs they are of.

    Raises:
        PackError: a slice is not there yet, or something else stands where the epoch belongs; nothing was committed.
    """
    folder = FolderStore(store, layout.folder)
    if await read_epoch(store, layout) is None:
        built = await _built(folder, layout, runs)
        with suppress(PreconditionFailedError):  # somebody was first
            await versions.publish(folder, built)
        if await read_epoch(store, layout) is None:
            raise PackError(
                f"epoch {layout.epoch} was committed, and is not there: it was deleted meanwhile, or something else "
                f"stands where it belongs; delete {folder.url}, and shuffle again"
            )
    deleted = await delete_epochs(store, layout, keep=keep, stop_at_seconds=stop_at_seconds)
    return {
        "state": "complete" if deleted.is_all else "packing",
        "folder": layout.folder,
        "deleted": deleted.objects,
        "deleted_epochs": list(deleted.epochs),
    }


async def _built(folder: FolderStore, layout: EpochLayout, runs: Sequence[str]) -> Manifest:
    """Return the manifest that has what all slices have written."""
    found: dict[str, Manifest] = {}

    async def read(run: str) -> None:
        record = await PartRecord.opened(folder, run, layout.dataset)
        if record.written is not None:
            found[run] = record.written

    await for_each(runs, read, concurrency=_REQUESTS_AT_ONCE)
    parts = [found[run].rows for run in runs if run in found]
    written = sum(int(rows.samples.sum(dtype="i8")) for rows in parts)
    if written != layout.samples or len(found) < len(runs):
        raise PackError(
            f"{written} of {layout.samples} samples of epoch {layout.epoch} are written, in {len(found)} of "
            f"{len(runs)} slices; shuffle the rest before the epoch is committed"
        )
    return Manifest(
        dataset=layout.dataset,
        version=EPOCH_VERSION,
        schema=layout.manifest.schema,
        rows=parts[0].followed_by(*parts[1:]),
        runs=tuple(part for run in runs for part in found[run].runs),
    )


class DeletedEpochs(NamedTuple):
    """What was deleted: how many objects, of which older epochs, and whether all that was to be deleted is gone."""

    objects: int
    epochs: tuple[int, ...]
    is_all: bool


async def delete_epochs(
    store: Store, layout: EpochLayout, *, keep: int, stop_at_seconds: float = math.inf
) -> DeletedEpochs:
    """Delete the epochs of a run that are more than ``keep`` before this one, and what was scattered for this one.

    An epoch's manifest goes first and its super-samples last, so at no time does anything name what is not there.
    """
    retrying = RetryingStore(store)
    first_kept = layout.folder_of(max(0, layout.epoch - keep))
    keys = await _keys(retrying, layout.run_folder, first_kept)
    numbers = {key.removeprefix(layout.run_folder).partition("/")[0] for key in keys}
    keys += await _keys(retrying, layout.folder + SCATTERED_FOLDER)
    deleted = 0

    async def delete(key: str) -> None:
        nonlocal deleted
        if asyncio.get_running_loop().time() < stop_at_seconds:
            await retrying.delete(key)
            deleted += 1

    for turn in range(3):
        await for_each([key for key in keys if _turn(key) == turn], delete, concurrency=_REQUESTS_AT_ONCE)
    epochs = sorted(int(number) for number in numbers if number.isascii() and number.isdecimal())
    return DeletedEpochs(deleted, tuple(epochs) if deleted else (), deleted == len(keys))


async def _keys(store: RetryingStore, prefix: str, end: str = "\U0010ffff") -> list[str]:
    """Return the keys that begin with ``prefix`` and come before ``end``."""
    keys: list[str] = []
    async with aclosing(store.list(prefix)) as found:
        async for info in found:
            if info.key >= end:
                break
            keys.append(info.key)
    return keys


def _turn(key: str) -> int:
    """Return when to delete an object: what names others before these."""
    return 0 if "/manifest" in key else 1 if f"/{_RECORD_FOLDER}" in key else 2
