"""The manifest: the index of a data set, a safetensors file with one row per super-sample.

The rows are stored as columns of integers, about 52 bytes per super-sample, and are views of the file's buffer: a
manifest of a million super-samples opens in milliseconds. Object keys are computed, not stored: the rows of a pack run
are consecutive, and row ``i`` of a run has the key ``data/<run>/<number>``.

An object's identity is its size and CRC-32C; among parties that do not trust each other, the first 128 bits of its
SHA-256, which manifests of earlier releases lack. A row also has the object's ETag or generation, for use as a
precondition, in one of three compact encodings: 16 raw bytes (ETags of 32 hexadecimal digits), an integer
(generations), or text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._format import tensorfile
from stoker._format.identity import IDENTITY_BYTES
from stoker._format.pack_shuffle import PackShuffle, encode_shuffles, parse_shuffles
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, MAX_OBJECT_BYTES, SuperSampleRecord
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, FormatError, SchemaError

POINTER_KEY = "manifest.safetensors"
MAX_VERSION = 999_999_999
PREFIX_DIGITS = 16
"""Length of the prefix of a hexadecimal name by which :class:`NameIndex` is sorted."""
_HEX_TAG = re.compile(r"[0-9a-f]{32}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_UNKNOWN = bytes(IDENTITY_BYTES)
_ROW_FIELDS = ("size_bytes", "samples", "head_bytes", "head_crc32c", "crc32c")


def object_key(run: str, number: int) -> str:
    """Return the key of a run's super-sample. The run's hash comes first, to spread keys over bucket partitions."""
    return f"data/{run}/{number:08d}"


def version_key(version: int) -> str:
    """Return the key of a version of the manifest."""
    return f"manifests/{version:08d}.safetensors"


@dataclass(frozen=True, slots=True)
class PackRun:
    """Consecutive rows of one pack run.

    Attributes:
        run: id of the pack run, 16 hexadecimal digits.
        first_number: number of the first row's super-sample within the run.
        rows: number of rows.
    """

    run: str
    first_number: int
    rows: int


def group_runs(places: Iterable[tuple[str, int]]) -> tuple[PackRun, ...]:
    """Group places, each a run and a number within it, into intervals of consecutive numbers, in order."""
    # Consecutive numbers of a run have a constant difference from their position.
    groups = groupby(enumerate(places), key=lambda item: (item[1][0], item[1][1] - item[0]))
    intervals = ([place for _, place in group] for _, group in groups)
    return tuple(PackRun(*interval[0], len(interval)) for interval in intervals)


@dataclass(frozen=True, slots=True, eq=False)
class ManifestRows:
    """Rows of a manifest, by column.

    Attributes:
        size_bytes: size of each object, ``uint32 [rows]``.
        samples: samples in each object, ``uint32 [rows]``.
        head_bytes: size of each object's head, ``uint32 [rows]``.
        head_crc32c: CRC-32C of each head, ``uint32 [rows]``.
        crc32c: CRC-32C of each object, ``uint32 [rows]``.
        tags: ETags (``uint8 [rows, 16]`` or text) or generations (``int64 [rows]``).
        sha256_128: first 16 bytes of each object's SHA-256, ``uint8 [rows, 16]``, with zeros if unknown; None if all
            are unknown.
    """

    size_bytes: NDArray[np.uint32]
    samples: NDArray[np.uint32]
    head_bytes: NDArray[np.uint32]
    head_crc32c: NDArray[np.uint32]
    crc32c: NDArray[np.uint32]
    tags: NDArray[Any] | tuple[str, ...]
    sha256_128: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, packed: Sequence[SuperSampleRecord]) -> ManifestRows:
        """Create rows from packed super-samples, in the given order."""
        columns = {name: np.array([getattr(item, name) for item in packed], "<u4") for name in _ROW_FIELDS}
        hashes = np.frombuffer(b"".join([item.sha256_128 or _UNKNOWN for item in packed]), np.uint8)
        return cls(
            **columns,
            tags=_encode_tags([item.tag for item in packed]),
            sha256_128=hashes.reshape(-1, IDENTITY_BYTES) if any(item.sha256_128 for item in packed) else None,
        )

    def __len__(self) -> int:
        return len(self.samples)

    def tag(self, row: int) -> str:
        """Return the ETag or generation of a row's object, ``""`` if unknown."""
        if isinstance(self.tags, tuple):
            return self.tags[row]
        return self.tags[row].tobytes().hex() if self.tags.ndim == 2 else str(self.tags[row])

    def strong_identity(self, row: int) -> bytes | None:
        """Return the first 16 bytes of the SHA-256 of a row's object, None if unknown."""
        identity = _UNKNOWN if self.sha256_128 is None else self.sha256_128[row].tobytes()
        return None if identity == _UNKNOWN else identity

    @property
    def strong_identity_count(self) -> int:
        """Number of rows with a strong identity."""
        return 0 if self.sha256_128 is None else int(self.sha256_128.any(axis=1).sum())

    def concatenate(self, *others: ManifestRows) -> ManifestRows:
        """Return these rows followed by others."""
        parts = (self, *others)
        columns = {name: np.concatenate([getattr(rows, name) for rows in parts]) for name in _ROW_FIELDS}
        arrays = [rows.tags for rows in parts if isinstance(rows.tags, np.ndarray)]
        tags: NDArray[Any] | tuple[str, ...]
        if len(arrays) == len(parts) and len({array.ndim for array in arrays}) == 1:
            tags = np.concatenate(arrays)
        else:
            tags = _encode_tags([rows.tag(row) for rows in parts for row in range(len(rows))])
        hashes = [
            np.zeros((len(rows), IDENTITY_BYTES), np.uint8) if rows.sha256_128 is None else rows.sha256_128
            for rows in parts
        ]
        is_known = any(rows.sha256_128 is not None for rows in parts)
        return ManifestRows(**columns, tags=tags, sha256_128=np.concatenate(hashes) if is_known else None)

    def select(self, keep: NDArray[np.bool_]) -> ManifestRows:
        """Return the rows for which ``keep``, ``bool [rows]``, is true."""
        columns = {name: getattr(self, name)[keep] for name in _ROW_FIELDS}
        tags = _encode_tags(list(compress(self.tags, keep))) if isinstance(self.tags, tuple) else self.tags[keep]
        return ManifestRows(**columns, tags=tags, sha256_128=None if self.sha256_128 is None else self.sha256_128[keep])

    def record(self, row: int, ordinal: int) -> SuperSampleRecord:
        """Return one row as a record with the given ordinal."""
        numbers = {name: int(getattr(self, name)[row]) for name in _ROW_FIELDS}
        return SuperSampleRecord(ordinal=ordinal, tag=self.tag(row), sha256_128=self.strong_identity(row), **numbers)


