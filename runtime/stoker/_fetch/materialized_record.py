"""What a task has written so far: a manifest, stored beside what it lists.

A task is complete when its record has all of its samples. Records only grow, so any number of processes may carry out
the same task at the same time.
"""

from __future__ import annotations

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._format.manifest import Manifest
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError

__all__ = ["RECORD_FOLDER", "PartRecord", "stored_manifest"]

RECORD_FOLDER = "parts/"


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


class PartRecord:
    """The record of one task; made by :meth:`opened`.

    Args:
        store: the epoch's folder.
        run: that the record is called by.
        dataset: id of the epoch's data set.
    """

    def __init__(self, store: Store, run: str, dataset: str) -> None:
        self._store = RetryingStore(store)
        self._key = f"{RECORD_FOLDER}{run}.safetensors"
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
