"""128-bit identities of super-samples, under which caches and shared tiers store them. There are two kinds.

The **strong** identity is the first 128 bits of the SHA-256 of the object's bytes. It can be verified from the bytes
and cannot be forged. Manifests of earlier releases lack it. The **weak** identity is a hash of the object's manifest
entry. It distinguishes the objects of a data set, but does not authenticate their bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stoker._base.segments import SegmentedBytes
from stoker._base.threads import run_in_thread
from stoker.abc import Buffer, ObjectRef

IDENTITY_BYTES = 16
_MAX_INLINE_BYTES = 64 << 10  # hashed in 35 µs; starting work in a thread takes 100 µs
_WEAK_LABEL = b"stoker weak identity 1"


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """The identity of one super-sample.

    Attributes:
        value: 16 bytes.
        is_strong: whether this is a strong identity: the first bytes of the object's SHA-256.
    """

    value: bytes
    is_strong: bool


def sha256_128(data: Buffer | SegmentedBytes) -> bytes:
    """Return the first 16 bytes of an object's SHA-256; about 1.8 GB/s per core, with the GIL released."""
    digest = hashlib.sha256()
    for piece in data if isinstance(data, SegmentedBytes) else (data,):
        digest.update(piece)
    return digest.digest()[:IDENTITY_BYTES]


async def compute_sha256_128(data: Buffer | SegmentedBytes) -> bytes:
    """Return :func:`sha256_128` of an object, computed in a thread if it is larger than 64 KiB."""
    return sha256_128(data) if len(data) <= _MAX_INLINE_BYTES else await run_in_thread(lambda _: sha256_128(data))


def identity_of(dataset: str, ref: ObjectRef) -> ObjectIdentity:
    """Return the strong identity of an object if its manifest has it, otherwise the weak one.

    Args:
        dataset: id of the data set.
        ref: reference to the object, from the manifest.
    """
    if ref.sha256_128 is not None:
        return ObjectIdentity(ref.sha256_128, is_strong=True)
    return ObjectIdentity(weak_identity(dataset, ref.key, ref.tag, ref.size_bytes, ref.crc32c), is_strong=False)


def weak_identity(dataset: str, key: str, tag: str, size_bytes: int, crc32c: int) -> bytes:
    """Return a hash of the arguments, 16 bytes.

    Args:
        dataset: id of the data set.
        key: key of the object, relative to the store's root.
        tag: ETag or generation of the object, ``""`` if unknown.
        size_bytes: size of the object.
        crc32c: CRC-32C of the object.
    """
    digest = hashlib.sha256(_WEAK_LABEL)
    for text in (dataset, key, tag, str(size_bytes), str(crc32c)):
        part = text.encode()
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()[:IDENTITY_BYTES]
