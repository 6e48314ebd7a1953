"""Files of earlier versions, copied to where the current code reads them."""

from __future__ import annotations

from typing import Any

import stoker
from golden.v1.make_fixtures import FOLDER
from stoker_local import LocalBucket
from support.local_bucket import s3_options
from support.stores import run_check

__all__ = ["files_of", "options_of", "read_objects", "upload"]


def files_of(*folders: str) -> dict[str, bytes]:
    """Return the objects in folders of fixtures, by key."""
    return {
        path.relative_to(FOLDER / folder).as_posix(): path.read_bytes()
        for folder in folders
        for path in (FOLDER / folder).rglob("*")
        if path.is_file()
    }


def options_of(bucket: LocalBucket) -> stoker.S3Options:
    """Return store options for the bucket ``stoker`` of a local bucket server."""
    return s3_options(bucket)


def upload(url: str, options: stoker.S3Options, *folders: str) -> None:
    """Write fixtures into a bucket, which gives them the ETags in their manifests."""

    async def write(store: Any) -> None:
        for key, data in files_of(*folders).items():
            await store.put(key, data)

    run_check(stoker.open_store(url, options=options), write)


def read_objects(url: str, options: stoker.S3Options, prefix: str = "") -> dict[str, bytes]:
    """Return the objects in a bucket, by key."""
    found: dict[str, bytes] = {}

    async def read(store: Any) -> None:
        async for info in store.list(prefix):
            found[info.key], _ = await store.get(info.key)

    run_check(stoker.open_store(url, options=options), read)
    return found
