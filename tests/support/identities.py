"""Strong identities in the objects of a data set: checked against the content, and removed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stoker._format import tensorfile
from stoker._format.manifest import Manifest, ManifestRows
from stoker._pack.record import PackRecord

_INDEX = re.compile(r"(.*?)(manifest|manifests/.*|packs/.*|parts/.*)\.safetensors")


def identity(data: bytes | bytearray) -> bytes:
    """Return the strong identity of an object."""
    return hashlib.sha256(data).digest()[:16]


def add_identities(manifest: Manifest, rows: Iterable[int]) -> Manifest:
    """Return a manifest with an invented identity for some of its rows: that of the row's number in decimal."""
    named = {row: identity(b"%d" % row) for row in rows}
    packed = [replace(each, sha256_128=named.get(row)) for row, (_, each) in enumerate(manifest.records())]
    return replace(manifest, rows=ManifestRows.of(packed))


def remove_identities(manifest: Manifest) -> Manifest:
    """Return a manifest in the form of an earlier release."""
    return replace(manifest, rows=replace(manifest.rows, sha256_128=None))


def remove_record_identities(record: PackRecord) -> PackRecord:
    """Return a pack record in the form of an earlier release."""
    return record if record.prefix is None else replace(record, prefix=remove_identities(record.prefix))


def in_earlier_form(objects: Mapping[str, bytes], older: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """Return objects in the form in which an earlier release would have written them.

    Checks that each super-sample in an index has its strong identity there, except those of an earlier release.

    Args:
        objects: key → bytes.
        older: objects that the earlier release wrote; some may be among ``objects``.
    """
    return {key: _earlier(key, data, objects, older or {}) for key, data in objects.items()}


def _earlier(key: str, data: bytes, objects: Mapping[str, bytes], older: Mapping[str, bytes]) -> bytes:
    match = _INDEX.fullmatch(key)
    if match is None or data == older.get(key):
        return data
    if "stoker_pack" not in tensorfile.parse_header(data, len(data)).metadata:
        manifest = Manifest.from_bytes(data)
        _check(manifest, match[1], objects, older)
        return remove_identities(manifest).to_bytes()
    record = PackRecord.from_bytes(data)
    if record.prefix is not None:
        _check(record.prefix, match[1], objects, older)
    return remove_record_identities(record).to_bytes()


def _check(manifest: Manifest, folder: str, objects: Mapping[str, bytes], older: Mapping[str, bytes]) -> None:
    for row in range(len(manifest)):
        key = folder + manifest.key(row)
        assert manifest.rows.strong_identity(row) == (None if key in older else identity(objects[key]))
