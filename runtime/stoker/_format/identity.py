"""Identities of super-samples, by which caches and shared tiers name them: 128 bits each, of two kinds.

The **strong** identity is the beginning of the SHA-256 of the object's bytes: whoever holds the bytes can check it, and
nobody can make other bytes that have it. Manifests of earlier releases do not know it. The **weak** identity tells the
objects of one data set apart, by what their manifest says of each; it says nothing of who wrote the bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stoker._base.threads import in_thread
from stoker.abc import ObjectRef

IDENTITY_BYTES = 16
_AT_ONCE_BYTES = 64 << 10  # 35 µs; a thread takes 100
_WEAK_LABEL = b"stoker weak identity 1"


@dataclass(frozen=True, slots=True)
class Identity:
    """What names one super-sample.

    Attributes:
        value: 16 bytes.
        strong: whether they are those of the SHA-256 of the object's bytes.
    """

    value: bytes
    strong: bool


def sha256_128(data: bytes | bytearray | memoryview) -> bytes:
    """Return the first 16 bytes of the SHA-256 of an object; about 1.8 GB/s a core, without the interpreter's lock."""
    return hashlib.sha256(data).digest()[:IDENTITY_BYTES]


async def hashed(data: bytes | bytearray | memoryview) -> bytes:
    """Return :func:`sha256_128` of an object, computed in a thread unless handing it over would take longer."""
    return sha256_128(data) if len(data) <= _AT_ONCE_BYTES else await in_thread(lambda _: sha256_128(data))


def identity_of(dataset: str, ref: ObjectRef) -> Identity:
    """Return the strong identity of an object where the manifest knows it, else the weak one.

    Args:
        dataset: id of the data set.
        ref: of the object, as the manifest gives it.
    """
    if ref.sha256_128 is not None:
        return Identity(ref.sha256_128, strong=True)
    return Identity(weak_identity(dataset, ref.key, ref.tag, ref.size_bytes, ref.crc32c), strong=False)


def weak_identity(dataset: str, key: str, tag: str, size_bytes: int, crc32c: int) -> bytes:
    """Return 16 bytes that differ where any of the arguments does.

    Args:
        dataset: id of the data set.
        key: of the object, relative to the store's root.
        tag: its ETag or generation, ``""`` if unknown.
        size_bytes: of the object.
        crc32c: checksum of the object.
    """
    found = hashlib.sha256(_WEAK_LABEL)
    for text in (dataset, key, tag, str(size_bytes), str(crc32c)):
        part = text.encode()
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()[:IDENTITY_BYTES]
