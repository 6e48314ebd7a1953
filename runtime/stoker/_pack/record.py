"""The pack record: the state of one pack run, to resume it after a kill or to recover it without a manifest.

A record is a safetensors file. Its tensor ``prefix`` is the manifest of the durable super-samples from the first up to
the first gap, empty before the first. The optional tensor ``sources`` has a hash of the raw object of each sample, to
detect an object that is delivered twice. The metadata names the run and its state. A record is written before the first
object of its run, so an object without a record belongs to no run. A record is only ever replaced by one with more
progress.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.task_group import for_each
from stoker._format import tensorfile
from stoker._format.manifest import Manifest, PackRun
from stoker._format.pack_shuffle import PackShuffle, parse_shuffle
from stoker._format.supersample import FORMAT
from stoker._format.tensorfile import DTYPES, DType
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError

_log = logging.getLogger("stoker.pack.log")

SOURCE_HASH_BYTES = 16
"""Size of the hash of a raw object: the probability of a collision among 10**9 objects is 10**-21."""
SOURCE_RETENTION_SECONDS = 15 * 86_400
"""How long records keep the hashes of raw objects: queues keep messages for at most 14 days (SQS) or 7 (Pub/Sub)."""
STATES = ("packing", "complete", "committed")
MODES = ("create", "append", "overwrite", "deferred")
"""``overwrite``: the version that commits the run has no other run.
``deferred``: another process than the packer commits the run; functions pack such runs."""
_VERSION_PATTERN = re.compile(r"[0-9]{1,9}", re.ASCII)
_IDENTITY_PATTERN = re.compile(r"[0-9a-f]{64}", re.ASCII)
_RUN_PATTERN = re.compile(r"[0-9a-f]{16}", re.ASCII)
RECORD_KEY_PATTERN = re.compile(r"packs/[0-9a-f]{16}\.safetensors", re.ASCII)
"""Keys of pack records; ``packs/`` has other objects too."""
_JOB_PATTERN = re.compile(r"([0-9a-f]{16})?", re.ASCII)
_SECONDS_PATTERN = re.compile(r"[0-9]{1,12}", re.ASCII)
_MAX_ROWS = 1 << 32
_MIN_GROWTH_OBJECTS, _GROWTH_FRACTION = 8, 16
_MAX_CONCURRENT_READS = 16


def min_record_growth(objects: int) -> int:
    """Return the number of super-samples by which a prefix of ``objects`` grows before the record is written again."""
    return max(_MIN_GROWTH_OBJECTS, objects // _GROWTH_FRACTION)


def max_record_writes(objects: int) -> int:
    """Return the maximum number of writes of the record of a run of ``objects`` super-samples.

    A record is written before the first object, as the prefix grows, when the source has ended, and at the commit.
    """
    recorded, writes = 0, 3
    while recorded + min_record_growth(recorded) < objects:  # the last super-sample is still in flight when due
        recorded += min_record_growth(recorded)
        writes += 1
    return writes


def empty_sources() -> NDArray[np.uint8]:
    """Return an empty array of raw objects' hashes, ``uint8 [0, 16]``."""
    return np.empty((0, SOURCE_HASH_BYTES), np.uint8)


def record_key(run: str) -> str:
    """Return the key of a run's record."""
    return f"packs/{run}.safetensors"


def hash_run(run: str) -> NDArray[np.uint8]:
    """Return the hash that represents a run without raw objects, ``uint8 [1, 16]``."""
    return np.frombuffer(hashlib.blake2b(run.encode(), digest_size=SOURCE_HASH_BYTES).digest(), np.uint8)[None]


def run_prefix(identity: str) -> str:
    """Return the common start of the ids of all runs with this pack identity."""
    return identity[:8]


