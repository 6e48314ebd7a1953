"""A part: raw objects that become one pack run, wherever that is packed. What says so travels as JSON.

The id of the run is a hash of the part, so the same part, packed again or at the same time by another function, writes
the same bytes to the same keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.fields import Fields, shown
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, MAX_SUPER_SAMPLE_BYTES
from stoker._pack.record import SOURCE_BYTES, PackRecord, no_sources
from stoker._stores.location import check_key
from stoker.abc import ObjectInfo
from stoker.errors import ConfigError, EventError, FormatError, SchemaError

__all__ = ["PART_KINDS", "KeySlice", "Part", "provisional_dataset", "source_hashes"]

PART_KINDS = ("files", "image-folder", "npy", "npz", "webdataset")
_ID = "[0-9a-f]{16}"
_MAX_OBJECTS = 100_000
_MAX_SCHEMA_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySlice:
    """The raw objects whose keys lie between two others.

    Attributes:
        after: the key before the first; empty to begin with the first of all.
        until: the last key.
        objects: how many there are.
        fingerprint: hash of their keys, sizes and tags, so that a source that changed is found.
    """

    after: str
    until: str
    objects: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one pack run is made of.

    Attributes:
        dataset: URL of the data set.
        dataset_id: its id, 16 hexadecimal digits.
        source: URL of the folder that the raw objects' keys are relative to.
        kind: of the source, as ``stoker pack --kind`` names it.
        schema: the columns of every sample; names all classes where there are any.
        super_sample_bytes: limit of a super-sample's data.
        objects: the raw objects, in order of the samples; or
        keys: which ones they are.
        rows: of an array, half-open; None for all.
        job: the fan-out that it belongs to, 16 hexadecimal digits; empty where it is committed by itself.
        is_remembered: whether the record is to name the raw objects, so that one that is delivered again is not added
            again. For objects that are a sample each, and for one object alone.
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
        """SHA-256 of the part, where its data set lies aside."""
        what = {name: value for name, value in self.to_json().items() if name != "dataset"}
        return hashlib.sha256(json.dumps([FORMAT, what], sort_keys=True).encode()).hexdigest()

    @property
    def run(self) -> str:
        """Id of the pack run that it becomes."""
        return self.identity[:16]

    def record(self) -> PackRecord:
        """Return the record with which its run begins."""
        identity = self.identity
        sources = source_hashes(self.source, self.objects) if self.is_remembered else no_sources()
        return PackRecord(
            run=self.run,
            identity=identity,
            source=self.source,
            mode="deferred",
            job=self.job,
            sources=sources,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part as an event: plain JSON values."""
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
            keys = self.keys
            event["slice"] = {
                "after": keys.after,
                "until": keys.until,
                "objects": keys.objects,
                "fingerprint": keys.fingerprint,
            }
        if self.rows is not None:
            event["rows"] = list(self.rows)
        return event

    @classmethod
    def from_json(cls, event: object) -> Part:
        """Return the part that an event is.

        Raises:
            EventError: it is none.
        """
        fields = Fields(event, "pack event")
        part = cls(
            dataset=fields.text("dataset"),
            dataset_id=fields.text("dataset_id", pattern=_ID),
            source=fields.text("source"),
            kind=fields.choice("kind", PART_KINDS),
            schema=_schema(fields.value("schema")),
            super_sample_bytes=fields.integer("super_sample_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES),
            job=fields.text("job", pattern=f"({_ID})?", default=""),
            is_remembered=fields.integer("remembered", most=1, default=0) == 1,
            rows=_rows(fields.array("rows", most=2)) if "rows" in fields else None,
            keys=_key_slice(fields.within("slice")) if "slice" in fields else None,
            objects=tuple(map(_object, fields.array("objects", most=_MAX_OBJECTS))) if "objects" in fields else (),
        )
        fields.end()
        part._check()
        return part

    def _check(self) -> None:
        if (self.keys is None) == (not self.objects):
            raise EventError("the pack event has neither 'objects' nor a 'slice', or both; give one of them")
        if len({item.key for item in self.objects}) < len(self.objects):
            raise EventError("the pack event has an object twice")
        if self.is_remembered and len(self.objects) != 1 and self.kind not in ("files", "image-folder"):
            raise EventError("the pack event is 'remembered': only objects that are a sample each can be, or one alone")
        if self.keys is not None and self.kind not in ("files", "image-folder"):
            raise EventError(f"the pack event has a 'slice' of kind {self.kind}; name the objects")
        if self.rows is not None and (self.kind != "npy" or len(self.objects) != 1):
            raise EventError("the pack event has 'rows', which only one npy object has")
        if self.kind in ("npy", "npz") and len(self.objects) != 1:
            raise EventError(f"the pack event has {len(self.objects)} objects of kind {self.kind}; give one")


def provisional_dataset(url: str) -> str:
    """Return the id that the data set at a store's URL has for functions which take in raw objects before there is one.

    It keeps the id if it begins with what they took in; if somebody else creates it, their runs are written again.
    """
    return hashlib.sha256(f"ingest {url}".encode()).hexdigest()[:16]


def source_hashes(source: str, objects: Iterable[ObjectInfo]) -> NDArray[np.uint8]:
    """Return what names each raw object and its content, ``uint8 [objects, 16]``."""
    names = [json.dumps([source, item.key, item.tag]).encode() for item in objects]
    hashes = b"".join(hashlib.blake2b(name, digest_size=SOURCE_BYTES).digest() for name in names)
    return np.frombuffer(hashes, np.uint8).reshape(-1, SOURCE_BYTES)


def _schema(value: object) -> Schema:
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


def _object(value: object) -> ObjectInfo:
    if isinstance(value, list) and len(value) == 3:
        key, size_bytes, tag = value
        fields = Fields({"key": key, "size_bytes": size_bytes, "tag": tag}, "pack event's object")
        tag = fields.text("tag", pattern="[ -~]{1,256}")  # it is sent in a header
        return ObjectInfo(key=_key(fields.text("key")), size_bytes=fields.integer("size_bytes"), tag=tag)
    raise EventError(f"the pack event has the object {shown(value)}; write [key, size in bytes, tag]")


def _key(key: str) -> str:
    try:
        check_key(key)
    except ConfigError as error:
        raise EventError(f"the pack event has a key that no store takes: {error}") from None
    return key


def _rows(value: list[Any]) -> tuple[int, int]:
    if len(value) != 2 or not all(type(row) is int for row in value) or not 0 <= value[0] < value[1]:
        raise EventError(f"the pack event has the rows {shown(value)}; write [start, end]")
    return value[0], value[1]


def _key_slice(fields: Fields) -> KeySlice:
    found = KeySlice(
        after=_key(after) if (after := fields.text("after", default="")) else "",
        until=_key(fields.text("until")),
        objects=fields.integer("objects", least=1),
        fingerprint=fields.text("fingerprint", pattern="[0-9a-f]{64}"),
    )
    fields.end()
    if found.after.encode() >= found.until.encode():
        raise EventError(f"the pack event's slice ends with {found.until!r}, not after {found.after!r}")
    return found