def sample_starts(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the number of samples before each super-sample, and of all, ``int64 [super-samples + 1]``.

    Args:
        counts: number of samples in each super-sample, integer ``[super-samples]``.
    """
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _encode_tags(tags: list[str]) -> NDArray[Any] | tuple[str, ...]:
    if not all(tag.isascii() and tag.isprintable() for tag in tags):
        raise FormatError("the store gave an object a tag that is not printable ASCII, which no request can carry")
    if all(_HEX_TAG.fullmatch(tag) for tag in tags):
        return np.frombuffer(bytes.fromhex("".join(tags)), np.uint8).reshape(len(tags), 16)
    if all(map(_is_generation, tags)):
        return np.array([int(tag) for tag in tags], "<i8")
    return tuple(tags)


def _is_generation(tag: str) -> bool:
    return len(tag) < 20 and tag.isdecimal() and tag == str(int(tag)) and int(tag) < 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """One immutable version of a data set's index.

    Attributes:
        dataset: id of the data set.
        version: version number, from 1; each commit increments it.
        schema: columns of the data set.
        rows: super-samples of the data set.
        runs: pack runs that wrote the rows, in order of the rows. Intervals of a run may have gaps between them, from
            a compaction, but must not overlap.
        shuffles: run → permutation, for the runs whose pack permuted its samples; those of other runs are dropped.

    Raises:
        FormatError: the runs do not match the number of rows, or overlap.
    """

    dataset: str
    version: int
    schema: Schema
    rows: ManifestRows
    runs: tuple[PackRun, ...]
    shuffles: Mapping[str, PackShuffle] = field(default_factory=dict)
    _run_ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_run_ends", tuple(accumulate(run.rows for run in self.runs)))
        if self.shuffles:
            present = {run.run: self.shuffles[run.run] for run in self.runs if run.run in self.shuffles}
            object.__setattr__(self, "shuffles", present)
        if (self._run_ends or (0,))[-1] != len(self.rows):
            raise FormatError("the manifest's runs do not match its number of rows")
        ordered = sorted((run.run, run.first_number, run.rows) for run in self.runs if run.rows)
        if any(a == b and first + rows > second for (a, first, rows), (b, second, _) in pairwise(ordered)):
            raise FormatError("the manifest has overlapping runs: an object occurs twice")

    @classmethod
    def of(
        cls, dataset: str, schema: Schema, packed: Iterable[tuple[str, SuperSampleRecord]], version: int = 1
    ) -> Manifest:
        """Create a manifest from super-samples, each with its pack run, in the given order."""
        places = list(packed)
        rows = ManifestRows.of([each for _, each in places])
        runs = group_runs((run, each.ordinal) for run, each in places)
        return cls(dataset=dataset, version=version, schema=schema, rows=rows, runs=runs)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def samples(self) -> int:
        """Number of samples in the data set."""
        return int(self.rows.samples.sum(dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """Total size of the super-samples."""
        return int(self.rows.size_bytes.sum(dtype=np.int64))

    @property
    def largest_bytes(self) -> int:
        """Size of the largest super-sample."""
        return int(self.rows.size_bytes.max())

    def mean_requests(self, max_request_bytes: int) -> float:
        """Return the mean number of requests of at most ``max_request_bytes`` that read a super-sample."""
        if self.largest_bytes <= max_request_bytes:
            return 1.0
        return float((-(-self.rows.size_bytes.astype(np.int64) // max_request_bytes)).mean())

    def locate_row(self, row: int) -> tuple[str, int]:
        """Return a row's pack run, and its number within the run."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is out of range: the manifest has {len(self)} rows")
        index = bisect_right(self._run_ends, row)
        run = self.runs[index]
        return run.run, run.first_number + row - (self._run_ends[index] - run.rows)

    def key(self, row: int) -> str:
        """Return the object key of a row."""
        return object_key(*self.locate_row(row))

    def ref(self, row: int) -> ObjectRef:
        """Return a reference to the object of a row: its key, size, checksums and tag."""
        return ObjectRef(
            key=self.key(row),
            size_bytes=int(self.rows.size_bytes[row]),
            crc32c=int(self.rows.crc32c[row]),
            tag=self.rows.tag(row),
            dataset=self.dataset,
            sha256_128=self.rows.strong_identity(row),
            row=row,
        )

    def records(self) -> Iterator[tuple[str, SuperSampleRecord]]:
        """Yield the pack run and the record of each super-sample, in order of the rows."""
        numbers = ((run.run, run.first_number + number) for run in self.runs for number in range(run.rows))
        for row, (run, number) in enumerate(numbers):
            yield run, self.rows.record(row, number)

    def append_runs(
        self, rows: ManifestRows, *runs: PackRun, shuffles: Mapping[str, PackShuffle] | None = None
    ) -> Manifest:
        """Return the next version, with the rows of more runs, and their permutations, appended."""
        return replace(
            self,
            version=self.version + 1,
            rows=self.rows.concatenate(rows),
            runs=(*self.runs, *runs),
            shuffles={**self.shuffles, **(shuffles or {})},
        )

    def remove_runs(self, dropped: Iterable[PackRun]) -> Manifest:
        """Return the same version without the rows of some runs; rows that do not exist are ignored."""
        numbers: dict[str, list[tuple[int, int]]] = {}
        for run in dropped:
            numbers.setdefault(run.run, []).append((run.first_number, run.first_number + run.rows))
        keep = np.ones(len(self), np.bool_)
        runs: list[PackRun] = []
        for run, end in zip(self.runs, self._run_ends, strict=True):
            kept_rows = keep[end - run.rows : end]
            for first, behind in numbers.get(run.run, ()):
                kept_rows[max(0, first - run.first_number) : max(0, behind - run.first_number)] = False
            borders = np.flatnonzero(np.diff(kept_rows, prepend=False, append=False)).tolist()
            for first, behind in zip(borders[::2], borders[1::2], strict=True):
                runs.append(PackRun(run.run, run.first_number + first, behind - first))
        return replace(self, rows=self.rows.select(keep), runs=tuple(runs))

    @property
    def file_bytes(self) -> int:
        """Size of the result of :meth:`to_bytes`, computed without it."""
        arrays = self._arrays()
        header = tensorfile.encode_header({**self._metadata(), "crc32c": "0" * 8}, tensorfile.tensors_of(arrays))
        return len(header) + sum(array.nbytes for array in arrays.values())

    def to_bytes(self) -> bytes:
        """Return the manifest as a safetensors file; the same manifest gives the same bytes everywhere."""
        arrays, metadata = self._arrays(), self._metadata()
        data = b"".join(array.tobytes() for array in arrays.values())
        tensors = tensorfile.tensors_of(arrays)
        metadata["crc32c"] = _checksum(metadata, tensors, data)
        return tensorfile.encode_header(metadata, tensors) + data

    def _metadata(self) -> dict[str, str]:
        """Return the header's metadata without the checksum."""
        metadata = {
            "stoker_manifest": FORMAT,
            "dataset": self.dataset,
            "version": str(self.version),
            "schema": self.schema.to_json(),
        }
        if self.shuffles:
            metadata["shuffles"] = encode_shuffles([run.run for run in self.runs], self.shuffles)
        return metadata

    def _arrays(self) -> _Arrays:
        """Return the file's tensors, in order of the file."""
        arrays: _Arrays = {
            "run_id": np.array([int(run.run, 16) for run in self.runs], "<u8"),
            "run_first_number": np.array([run.first_number for run in self.runs], "<u4"),
            "run_rows": np.array([run.rows for run in self.runs], "<u4"),
        }
        tags = self.rows.tags
        if isinstance(tags, tuple):
            arrays |= tensorfile.encode_ragged("tag", [tag.encode() for tag in tags])
        else:
            arrays["tag"] = tags
        arrays |= {name: getattr(self.rows, name) for name in _ROW_FIELDS}
        if self.rows.sha256_128 is not None and self.rows.sha256_128.any():
            arrays["sha256_128"] = self.rows.sha256_128
        return arrays

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """Return the manifest whose file is ``data``; its arrays are views of it.

        Raises:
            FormatError: the bytes are not a manifest.
            ChecksumError: the manifest is damaged.
        """
        header = tensorfile.parse_header(data, len(data))
        if header.metadata.get("stoker_manifest") != FORMAT:
            raise FormatError("this is not a manifest in a format that this version reads; use a newer stoker")
        arrays = tensorfile.arrays_of(header, data)
        try:
            metadata = header.metadata
            checksum = _checksum(metadata, header.tensors, memoryview(data)[header.header_bytes :])
            if metadata["crc32c"] != checksum:
                raise ChecksumError(f"manifest has crc32c {checksum}, its header says {metadata['crc32c'][:20]!r}")
            manifest = cls(
                dataset=metadata["dataset"],
                version=_parse_version(metadata["version"]),
                schema=Schema.from_json(metadata["schema"]),
                rows=_parse_rows(arrays),
                runs=(runs := _parse_runs(arrays)),
                shuffles=parse_shuffles(metadata.get("shuffles", "[]"), [run.run for run in runs]),
            )
        except KeyError as error:
            raise FormatError(f"the manifest has no {error}") from None
        except SchemaError as error:
            raise FormatError(f"the manifest's schema is not valid: {str(error)[:200]}") from None
        if not len(manifest):
            raise FormatError("the manifest has no super-sample")
        # The head has 4 bytes of checksum per value, which bounds the samples that a row can claim.
        if (manifest.rows.samples * (4.0 * len(manifest.schema)) > manifest.rows.head_bytes).any():
            raise FormatError("the manifest has a super-sample with more samples than its head can describe")
        return manifest


class NameIndex:
    """Finds the objects of a manifest by name. Takes 12 bytes per row.

    Args:
        manifest: manifest with the objects; kept by reference.
        name_of: function that returns an object's name, of at least 16 hexadecimal digits.
        prefixes: first 16 digits of each row's name, ``uint64 [rows]``; may have duplicates.
    """

    def __init__(self, manifest: Manifest, name_of: Callable[[ObjectRef], str], prefixes: NDArray[np.uint64]) -> None:
        self._manifest, self._name_of = manifest, name_of
        self._order = np.argsort(prefixes, kind="stable").astype(np.uint32)
        self._prefixes = prefixes[self._order]

    def find(self, name: str) -> ObjectRef | None:
        """Return the object with this name, or None."""
        wanted = np.uint64(int(name[:PREFIX_DIGITS], 16))
        first, end = (int(np.searchsorted(self._prefixes, wanted, side)) for side in ("left", "right"))
        refs = map(self._manifest.ref, self._order[first:end].tolist())
        return next((ref for ref in refs if self._name_of(ref) == name), None)


_Arrays = dict[str, NDArray[Any]]


def _checksum(metadata: Mapping[str, str], tensors: Sequence[tensorfile.TensorInfo], data: bytes | memoryview) -> str:
    """Return the CRC-32C of the header's metadata and tensor names, then of the data section: 8 hexadecimal digits."""
    content = [{name: text for name, text in sorted(metadata.items()) if name != "crc32c"}, [t.name for t in tensors]]
    return f"{crc32c(data, crc32c(json.dumps(content, separators=(',', ':')).encode())):08x}"


def _parse_version(text: str) -> int:
    if not _VERSION.fullmatch(text):
        raise FormatError(f"the manifest's version {text[:20]!r} is not a positive integer")
    return int(text)


def _parse_rows(arrays: _Arrays) -> ManifestRows:
    columns = {name: arrays[name] for name in _ROW_FIELDS}
    count = columns["samples"].size
    if any(array.dtype != np.dtype("<u4") or array.shape != (count,) for array in columns.values()):
        raise FormatError("the manifest's columns are not uint32 of one length")
    if (columns["size_bytes"] > MAX_OBJECT_BYTES).any():
        raise FormatError(f"the manifest has an object larger than any super-sample ({MAX_OBJECT_BYTES} bytes)")
    if (columns["head_bytes"] > columns["size_bytes"]).any() or not columns["samples"].all():
        raise FormatError("the manifest has a super-sample without samples, or with a head larger than itself")
    hashes = arrays.get("sha256_128")
    if hashes is not None and (hashes.shape, hashes.dtype) != ((count, IDENTITY_BYTES), np.dtype("u1")):
        raise FormatError(f"the manifest's sha256_128 are not {IDENTITY_BYTES} bytes a row")
    tags = arrays["tag"]
    if "tag.offsets" in arrays:
        return ManifestRows(**columns, tags=_parse_text_tags(arrays, count), sha256_128=hashes)
    kinds = {((count, 16), np.dtype("u1")), ((count,), np.dtype("<i8"))}
    if (tags.shape, tags.dtype) not in kinds:
        raise FormatError("the manifest's tags are neither 16 bytes nor an int64 a row")
    return ManifestRows(**columns, tags=tags, sha256_128=hashes)


def _parse_text_tags(arrays: _Arrays, count: int) -> tuple[str, ...]:
    tags = tensorfile.decode_ragged("tag", arrays, count, "the manifest's text tags")
    try:
        decoded = tuple(str(tag, "ascii") for tag in tags)
    except UnicodeDecodeError:
        raise FormatError("the manifest has a tag that is not printable ASCII") from None
    if not all(map(str.isprintable, decoded)):  # tags are sent in HTTP headers
        raise FormatError("the manifest has a tag that is not printable ASCII")
    return decoded


def _parse_runs(arrays: _Arrays) -> tuple[PackRun, ...]:
    ids, firsts, rows = arrays["run_id"], arrays["run_first_number"], arrays["run_rows"]
    expected = (("<u8", ids), ("<u4", firsts), ("<u4", rows))
    if any(array.dtype != np.dtype(code) or array.shape != (ids.size,) for code, array in expected):
        raise FormatError("the manifest's runs have the wrong shape or dtype")
    return tuple(
        PackRun(f"{run:016x}", first, count)
        for run, first, count in zip(ids.tolist(), firsts.tolist(), rows.tolist(), strict=True)
    )
