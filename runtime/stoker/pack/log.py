"""The pack records in a store: found, and written so that they never go back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stoker.errors import (
    ChecksumError,
    FormatError,
    NotFoundError,
    PackError,
    PreconditionFailedError,
)
from stoker.pack.record import PackRecord, record_key
from stoker.retry import RetryingReader, RetryingStore
from stoker.store.protocol import Readable, Store

__all__ = ["Journal", "Logged", "list_records"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Logged:
    """A pack record as it stands in a store.

    Attributes:
        key: of the object.
        tag: of the object.
        record: what it says, None if it is damaged or no record.
    """

    key: str
    tag: str
    record: PackRecord | None


async def list_records(store: Readable, run_prefix: str = "") -> list[Logged]:
    """Return the records of the runs whose id starts with ``run_prefix``, by key; damaged ones are logged."""
    reader = RetryingReader(store)
    try:
        keys = [info.key async for info in reader.list(f"packs/{run_prefix}")]
        return [logged for key in keys if (logged := await _read(reader, key)) is not None]
    except NotFoundError:  # the bucket itself does not exist: a local folder before its first object
        return []


async def _read(reader: RetryingReader[Readable], key: str) -> Logged | None:
    try:
        data, info = await reader.get(key)
    except NotFoundError:  # deleted since it was listed
        return None
    try:
        record = PackRecord.from_bytes(data)
        if record_key(record.run) != key:
            raise FormatError(f"it is the record of run {record.run}")
    except (FormatError, ChecksumError) as error:
        _log.warning("ignoring the pack record %s/%s: %s", reader.url, key, error)
        return Logged(key, info.tag, None)
    return Logged(key, info.tag, record)


class Journal:
    """Writes one run's record. Several processes may write the same one: what it says only grows.

    Args:
        store: where the record is.
        tag: of what is stored under its key, None if nothing is.
        recorded: what that says, None if there is no record yet.
    """

    def __init__(self, store: Store, tag: str | None, recorded: PackRecord | None) -> None:
        self._store = RetryingStore(store)
        self._tag = tag
        self._recorded = recorded

    def __len__(self) -> int:
        """How many super-samples the stored record has."""
        return 0 if self._recorded is None else len(self._recorded)

    async def save(self, record: PackRecord) -> None:
        """Write ``record`` unless what is there, perhaps of another process, is as far or farther.

        Raises:
            PackError: the record was deleted.
        """
        if self._recorded is not None and self._recorded.progress >= record.progress:
            return
        while True:
            try:
                info = await self._store.put(
                    record_key(record.run), record.to_bytes(), if_absent=self._tag is None, if_tag=self._tag
                )
            except PreconditionFailedError:
                found = await _read(self._store, record_key(record.run))
            else:
                self._recorded, self._tag = record, info.tag
                return
            if found is None:
                raise PackError(
                    f"{self._store.url}/{record_key(record.run)} was deleted while the pack was running; pack again"
                )
            self._tag = found.tag
            if found.record is not None and found.record.progress >= record.progress:
                self._recorded = found.record
                return
