"""The catalog: where the pack records of a data set are kept while its runs are packed, until they are committed.

After DIESEL (Zhang et al., ICPP 2020), whose metadata server is filled by the writers and refilled from the chunks. By
default the catalog is the bucket itself, one small object a run. Fleets of packers may use a server in memory; what
it loses is restored from the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from stoker.bounded import for_each
from stoker.pack.log import Journal, list_records, read_record
from stoker.pack.record import PackRecord, record_key
from stoker.retry import RetryingStore
from stoker.store.protocol import Store

__all__ = ["BucketCatalog", "Catalog", "RunJournal"]

_REQUESTS_AT_ONCE = 16


class RunJournal(Protocol):
    """What is recorded of one run. Several processes may write it at a time: it only grows."""

    @property
    def recorded(self) -> PackRecord | None:
        """What the record says, as far as is known here; None if there is none."""
        ...

    async def save(self, record: PackRecord) -> None:
        """Record it unless what is there, perhaps of another process, is as far or farther.

        Raises:
            PackError: the record was deleted.
        """
        ...


class Catalog(Protocol):
    """The pack records of a data set."""

    async def journal(self, run: str) -> RunJournal:
        """Return what is recorded of a run, with or without a record."""
        ...

    async def records(self) -> list[PackRecord]:
        """Return every record that can be read, by run; of runs that are committed without what the manifest has."""
        ...

    async def save(self, records: Iterable[PackRecord]) -> None:
        """Record that runs are committed; in the bucket too, wherever else they are kept."""
        ...

    async def forget(self, runs: Iterable[str]) -> None:
        """Delete the records of runs, whose super-samples are then garbage where no manifest has them."""
        ...

    async def close(self) -> None:
        """Release connections that are the catalog's own."""
        ...


class BucketCatalog:
    """The catalog in the data set's own bucket.

    Committed records never change, so an instance that stays reads each of them once.
    """

    def __init__(self, store: Store) -> None:
        self._store = RetryingStore(store)
        self._committed: dict[str, tuple[str, PackRecord]] = {}

    async def journal(self, run: str) -> Journal:
        """Return what the bucket has of a run, with or without a record: one GET."""
        found = await read_record(self._store, record_key(run))
        return Journal(self._store, None if found is None else found.tag, None if found is None else found.record)

    async def records(self) -> list[PackRecord]:
        """Return every record that can be read, by run: a LIST, and a GET for each that was not committed before.

        Those of runs that are committed have no prefix: the manifest has it, and there may be very many of them.
        """
        found: list[PackRecord] = []
        committed: dict[str, tuple[str, PackRecord]] = {}
        for each in await list_records(self._store, known=self._committed):
            record = each.record
            if record is not None and record.is_committed:
                record = record if record.prefix is None else replace(record, prefix=None)
                committed[each.key] = each.tag, record
            if record is not None:
                found.append(record)
        self._committed = committed
        return found

    async def save(self, records: Iterable[PackRecord]) -> None:
        """Record that runs are committed: a GET and a PUT each."""

        async def save(record: PackRecord) -> None:
            journal = await self.journal(record.run)
            await journal.save(record)

        await for_each(records, save, concurrency=_REQUESTS_AT_ONCE)

    async def forget(self, runs: Iterable[str]) -> None:
        """Delete the records of runs."""
        await for_each(map(record_key, runs), self._store.delete, concurrency=_REQUESTS_AT_ONCE)

    async def close(self) -> None:
        """Do nothing: the store is the caller's."""
