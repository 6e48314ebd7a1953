"""The pack records in a store: found, and written so that they never go back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.task_group import for_each
from stoker._pack.record import PackRecord, is_record_key, record_key
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import (
    ChecksumError,
    FormatError,
    NotFoundError,
    PackError,
    PreconditionFailedError,
)

__all__ = ["Journal", "Logged", "list_records", "read_record"]

_log = logging.getLogger("stoker.pack.log")
_READS_AT_ONCE = 16


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


async def list_records(
    store: Readable, run_prefix: str = "", *, known: Mapping[str, tuple[str, PackRecord]] | None = None
) -> list[Logged]:
    """Return the records of the runs whose id starts with ``run_prefix``, by key; damaged ones are logged.

    Args:
        store: where they are.
        run_prefix: of the runs.
        known: key → (tag, record) of what was read before; an object that still has its tag is not read again.
    """
    reader = RetryingReader(store)
    known = known or {}
    found: dict[str, Logged] = {}

    async def read(info: ObjectInfo) -> None:
        tag, record = known.get(info.key, ("", None))
        logged = Logged(info.key, tag, record) if tag == info.tag else await read_record(reader, info.key)
        if logged is not None:
            found[info.key] = logged

    try:
        listed = [info async for info in reader.list(f"packs/{run_prefix}") if is_record_key(info.key)]
    except NotFoundError:  # the bucket itself does not exist: a local folder before its first object
        return []
    await for_each(listed, read, concurrency=_READS_AT_ONCE)
    return [found[key] for key in sorted(found)]


async def read_record(store: Readable, key: str) -> Logged | None:
    """Return the record that is stored under a key, None if nothing is; a damaged one is logged."""
    reader = RetryingReader(store)
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

    @property
    def recorded(self) -> PackRecord | None:
        """What the stored record says, as far as is known here; None if there is none."""
        return self._recorded

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
                found = await read_record(self._store, record_key(record.run))
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
