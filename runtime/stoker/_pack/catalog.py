"""The catalog: keeps the pack records of a data set while its runs are packed, until they are committed.

After DIESEL (Wang et al., ICPP 2020), where writers fill a metadata server that can be refilled from the chunks. By
default the catalog is the bucket itself, with one small object per run. Fleets of packers may use a server in memory;
records that it loses are restored from the bucket.

Committed records never change, and a commit needs only the run and the raw objects of each. The **digest** has these in
one object: a new instance reads the digest, and then only the records that have other tags or are not in it. The digest
is an optimization: if it is lost, damaged or old, more requests are needed. It is a safetensors file with two tensors
of bytes, the objects' tags and the records without their prefixes, each with the offsets of its ``n`` pieces,
``I64 [n + 1]``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._base.task_group import for_each
from stoker._format import tensorfile
from stoker._format.supersample import FORMAT
from stoker._pack.record import (
    SOURCE_RETENTION_SECONDS,
    Journal,
    PackRecord,
    empty_sources,
    list_records,
    read_record,
    record_key,
)
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError, StoreError

_log = logging.getLogger("stoker.pack.catalog")
DIGEST_KEY = "packs/committed.safetensors"
_MAX_CONCURRENT_REQUESTS = 16
_MIN_MISSING_RECORDS = 256
_MISSING_FRACTION = 16


class BucketCatalog:
    """The pack records of a data set, in its own bucket.

    Committed records never change, so an instance reads each of them once. A new instance reads most of them at once
    from their digest, which is written again when a few hundred are missing in it.

    Args:
        store: store of the data set; the caller closes it.
        clock: function that returns the Unix time in seconds.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self.store = RetryingStore(store)
        self._clock = clock
        self._committed: dict[str, tuple[str, PackRecord]] | None = None
        self._open: dict[str, Journal] = {}
        self._digest_tag: str | None = None
        self._digest_tags: dict[str, str] = {}

    async def journal(self, run: str) -> Journal:
        """Return the journal of a run, which may have no record yet."""
        return await self.read_journal(run)

    async def read_journal(self, run: str) -> Journal:
        """Return the journal of a run as the bucket has it: one GET."""
        stored = await read_record(self.store, record_key(run))
        return Journal(self.store, None if stored is None else stored.tag, None if stored is None else stored.record)

    async def records(self) -> list[PackRecord]:
        """Return every readable record: one LIST, and one GET for each record that is not cached as committed.

        To save memory, records of committed runs have no prefix, which the manifest has, and old ones no raw objects.
        """
        if self._committed is None:
            self._committed = await self._read_digest()
        logged = await list_records(self.store, known=self._committed)
        by_key = {each.key: (each.tag, each.record) for each in logged if each.record is not None}
        # The clock of the last committer or of this machine may be wrong.
        last_seconds = max((record.committed_seconds for _, record in by_key.values()), default=0)
        young_seconds = min(last_seconds, self._clock()) - SOURCE_RETENTION_SECONDS
        self._committed = {
            key: (tag, _trim_committed(record, young_seconds))
            for key, (tag, record) in by_key.items()
            if record.is_committed
        }
        self._open = {
            record.run: Journal(self.store, tag, record) for tag, record in by_key.values() if not record.is_committed
        }
        await self._write_digest()
        return [record for _, record in (by_key | self._committed).values()]

    async def save(self, records: Iterable[PackRecord]) -> None:
        """Write the records of committed runs to the bucket: one PUT each, and a GET if it was not read before."""

        async def save(record: PackRecord) -> None:
            journal = self._open.pop(record.run, None) or await self.read_journal(record.run)
            with suppress(PackError):  # a run that replaced this one has deleted its record meanwhile
                await journal.save(record)

        await for_each(records, save, concurrency=_MAX_CONCURRENT_REQUESTS)

    async def delete_records(self, runs: Iterable[str]) -> None:
        """Delete the records of runs; super-samples of these runs that no manifest has are garbage then."""
        await for_each(map(record_key, runs), self.store.delete, concurrency=_MAX_CONCURRENT_REQUESTS)

    async def close(self) -> None:
        """Do nothing: the caller closes the store."""

    async def _read_digest(self) -> dict[str, tuple[str, PackRecord]]:
        records: dict[str, tuple[str, PackRecord]] = {}
        with suppress(NotFoundError):
            data, info = await self.store.get(DIGEST_KEY)
            self._digest_tag = info.tag
            try:
                records = decode_digest(data)
            except (FormatError, ChecksumError) as error:
                _log.warning("ignoring %s/%s: %s", self.store.url, DIGEST_KEY, error)
        self._digest_tags = {key: tag for key, (tag, _) in records.items()}
        return records

    async def _write_digest(self) -> None:
        """Write the digest if reading the records that it lacks costs more than writing it."""
        committed = self._committed or {}
        lacking = sum(self._digest_tags.get(key) != tag for key, (tag, _) in committed.items())
        if lacking < max(_MIN_MISSING_RECORDS, len(committed) // _MISSING_FRACTION):
            return
        self._digest_tags = {key: tag for key, (tag, _) in committed.items()}
        tag = self._digest_tag
        try:
            info = await self.store.put(DIGEST_KEY, encode_digest(committed), if_absent=tag is None, if_tag=tag)
        except PreconditionFailedError:  # another instance has written one
            await self._read_digest()
        except StoreError as error:  # the digest is optional, so the commit does not fail
            _log.warning("cannot write %s/%s: %s", self.store.url, DIGEST_KEY, error)
        else:
            self._digest_tag = info.tag


def _trim_committed(record: PackRecord, young_seconds: float) -> PackRecord:
    """Return a committed record without its prefix, and without its raw objects if it is old."""
    is_old = record.committed_seconds < young_seconds
    if record.prefix is None and not (is_old and len(record.sources)):
        return record  # not a copy, to save memory
    return replace(record, prefix=None, sources=empty_sources() if is_old else record.sources)


def encode_digest(records: Mapping[str, tuple[str, PackRecord]]) -> bytes:
    """Return the digest of ``records``: key → (tag of the object, record without its prefix)."""
    ordered = [records[key] for key in sorted(records)]
    tags = [tag.encode() for tag, _ in ordered]
    pieces = [record.to_bytes() for _, record in ordered]
    arrays = tensorfile.encode_ragged("tag", tags) | tensorfile.encode_ragged("record", pieces)
    data = b"".join(array.tobytes() for array in arrays.values())
    metadata = {"stoker_digest": FORMAT, "crc32c": f"{crc32c(data):08x}"}
    return tensorfile.encode_header(metadata, tensorfile.tensors_of(arrays)) + data


def decode_digest(data: bytes) -> dict[str, tuple[str, PackRecord]]:
    """Return the records in the digest ``data``: key → (tag of the object, record without its prefix).

    Raises:
        FormatError: the bytes are not a digest.
        ChecksumError: the digest is damaged.
    """
    header = tensorfile.parse_header(data, len(data))
    if header.metadata.get("stoker_digest") != FORMAT:
        raise FormatError("this is not a digest in a format that this version reads; try a newer stoker")
    if header.metadata.get("crc32c") != f"{crc32c(memoryview(data)[header.header_bytes :]):08x}":
        raise ChecksumError("the digest is damaged: its checksum differs")
    arrays = tensorfile.arrays_of(header, data)
    if list(arrays) != ["tag.offsets", "tag", "record.offsets", "record"]:
        raise FormatError("the digest does not have the tensors 'tag' and 'record'")
    count = arrays["tag.offsets"].size - 1
    tags = tensorfile.decode_ragged("tag", arrays, count, "the digest's tags")
    pieces = tensorfile.decode_ragged("record", arrays, count, "the digest's records")
    records: dict[str, tuple[str, PackRecord]] = {}
    for tag, piece in zip(tags, pieces, strict=True):
        record = PackRecord.from_bytes(piece)
        if not record.is_committed:
            raise FormatError(f"the digest has the record of run {record.run}, which is not committed")
        records[record_key(record.run)] = str(tag, "utf-8", "replace"), record
    return records
