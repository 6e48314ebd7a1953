"""Data sets that a tier server reads missing objects from, by the names in the tenants' requests.

Clients send names and no keys: the server computes the name of each super-sample in the manifest, for each tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from stoker._base.breaker import CircuitBreaker
from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader
from stoker._base.task_group import end_tasks
from stoker._format.manifest import POINTER_KEY, PREFIX_DIGITS, Manifest, NameIndex
from stoker._format.versions import read_manifest
from stoker._shared.secret import TierSecret, matches_key
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError, StokerError

_REFRESH_SECONDS = 30.0
"""Minimum time between two checks for a newer version of a data set."""

_log = logging.getLogger("stoker.tier.server")


class ReadThrough:
    """The newest version of one data set. Used by one event loop.

    Args:
        store: Store of the data set; the caller closes it.
        secrets: The tenants' secrets.

    Attributes:
        breaker: Circuit breaker of reads from the bucket.
    """

    def __init__(self, store: Readable, secrets: Sequence[TierSecret]) -> None:
        self._store, self._secrets = RetryingReader(store), tuple(secrets)
        self.breaker = CircuitBreaker()
        self._names: dict[str, NameIndex] = {}
        self._manifest: Manifest | None = None
        self._tag = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._next_seconds = float("-inf")

    async def refresh(self) -> None:
        """Read the newest manifest, if it has changed, and compute the names of its super-samples.

        Raises:
            StoreError: The manifest cannot be read.
            FormatError: The object is not a manifest.
        """
        tag = (await self._store.head(POINTER_KEY)).tag
        if tag == self._tag:
            return
        manifest = await read_manifest(self._store)
        self._names = await asyncio.to_thread(
            lambda: {secret.tenant: _create_name_index(manifest, secret) for secret in self._secrets}
        )
        self._manifest, self._tag = manifest, tag

    def start_refresh(self) -> None:
        """Start to check for a newer version in the background, at most once every 30 s."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_seconds and (self._refreshing is None or self._refreshing.done()):
            self._next_seconds = loop.time() + _REFRESH_SECONDS
            self._refreshing = loop.create_task(self._refresh_quietly())

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except StokerError as error:
            _log.warning("%s: the check for a newer version failed: %s", self._store.url, error)

    async def close(self) -> None:
        """Cancel the check for a newer version. Idempotent."""
        if self._refreshing is not None:
            await end_tasks([self._refreshing])

    def find(self, secret: TierSecret, name: str) -> ObjectRef | None:
        """Return the super-sample that has a name for a tenant; None if the data set does not have it."""
        names = self._names.get(secret.tenant)
        return None if names is None else names.find(name)

    def matches_key(self, key: str, data: memoryview) -> bool:
        """Return whether bytes are the data set's object with the key ``<tenant>/<name>``; callable from any thread."""
        tenant, _, name = key.partition("/")
        names = self._names.get(tenant)
        ref = None if names is None else names.find(name)
        return ref is not None and (len(data), crc32c(data)) == (ref.size_bytes, ref.crc32c)

    def group(self, secret: TierSecret) -> str:
        """Return the group of the data set's objects for a tenant; see :meth:`TierSecret.group`."""
        return secret.group_id(self._manifest.dataset) if self._manifest is not None else ""

    async def read(self, ref: ObjectRef, into: memoryview) -> None:
        """Read an object, and verify its checksum.

        Raises:
            StoreError: The object could not be read.
            ChecksumError: The checksum differs from that in the manifest.
        """
        await self._store.get_range(ref.key, 0, ref.size_bytes, into=into, tag=ref.tag or None)
        checksum = await asyncio.to_thread(crc32c, into)
        if checksum != ref.crc32c:
            raise ChecksumError(f"{ref.key} has crc32c {checksum:08x}, but its manifest says {ref.crc32c:08x}")


def is_valid_object(secrets: Sequence[TierSecret], sources: Sequence[ReadThrough], key: str, data: memoryview) -> bool:
    """Return whether bytes belong to the key ``<tenant>/<name>``, by their SHA-256 or a source's manifest."""
    return matches_key(secrets, key, data) or any(source.matches_key(key, data) for source in sources)


def _create_name_index(manifest: Manifest, secret: TierSecret) -> NameIndex:
    refs = map(manifest.ref, range(len(manifest)))
    prefixes = np.fromiter((int(secret.object_name(ref)[:PREFIX_DIGITS], 16) for ref in refs), np.uint64, len(manifest))
    return NameIndex(manifest, secret.object_name, prefixes)
