"""The manifest of a data set, read from its store once for all loaders of a job that have a cache process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b

from stoker._base.machine import process_seconds
from stoker._base.retry import RetryingReader
from stoker._cluster.client import ClusterTier
from stoker._cluster.secret import SECRET_VARIABLE, ClusterSecret
from stoker._cluster.shared_reads import SharedReads
from stoker._cluster.spec import ClusterSpec
from stoker._format.manifest import Manifest
from stoker._format.versions import StoredManifest, last_commit_seconds, read_manifest, read_stored_manifest
from stoker._stores.location import parse_url
from stoker.abc import RangeReadable, Readable
from stoker.errors import ChecksumError, FormatError
from stoker_torch._config import StreamConfig
from stoker_torch._registry import TorchStore, find_registry

_MAX_AGE_SECONDS = 2.0
"""Time after which a manifest that another loader has read is read again."""
_TICK_SECONDS = 1e-6
_PLACES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "STORAGE_EMULATOR_HOST")
"""Environment variables that say where a URL leads."""
_OWN_SCHEMES = ("file", "memory")
"""Of stores that belong to the machine or the process, which costs nothing to read."""
_used: dict[str, float] = {}  # name → when the reading of what this process has used last began


def bucket_url(place: str | os.PathLike[str] | RangeReadable) -> str:
    """Return the URL of a data set that other machines read, too; empty if it is none."""
    if not isinstance(place, str | os.PathLike):
        return ""
    location = parse_url(place)
    return "" if location.scheme in _OWN_SCHEMES else location.canonical_url


async def read_manifest_once(
    reader: RetryingReader[Readable], version: int | None, *, url: str, config: StreamConfig, processes: int
) -> Manifest:
    """Return a version of the manifest, or the newest one for None, as :func:`read_manifest` does.

    What another loader of the job has read is used if its reading began in the last 2 s, after this process did, after
    its last commit, and after the reading of what it has used before: a program that commits a version and then opens
    the data set gets that version.

    Args:
        reader: store of the data set.
        version: version number.
        url: URL of the data set in a bucket; empty if it is elsewhere.
        config: settings of the loader.
        processes: number of processes of the job that read.
    """
    if config.cluster is None or processes == 1 or not url:
        return await read_manifest(reader, version)
    places = [getattr(config.options, each, None) for each in ("endpoint_url", "profile")]
    described = repr((_job(), url, places, [os.environ.get(each) for each in _PLACES], version)).encode()
    name = f"manifest/{blake2b(described, digest_size=16).hexdigest()}"
    registry = find_registry(ClusterSpec.parse(config.cluster))
    values = registry if isinstance(registry, TorchStore) and registry.is_there() else None
    secret = os.environ.get(SECRET_VARIABLE, "")
    stored: StoredManifest | None = None

    async def read() -> bytes:
        nonlocal stored
        stored = await read_stored_manifest(reader, version)
        return bytes(stored.data)

    tier = ClusterTier(config.cluster, passes=True)  # without other machines: nothing listens before the first batch
    try:
        shared = SharedReads(tier, values, ClusterSecret.parse(secret).derive_key("manifest") if secret else b"")
        not_before = time.time() - min(_MAX_AGE_SECONDS, process_seconds())
        not_before = max(not_before, last_commit_seconds(), _used.get(name, 0.0) + _TICK_SECONDS)
        data, read_at = await shared.read(name, read, not_before=not_before)
    finally:
        await tier.close()
    _used[name] = max(_used.get(name, 0.0), read_at)
    if stored is not None:
        return stored.manifest
    with suppress(FormatError, ChecksumError):
        manifest = Manifest.from_bytes(data)
        if version in (None, manifest.version):
            return manifest
    return await read_manifest(reader, version)


def _job(environment: Mapping[str, str] = os.environ) -> str:
    """Return what the processes of this job have in common: its address and start, or the process that started them."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    given = " ".join(environment.get(name, "") for name in names)
    return given if given.strip() else f"child of {os.getppid()}"
