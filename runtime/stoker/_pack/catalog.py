"""The catalog: where the pack records of a data set are kept while its runs are packed, until they are committed.

After DIESEL (Wang et al., ICPP 2020), whose metadata server is filled by the writers and refilled from the chunks. By
default the catalog is the bucket itself, one small object a run. Fleets of packers may use a server in memory; what
it loses is restored from the bucket.

Committed records never change, and a commit needs of each of them which run it is of and which raw objects it names.
The **digest** has all of this in one object: an instance that starts reads it instead, and then those records that have
other tags or are not in it. It is a shortcut and nothing else: lost, damaged or old, it costs requests. It is a
safetensors file: two tensors of bytes, the objects' tags and the records without their prefixes, each with the offsets
of its ``n`` pieces, ``I64 [n + 1]``.
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
    REMEMBERED_SECONDS,
    Journal,
    PackRecord,
    list_records,
    no_sources,
    read_record,
    record_key,
)
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError, StoreError

_log = logging.getLogger("stoker.pack.catalog")
DIGEST_KEY = "packs/committed.safetensors"
_REQUESTS_AT_ONCE = 16
_LEAST_LACKING = 256
_LACKING_FRACTION = 16


class BucketCatalog:
    """The pack records of a data set, in its own bucket.

    Committed records never change, so an instance that stays reads each of them once; and one that starts reads nearly
    all of them at once, in their digest, which is written again when a few hundred are not in it.

    Args:
        store: where the data set is; stays the caller's.
        clock: tells the seconds of the Unix epoch.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self.store = RetryingStore(store)
        self._clock = clock
        self._committed: dict[str, tuple[str, PackRecord]] | None = None
        self._open: dict[str, Journal] = {}
        self._digest_tag: str | None = None
        self._digested: dict[str, str] = {}

    async def journal(self, run: str) -> Journal:
        """Return what is recorded of a run, with or without a record."""
        return await self.stored(run)

    async def stored(self, run: str) -> Journal:
        """Return what the bucket has of a run: one GET."""
        found = await read_record(self.store, record_key(run))
        return Journal(self.store, None if found is None else found.tag, None if found is None else found.record)

    async def records(self) -> list[PackRecord]:
        """Return every record that can be read, by run: a LIST, and a GET for each that was not committed before.

        Those of runs that are committed have no prefix: the manifest has it, and there may be very many of them. Nor
        do they name raw objects for longer than anybody wants to know them.
        """
        if self._committed is None:
            self._committed = await self._read_digest()
        logged = await list_records(self.store, known=self._committed)
        found = {each.key: (each.tag, each.record) for each in logged if each.record is not None}
        # Of whoever committed last, or of this machine, one clock may be wrong.
        last_seconds = max((record.committed_seconds for _, record in found.values()), default=0)
        young_seconds = min(last_seconds, self._clock()) - REMEMBERED_SECONDS
        self._committed = {
            key: (tag, _remainder(record, young_seconds)) for key, (tag, record) in found.items() if record.is_committed
        }
        self._open = {
            record.run: Journal(self.store, tag, record) for tag, record in found.values() if not record.is_committed
        }
        await self._write_digest()
        return [record for _, record in (found | self._committed).values()]

    async def save(self, records: Iterable[PackRecord]) -> None:
        """Record in the bucket that runs are committed: a PUT each, and a GET where it was not read before."""

        async def save(record: PackRecord) -> None:
            journal = self._open.pop(record.run, None) or await self.stored(record.run)
            with suppress(PackError):  # deleted by whoever has taken its place since: then there is nothing to record
                await journal.save(record)

        await for_each(records, save, concurrency=_REQUESTS_AT_ONCE)

    async def forget(self, runs: Iterable[str]) -> None:
        """Delete the records of runs, whose super-samples are then garbage where no manifest has them."""
        await for_each(map(record_key, runs), self.store.delete, concurrency=_REQUESTS_AT_ONCE)

    async def close(self) -> None:
        """Release connections that are the catalog's own: none, the store is the caller's."""

    async def _read_digest(self) -> dict[str, tuple[str, PackRecord]]:
        found: dict[str, tuple[str, PackRecord]] = {}
        with suppress(NotFoundError):
            data, info = await self.store.get(DIGEST_KEY)
            self._digest_tag = info.tag
            try:
                found = digested(data)
            except (FormatError, ChecksumError) as error:
                _log.warning("ignoring %s/%s: %s", self.store.url, DIGEST_KEY, error)
        self._digested = {key: tag for key, (tag, _) in found.items()}
        return found

    async def _write_digest(self) -> None:
        """Write the digest where it lacks so many records that reading these costs more than writing it."""
        committed = self._committed or {}
        lacking = sum(self._digested.get(key) != tag for key, (tag, _) in committed.items())
        if lacking < max(_LEAST_LACKING, len(committed) // _LACKING_FRACTION):
            return
        self._digested = {key: tag for key, (tag, _) in committed.items()}
        tag = self._digest_tag
        try:
            info = await self.store.put(DIGEST_KEY, digest_bytes(committed), if_absent=tag is None, if_tag=tag)
        except PreconditionFailedError:  # another instance has written one
            await self._read_digest()
        except StoreError as error:  # it is a shortcut, and no commit fails for it
            _log.warning("cannot write %s/%s: %s", self.store.url, DIGEST_KEY, error)
        else:
            self._digest_tag = info.tag


def _remainder(record: PackRecord, young_seconds: float) -> PackRecord:
    """Return what is still wanted of a committed record: not its prefix, and its raw objects only while it is young."""
    is_old = record.committed_seconds < young_seconds
    if record.prefix is None and not (is_old and len(record.sources)):
        return record  # the very same, of which there is then one in memory
    return replace(record, prefix=None, sources=no_sources() if is_old else record.sources)


def digest_bytes(records: Mapping[str, tuple[str, PackRecord]]) -> bytes:
    """Return the digest of records: key → tag of the object, and what it says without its prefix."""
    ordered = [records[key] for key in sorted(records)]
    tags, pieces = [tag.encode() for tag, _ in ordered], [record.to_bytes() for _, record in ordered]
    arrays = tensorfile.ragged("tag", tags) | tensorfile.ragged("record", pieces)
    data = b"".join(array.tobytes() for array in arrays.values())
    metadata = {"stoker_digest": FORMAT, "crc32c": f"{crc32c(data):08x}"}
    return tensorfile.encode_header(metadata, tensorfile.tensors_of(arrays)) + data


def digested(data: bytes) -> dict[str, tuple[str, PackRecord]]:
    """Return the records whose digest is ``data``: key → tag of the object, and what it says without its prefix.

    Raises:
        FormatError: the bytes are no digest.
        ChecksumError: they were one and are damaged.
    """
    header = tensorfile.parse_header(data, len(data))
    if header.metadata.get("stoker_digest") != FORMAT:
        raise FormatError("this is not a digest of a format that this version reads; a newer stoker may")
    if header.metadata.get("crc32c") != f"{crc32c(memoryview(data)[header.header_bytes :]):08x}":
        raise ChecksumError("the digest is damaged: its checksum differs")
    arrays = tensorfile.arrays_of(header, data)
    if list(arrays) != ["tag.offsets", "tag", "record.offsets", "record"]:
        raise FormatError("the digest's tensors are not those of one")
    count = arrays["tag.offsets"].size - 1
    tags = tensorfile.ragged_pieces("tag", arrays, count, "the digest's tags")
    pieces = tensorfile.ragged_pieces("record", arrays, count, "the digest's records")
    found: dict[str, tuple[str, PackRecord]] = {}
    for tag, piece in zip(tags, pieces, strict=True):
        record = PackRecord.from_bytes(piece)
        if not record.is_committed:
            raise FormatError(f"the digest has the record of run {record.run}, which is not committed")
        found[record_key(record.run)] = str(tag, "utf-8", "replace"), record
    return found
