"""Parts of a source: the planner splits a source into parts, and functions open and pack them.

A part is a group of raw objects that becomes one pack run, in any process. It is sent to functions as JSON. The id of
the run is a hash of the part, so a function that packs the same part again, or at the same time as another, writes the
same bytes to the same keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._base.fields import JsonFields, quote_value
from stoker._base.retry import RetryingStore
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, MAX_TARGET_BYTES
from stoker._pack.plan import describe_schema_difference
from stoker._pack.record import SOURCE_HASH_BYTES, PackRecord, empty_sources
from stoker._sources.arrays import ArraySource, open_npy, open_npz
from stoker._sources.folders import FolderSource, is_sample_file
from stoker._sources.listing import ObjectSource, compute_fingerprint, list_between
from stoker._sources.webdataset import open_webdataset
from stoker._stores.location import check_key
from stoker.abc import ObjectInfo, SourceListing
from stoker.errors import ConfigError, EventError, FormatError, PackError, SchemaError

T = TypeVar("T")

PART_KINDS = ("files", "image-folder", "npy", "npz", "webdataset")
_ID_PATTERN = "[0-9a-f]{16}"
_MAX_OBJECTS = 100_000
_MAX_SCHEMA_CHARACTERS = 1 << 20
MAX_PART_OBJECTS = 20_000  # at 1,000 reads a second a part takes a third of a minute
_MAX_NAMED_OBJECTS = 500  # larger groups are sent as a slice of keys: events are limited to 1 MB or less


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySlice:
    """A range of raw objects in key order.

    Attributes:
        after: exclusive lower bound of the keys; empty to begin with the first object.
        until: inclusive upper bound of the keys.
        objects: number of objects.
        fingerprint: hash of their keys, sizes and tags, which detects a changed source.
    """

    after: str
    until: str
    objects: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """The raw objects of one pack run.

    Attributes:
        dataset: URL of the data set.
        dataset_id: id of the data set, 16 hexadecimal digits.
        source: URL of the folder that the raw objects' keys are relative to.
        kind: kind of the source, as in ``stoker pack --kind``.
        schema: columns of every sample, with all class names.
        super_sample_bytes: maximum size of a super-sample's data, in bytes.
        objects: raw objects in order of the samples; empty if ``keys`` is given.
        keys: range of the raw objects, instead of ``objects``.
        rows: half-open range of an array's rows; None for all rows.
        job: id of the fan-out job, 16 hexadecimal digits; empty if the run is committed by itself.
        is_remembered: whether the record lists the raw objects, so that an object that is delivered twice is added
            once. Only for objects that are one sample each, and for a single object.
    """

    dataset: str
    dataset_id: str
    source: str
    kind: str
    schema: Schema
    super_sample_bytes: int
    objects: tuple[ObjectInfo, ...] = ()
    keys: KeySlice | None = None
    rows: tuple[int, int] | None = None
    job: str = ""
    is_remembered: bool = False

    @property
    def identity(self) -> str:
        """SHA-256 of the part without the URL of its data set, 64 hexadecimal digits."""
        content = {name: value for name, value in self.to_json().items() if name != "dataset"}
        return hashlib.sha256(json.dumps([FORMAT, content], sort_keys=True).encode()).hexdigest()

    @property
    def run(self) -> str:
        """Id of the part's pack run, 16 hexadecimal digits."""
        return self.identity[:16]

    def record(self) -> PackRecord:
        """Return the initial record of the part's run."""
        identity = self.identity
        sources = hash_sources(self.source, self.objects) if self.is_remembered else empty_sources()
        return PackRecord(
            run=self.run,
            identity=identity,
            source=self.source,
            mode="deferred",
            job=self.job,
            sources=sources,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part as the event of a function, as JSON values."""
        event: dict[str, Any] = {
            "dataset": self.dataset,
            "dataset_id": self.dataset_id,
            "source": self.source,
            "kind": self.kind,
            "schema": json.loads(self.schema.to_json()),
            "super_sample_bytes": self.super_sample_bytes,
            "job": self.job,
            "remembered": int(self.is_remembered),
        }
        if self.keys is None:
            event["objects"] = [[item.key, item.size_bytes, item.tag] for item in self.objects]
        else:
            event["slice"] = asdict(self.keys)
        if self.rows is not None:
            event["rows"] = list(self.rows)
        return event

    @classmethod
    def from_json(cls, event: object) -> SourcePart:
        """Return the part that an event describes.

        Raises:
            EventError: the event is invalid.
        """
        fields = JsonFields(event, "pack event")
        part = cls(
            dataset=fields.text("dataset"),
            dataset_id=fields.text("dataset_id", pattern=_ID_PATTERN),
            source=fields.text("source"),
            kind=fields.choice("kind", PART_KINDS),
            schema=_parse_schema(fields.value("schema")),
            super_sample_bytes=fields.integer("super_sample_bytes", min_value=1, max_value=MAX_TARGET_BYTES),
            job=fields.text("job", pattern=f"({_ID_PATTERN})?", default=""),
            is_remembered=fields.integer("remembered", max_value=1, default=0) == 1,
            rows=_parse_rows(fields.array("rows", max_length=2)) if "rows" in fields else None,
            keys=_parse_key_slice(fields.nested("slice")) if "slice" in fields else None,
            objects=tuple(map(_parse_object, fields.array("objects", max_length=_MAX_OBJECTS)))
            if "objects" in fields
            else (),
        )
        fields.check_no_fields_left()
        part._check()
        return part

    def _check(self) -> None:
        if (self.keys is None) == (not self.objects):
            raise EventError("the pack event has neither 'objects' nor a 'slice', or both; give one of them")
        if len({item.key for item in self.objects}) < len(self.objects):
            raise EventError("the pack event has an object twice")
        if self.is_remembered and len(self.objects) != 1 and self.kind not in ("files", "image-folder"):
            raise EventError("the pack event is 'remembered', which needs objects of one sample each, or one object")
        if self.keys is not None and self.kind not in ("files", "image-folder"):
            raise EventError(f"the pack event has a 'slice' of kind {self.kind}; name the objects")
        if self.rows is not None and (self.kind != "npy" or len(self.objects) != 1):
            raise EventError("the pack event has 'rows', which is only for a single npy object")
        if self.kind in ("npy", "npz") and len(self.objects) != 1:
            raise EventError(f"the pack event has {len(self.objects)} objects of kind {self.kind}; give one")


def hash_sources(source: str, objects: Iterable[ObjectInfo]) -> NDArray[np.uint8]:
    """Return a hash of each raw object's source, key and tag, ``uint8 [objects, 16]``."""
    names = [json.dumps([source, item.key, item.tag]).encode() for item in objects]
    hashes = b"".join(hashlib.blake2b(name, digest_size=SOURCE_HASH_BYTES).digest() for name in names)
    return np.frombuffer(hashes, np.uint8).reshape(-1, SOURCE_HASH_BYTES)


def _parse_schema(value: object) -> Schema:
    try:
        text = json.dumps(value, separators=(",", ":"))  # as Schema.to_json spells it
    except RecursionError:
        raise EventError("the pack event's 'schema' is nested too deeply") from None
    if len(text) > _MAX_SCHEMA_CHARACTERS:
        raise EventError(f"the pack event's 'schema' has {len(text)} characters, more than {_MAX_SCHEMA_CHARACTERS}")
    try:
        return Schema.from_json(text)
    except (SchemaError, FormatError) as error:
        raise EventError(f"the pack event's 'schema' is not valid: {str(error)[:200]}") from None


def _parse_object(value: object) -> ObjectInfo:
    if isinstance(value, list) and len(value) == 3:
        key, size_bytes, tag = value
        fields = JsonFields({"key": key, "size_bytes": size_bytes, "tag": tag}, "pack event's object")
        tag = fields.text("tag", pattern="[ -~]{1,256}")  # it is sent in a header
        return ObjectInfo(key=_parse_key(fields.text("key")), size_bytes=fields.integer("size_bytes"), tag=tag)
    raise EventError(f"the pack event has the object {quote_value(value)}; write [key, size in bytes, tag]")


def _parse_key(key: str) -> str:
    try:
        check_key(key)
    except ConfigError as error:
        raise EventError(f"the pack event has an invalid key: {error}") from None
    return key


def _parse_rows(value: list[Any]) -> tuple[int, int]:
    if len(value) != 2 or not all(type(row) is int for row in value) or not 0 <= value[0] < value[1]:
        raise EventError(f"the pack event has the rows {quote_value(value)}; write [start, end]")
    return value[0], value[1]


def _parse_key_slice(fields: JsonFields) -> KeySlice:
    key_slice = KeySlice(
        after=_parse_key(after) if (after := fields.text("after", default="")) else "",
        until=_parse_key(fields.text("until")),
        objects=fields.integer("objects", min_value=1),
        fingerprint=fields.text("fingerprint", pattern="[0-9a-f]{64}"),
    )
    fields.check_no_fields_left()
    if key_slice.after.encode() >= key_slice.until.encode():
        raise EventError(
            f"the pack event's slice ends with {key_slice.until!r}, which is not after {key_slice.after!r}"
        )
    return key_slice


def split_source(source: ObjectSource, part: SourcePart, part_bytes: int) -> Iterator[SourcePart]:
    """Yield the parts of ``source`` in order of its samples, the same ones every time.

    Args:
        source: source to split.
        part: template with the common attributes; its objects are ignored.
        part_bytes: maximum total size of a part's raw objects, in bytes. A larger object becomes a part of its own,
            except that an array is split between its rows.

    Raises:
        ConfigError: the source's kind belongs to a plug-in, which functions do not have.
    """
    if source.kind not in PART_KINDS:
        raise ConfigError(
            f"functions pack sources of kind {', '.join(PART_KINDS)}, not {source.kind!r}; pack it in this process, "
            "without --on"
        )
    base = replace(part, source=source.root, kind=source.kind, schema=source.schema, objects=())
    if source.kind == "npy" and source.samples is not None:
        rows = max(1, part_bytes * source.samples // source.size_bytes)
        for start in range(0, source.samples, rows):
            yield replace(base, objects=source.objects, rows=(start, min(start + rows, source.samples)))
        return
    after = ""
    sizes = attrgetter("size_bytes")
    for group in group_by_size(source.objects, sizes, max_bytes=part_bytes, max_items=MAX_PART_OBJECTS):
        # Opening a slice lists its objects again without following links out of the folder.
        can_be_slice = isinstance(source, FolderSource) and not source.follows_links
        if can_be_slice and len(group) > _MAX_NAMED_OBJECTS:
            fingerprint = compute_fingerprint(source.kind, source.schema, group)
            keys = KeySlice(after=after, until=group[-1].key, objects=len(group), fingerprint=fingerprint)
            yield replace(base, keys=keys)
        else:
            yield replace(base, objects=tuple(group))
        after = group[-1].key


def group_by_size(
    items: Iterable[T], size_bytes: Callable[[T], int], *, max_bytes: int, max_items: int
) -> Iterator[list[T]]:
    """Yield groups of consecutive items, each of at most ``max_items`` and ``max_bytes``; larger items are alone."""
    group: list[T] = []
    group_bytes = 0
    for item in items:
        if group and (group_bytes + size_bytes(item) > max_bytes or len(group) == max_items):
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += size_bytes(item)
    if group:
        yield group


async def open_part(part: SourcePart, store: RetryingStore) -> ObjectSource:
    """Return the source of a part's samples.

    Args:
        part: part to open.
        store: store of the folder with the raw objects; the caller closes it.

    Raises:
        PackError: the raw objects have changed since the part was planned, or are damaged.
        SchemaError: the raw objects have other columns.
        StoreError: the raw objects could not be read.
    """
    objects = part.objects if part.keys is None else await _list_slice(part, part.keys, store)
    listing = SourceListing(part.source, store, tuple(objects), is_folder=False)
    if part.kind in ("files", "image-folder"):
        return FolderSource(part.kind, part.schema, listing, objects)
    source = await _OPENERS[part.kind](listing)
    _check_schema(part, source.schema)
    if part.rows is not None and isinstance(source, ArraySource):
        source.select_rows(*part.rows)
    return source


_OPENERS: dict[str, Callable[[SourceListing], Awaitable[ObjectSource]]] = {
    "npy": open_npy,
    "npz": open_npz,
    "webdataset": open_webdataset,
}


async def _list_slice(part: SourcePart, keys: KeySlice, store: RetryingStore) -> Sequence[ObjectInfo]:
    infos = await list_between(store, keys.after, keys.until)
    objects = [item for item in infos if is_sample_file(part.kind, item.key)]
    if len(objects) != keys.objects or compute_fingerprint(part.kind, part.schema, objects) != keys.fingerprint:
        raise PackError(
            f"{part.source} has changed between {keys.after!r} and {keys.until!r} since the pack was planned (it had "
            f"{keys.objects} objects there, and has {len(objects)}); plan it again"
        )
    return objects


def _check_schema(part: SourcePart, schema: Schema) -> None:
    if dict(schema) != dict(part.schema):  # the order may differ, since the files of a tar may come in any order
        raise SchemaError(
            f"the samples of {part.source}/{part.objects[0].key} have "
            f"{describe_schema_difference(part.schema, schema)}; all raw "
            "objects of a data set must have the same columns"
        )
