"""Data sets that a tier server reads from, under the names that tenants ask by.

Clients send no keys: the server computes the name of each super-sample from the manifest, for each tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from stoker._base.breaker import Breaker
from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader
from stoker._base.task_group import end_tasks
from stoker._format.manifest import POINTER_KEY, PREFIX_DIGITS, Manifest, NameIndex
from stoker._format.versions import read_manifest
from stoker._shared.secret import TierSecret, is_object_of
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError, StokerError

_REFRESH_SECONDS = 30.0
"""Between two looks for a newer version of a data set, at least."""

_log = logging.getLogger("stoker.tier.server")


class ReadThrough:
    """One data set, of which the newest version is read. Lives on one event loop.

    Args:
        store: of the data set; closed by whoever opened it.
        secrets: of the tenants.

    Attributes:
        breaker: permits reads of the bucket.
    """

    def __init__(self, store: Readable, secrets: Sequence[TierSecret]) -> None:
        self._store, self._secrets = RetryingReader(store), tuple(secrets)
        self.breaker = Breaker()
        self._names: dict[str, NameIndex] = {}
        self._manifest: Manifest | None = None
        self._tag = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._next_seconds = float("-inf")

    async def refresh(self) -> None:
        """Read the newest manifest, if it is another one, and compute the names of what it has.

        Raises:
            StoreError: it cannot be read.
            FormatError: it is none.
        """
        tag = (await self._store.head(POINTER_KEY)).tag
        if tag == self._tag:
            return
        manifest = await read_manifest(self._store)
        self._names = await asyncio.to_thread(
            lambda: {secret.tenant: _index(manifest, secret) for secret in self._secrets}
        )
        self._manifest, self._tag = manifest, tag

    def look_for_newer(self) -> None:
        """Begin to look for a newer version, if that was not done lately."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_seconds and (self._refreshing is None or self._refreshing.done()):
            self._next_seconds = loop.time() + _REFRESH_SECONDS
            self._refreshing = loop.create_task(self._refresh_quietly())

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except StokerError as error:
            _log.warning("%s: no newer version could be looked for: %s", self._store.url, error)

    async def close(self) -> None:
        """End what was begun. Idempotent."""
        if self._refreshing is not None:
            await end_tasks([self._refreshing])

    def find(self, secret: TierSecret, name: str) -> ObjectRef | None:
        """Return what a tenant calls by a name; None if the data set does not have it."""
        names = self._names.get(secret.tenant)
        return None if names is None else names.find(name)

    def is_object(self, key: str, data: memoryview) -> bool:
        """Return whether bytes are an object of the data set, of the key ``<tenant>/<name>``; from any thread."""
        tenant, _, name = key.partition("/")
        names = self._names.get(tenant)
        ref = None if names is None else names.find(name)
        return ref is not None and (len(data), crc32c(data)) == (ref.size_bytes, ref.crc32c)

    def group(self, secret: TierSecret) -> str:
        """Return what tells the data set's objects from those of others."""
        return secret.group(self._manifest.dataset) if self._manifest is not None else ""

    async def read(self, ref: ObjectRef, into: memoryview) -> None:
        """Read an object, and verify it.

        Raises:
            StoreError: it could not be read.
            ChecksumError: it is not what the manifest says.
        """
        await self._store.get_range(ref.key, 0, ref.size_bytes, into=into, tag=ref.tag or None)
        found = await asyncio.to_thread(crc32c, into)
        if found != ref.crc32c:
            raise ChecksumError(f"{ref.key} has crc32c {found:08x}, its manifest says {ref.crc32c:08x}")


def is_sound(secrets: Sequence[TierSecret], sources: Sequence[ReadThrough], key: str, data: memoryview) -> bool:
    """Return whether bytes are the object of a key ``<tenant>/<name>``, by their SHA-256 or a source's manifest."""
    return is_object_of(secrets, key, data) or any(source.is_object(key, data) for source in sources)


def _index(manifest: Manifest, secret: TierSecret) -> NameIndex:
    refs = map(manifest.ref, range(len(manifest)))
    prefixes = np.fromiter((int(secret.name(ref)[:PREFIX_DIGITS], 16) for ref in refs), np.uint64, len(manifest))
    return NameIndex(manifest, secret.name, prefixes)