def run_id(identity: str, base_version: int) -> str:
    """Return the id of the run that packs ``identity`` on top of a version of the data set (0: none).

    The same pack on top of the same version has the same id, so it writes the same objects to the same keys.
    """
    return run_prefix(identity) + hashlib.sha256(f"{identity} {base_version}".encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackRecord:
    """State of one pack run.

    Attributes:
        run: id of the run, 16 hexadecimal digits.
        identity: SHA-256 that identifies the pack, 64 hexadecimal digits.
        source: name of the source, for messages.
        mode: ``create``, ``append``, ``overwrite`` or ``deferred``.
        state: ``packing``, ``complete`` (the source has ended and all of it is durable) or ``committed``.
        version: version of the manifest that has the run; 0 until the commit.
        prefix: manifest of the durable super-samples, from number 0; None before the first.
        job: id of the fan-out job that commits all of its runs together, 16 hexadecimal digits; empty if the run is
            committed by itself.
        sources: hash of the raw object of each sample, in order, ``uint8 [samples, 16]``; of the single object of all
            samples, ``[1, 16]``; or empty if the raw objects need not be remembered.
        replaces: rows of other runs that the run replaces (a compaction).
        committed_seconds: Unix time of the commit in seconds; 0 until the commit.
        shuffle: permutation of the pack's samples; None in the source's order.
    """

    run: str
    identity: str
    source: str
    mode: str
    state: str = "packing"
    version: int = 0
    prefix: Manifest | None = None
    job: str = ""
    sources: NDArray[np.uint8] = field(default_factory=empty_sources)
    replaces: tuple[PackRun, ...] = ()
    committed_seconds: int = 0
    shuffle: PackShuffle | None = None

    def __len__(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)

    @property
    def samples(self) -> int:
        """Number of samples in the prefix."""
        return 0 if self.prefix is None else self.prefix.samples

    @property
    def names(self) -> NDArray[np.uint8]:
        """Hashes that represent the run, ``uint8 [names, 16]``: those of its raw objects, else that of its id."""
        return self.sources if len(self.sources) else hash_run(self.run)

    @property
    def shuffles(self) -> dict[str, PackShuffle]:
        """Permutation of the run, for a manifest: run → permutation; empty without one."""
        return {} if self.shuffle is None else {self.run: self.shuffle}

    @property
    def is_committed(self) -> bool:
        """Whether a manifest has the run."""
        return self.state == "committed"

    @property
    def progress(self) -> tuple[int, int]:
        """Sort key by which two records of a run compare; it only grows."""
        return STATES.index(self.state), len(self)

    def to_bytes(self) -> bytes:
        """Return the record as a safetensors file; the same record gives the same bytes everywhere."""
        data = b"" if self.prefix is None else self.prefix.to_bytes()
        metadata = {
            "stoker_pack": FORMAT,
            "run": self.run,
            "identity": self.identity,
            "source": self.source,
            "mode": self.mode,
            "state": self.state,
            "version": str(self.version),
        }
        if self.job:
            metadata["job"] = self.job
        if self.replaces:
            metadata["replaces"] = json.dumps([[run.run, run.first_number, run.rows] for run in self.replaces])
        if self.committed_seconds:
            metadata["committed_seconds"] = str(self.committed_seconds)
        if self.shuffle is not None:
            metadata["shuffle"] = json.dumps([self.shuffle.seed, self.shuffle.pack])
        data += self.sources.tobytes()
        metadata["crc32c"] = _checksum(metadata, data)
        return (
            tensorfile.encode_header(metadata, _describe_tensors(len(data) - self.sources.nbytes, len(self.sources)))
            + data
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> PackRecord:
        """Return the record in the file ``data``; copies the arrays, so that many records keep little memory.

        Raises:
            FormatError: the bytes are not a pack record.
            ChecksumError: the record is damaged.
        """
        header = tensorfile.parse_header(data, len(data))
        metadata = header.metadata
        if metadata.get("stoker_pack") != FORMAT:
            raise FormatError("this is not a pack record in a format that this version reads; try a newer stoker")
        content = memoryview(data)[header.header_bytes :]
        sources = next((each.shape[0] for each in header.tensors if each.name == "sources" and each.shape), 0)
        prefix_bytes = len(content) - sources * SOURCE_HASH_BYTES
        if prefix_bytes < 0 or header.tensors != _describe_tensors(prefix_bytes, sources):
            raise FormatError("the pack record's tensors are not 'prefix' and, after it, 'sources'")
        if metadata.get("crc32c") != _checksum(metadata, content):
            raise ChecksumError("the pack record is damaged: its checksum differs")
        try:
            record = cls(
                run=_check_match(_RUN_PATTERN, metadata["run"]),
                identity=_check_match(_IDENTITY_PATTERN, metadata["identity"]),
                source=metadata["source"],
                mode=metadata["mode"],
                state=metadata["state"],
                version=int(_check_match(_VERSION_PATTERN, metadata["version"])),
                prefix=_copy_prefix(Manifest.from_bytes(content[:prefix_bytes])) if prefix_bytes else None,
                job=_check_match(_JOB_PATTERN, metadata.get("job", "")),
                sources=np.frombuffer(content[prefix_bytes:], np.uint8).reshape(sources, SOURCE_HASH_BYTES).copy(),
                replaces=_parse_replaces(metadata.get("replaces", "[]")),
                committed_seconds=int(_check_match(_SECONDS_PATTERN, metadata.get("committed_seconds", "0"))),
                shuffle=_parse_shuffle(metadata["shuffle"]) if "shuffle" in metadata else None,
            )
        except KeyError as error:
            raise FormatError(f"the pack record's metadata lacks {error}") from None
        record._check()
        return record

    def _check(self) -> None:
        if self.state not in STATES or self.mode not in MODES or self.is_committed != (self.version > 0):
            raise FormatError("the pack record's mode, state and version contradict each other")
        runs = [] if self.prefix is None else [(run.run, run.first_number) for run in self.prefix.runs]
        if runs != ([(self.run, 0)] if len(self) else []) or (self.state == "complete" and not len(self)):
            raise FormatError("the pack record's prefix belongs to another run")
        is_ended = self.state != "packing" and len(self)  # a committed record may lack the prefix: the manifest has it
        if is_ended and not self.replaces and len(self.sources) not in (0, 1, self.samples):
            raise FormatError("the pack record does not name the raw object of every sample")


def _copy_prefix(prefix: Manifest) -> Manifest:
    return replace(prefix, rows=prefix.rows.select(np.ones(len(prefix), np.bool_)))


def _describe_tensors(prefix_bytes: int, sources: int) -> tuple[tensorfile.TensorInfo, ...]:
    names: list[tuple[str, DType, tuple[int, ...]]] = [("prefix", DTYPES["uint8"], (prefix_bytes,))]
    if sources:
        names.append(("sources", DTYPES["uint8"], (sources, SOURCE_HASH_BYTES)))
    return tensorfile.lay_out(names)


def _parse_replaces(text: str) -> tuple[PackRun, ...]:
    try:
        rows: Any = json.loads(text)
        if not isinstance(rows, list):
            raise TypeError
        runs = tuple(PackRun(_check_match(_RUN_PATTERN, run), first, count) for run, first, count in rows)
    except (ValueError, TypeError, RecursionError):
        raise FormatError(f"the pack record's 'replaces' is not a list of rows: {text[:80]!r}") from None
    if not all(type(n) is int and 0 <= n < _MAX_ROWS for run in runs for n in (run.first_number, run.rows)):
        raise FormatError("the pack record's 'replaces' has rows with invalid numbers")
    return runs


def _parse_shuffle(text: str) -> PackShuffle:
    try:
        return parse_shuffle(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise FormatError(f"the pack record's 'shuffle' is not a permutation: {text[:80]!r}") from None


def _checksum(metadata: Mapping[str, str], data: bytes | memoryview) -> str:
    content = json.dumps({name: metadata[name] for name in sorted(metadata) if name != "crc32c"}).encode()
    return f"{crc32c(data, crc32c(content)):08x}"


def _check_match(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise FormatError(f"the pack record has {text[:80]!r}, which does not match {pattern.pattern}")
    return text


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A pack record as stored.

    Attributes:
        key: key of the object.
        tag: tag of the object.
        record: content of the object; None if it is damaged or not a record.
    """

    key: str
    tag: str
    record: PackRecord | None


async def list_records(
    store: Readable, run_prefix: str = "", *, known: Mapping[str, tuple[str, PackRecord]] | None = None
) -> list[StoredRecord]:
    """Return the records of the runs whose id starts with ``run_prefix``, in key order; log damaged ones.

    Args:
        store: store of the data set.
        run_prefix: start of the runs' ids.
        known: key → (tag, record) of records read before; an object with the same tag is not read again.
    """
    reader = RetryingReader(store)
    known = known or {}
    records: dict[str, StoredRecord] = {}

    async def read(info: ObjectInfo) -> None:
        tag, record = known.get(info.key, ("", None))
        logged = StoredRecord(info.key, tag, record) if tag == info.tag else await read_record(reader, info.key)
        if logged is not None:
            records[info.key] = logged

    try:
        infos = [info async for info in reader.list(f"packs/{run_prefix}") if RECORD_KEY_PATTERN.fullmatch(info.key)]
    except NotFoundError:  # the bucket itself does not exist, such as a local folder before its first object
        return []
    await for_each(infos, read, concurrency=_MAX_CONCURRENT_READS)
    return [records[key] for key in sorted(records)]


async def read_record(store: Readable, key: str) -> StoredRecord | None:
    """Return the record stored under a key, None if there is no object; log a damaged one."""
    reader = RetryingReader(store)
    try:
        data, info = await reader.get(key)
    except NotFoundError:  # deleted since it was listed
        return None
    try:
        record = PackRecord.from_bytes(data)
        if record_key(record.run) != key:
            raise FormatError(f"it has the record of run {record.run}")
    except (FormatError, ChecksumError) as error:
        _log.warning("ignoring the pack record %s/%s: %s", reader.url, key, error)
        return StoredRecord(key, info.tag, None)
    return StoredRecord(key, info.tag, record)


class Journal:
    """Writes one run's record. Several processes may write the same record: its progress only grows.

    Args:
        store: store of the data set.
        tag: tag of the stored object, None if there is none.
        recorded: stored record, None if there is none yet.

    Attributes:
        tag: last known tag of the stored object.
        recorded: last known stored record.
    """

    def __init__(self, store: Store, tag: str | None, recorded: PackRecord | None) -> None:
        self._store = RetryingStore(store)
        self.tag = tag
        self.recorded = recorded

    async def save(self, record: PackRecord) -> None:
        """Write ``record`` unless the stored record, perhaps of another process, has the same or more progress.

        Raises:
            PackError: the record was deleted.
        """
        key = record_key(record.run)
        while self.recorded is None or self.recorded.progress < record.progress:
            try:
                info = await self._store.put(key, record.to_bytes(), if_absent=self.tag is None, if_tag=self.tag)
            except PreconditionFailedError:
                stored = await read_record(self._store, key)
                if stored is None:
                    raise PackError(
                        f"{self._store.url}/{key} was deleted while the pack was running; pack again"
                    ) from None
                self.tag, self.recorded = stored.tag, stored.record
            else:
                self.tag, self.recorded = info.tag, record
