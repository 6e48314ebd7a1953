"""A data set that a function serves over HTTPS, as a store to read from, for machines without bucket credentials.

What the store holds is what a manifest speaks of: the newest one, its versions, and their super-samples. Keys become
paths of the function's by the manifest (``super-samples/{row}?version=``); nothing can be written.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._stores.http import Call, Destination, Failure, Reply, Rule, error_of
from stoker._stores.http_objects import Asked, HttpObjects
from stoker._stores.http_store_access import ServedAccess, callers_of, said_of
from stoker._stores.location import Location, check_key, check_text
from stoker._stores.network import PerLoop
from stoker._stores.options import ServedOptions
from stoker.abc import ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    CredentialsError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    StoreError,
    UnexpectedAnswerError,
)

__all__ = ["HttpStore", "RowIndex", "super_samples", "version_of"]

_BY_CODE: dict[str, Rule] = {
    "failed": (StoreError, "the function cannot answer this, and its log says why; ask whoever deployed it"),
    "forbidden": (PermissionDeniedError, "the token is for other data sets; ask for one that names this"),
    "no-such-dataset": (
        BucketNotFoundError,
        "the function serves no data set of that name; check the address, which ends with /v1/NAME",
    ),
    "too-large": (StoreError, "the function cannot send so much at once; whoever deployed it can let it sign URLs"),
    "unauthorized": (CredentialsError, "a valid token is wanted; set STOKER_TOKEN or ServedOptions(token=...)"),
}
_DATA_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


class HttpStore(HttpObjects[ServedAccess]):
    """``stoker+https://host/v1/name``; nothing can be written."""

    def __init__(self, location: Location, options: ServedOptions) -> None:
        url = f"{location.scheme.removeprefix('stoker+')}://{location.bucket}/{location.prefix}"
        caller = callers_of(url, options, os.environ)
        super().__init__(location, lambda: ServedAccess(url, caller(), options.http))
        self._learning = PerLoop(asyncio.Lock)
        self._index = RowIndex()
        self._pinned: set[int] = set()  # versions that were asked for, and may hold what the newest no longer does

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        data, info = await super()._get(key)
        if key == POINTER_KEY or version_of(key):
            with suppress(FormatError, ChecksumError):  # whoever asked for it will see for himself
                self._index.learn(Manifest.from_bytes(data))
        return data, info

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        info = await super()._get_range(key, start, end, into, tag, begun)
        if tag not in (None, info.tag):  # the bucket may have answered, which was not told the condition
            raise ObjectChangedError(f"{self._at.object_url(key)} was overwritten: its tag is no longer {tag}")
        return info

    async def _head(self, key: str) -> ObjectInfo:
        """Return size and tag, with a byte: function platforms answer a HEAD with the length of what they saw, 0."""
        return self._info(key, await self._ask(Asked("GET", key, "bytes=0-0")))

    async def _list(self, prefix: str, start_after: str) -> AsyncIterator[ObjectInfo]:
        """Yield what the newest manifest speaks of, and that manifest under both its keys."""
        for text in (prefix, start_after):
            check_text("object key or prefix", text)
        manifest = await self._learn(POINTER_KEY)
        for info in super_samples(manifest, prefix, start_after):
            yield info
        for key in (POINTER_KEY, version_key(manifest.version)):
            if key.startswith(prefix) and key > start_after:
                yield await self._head(key)

    async def _ask(self, asked: Asked, destination: Destination | None = None) -> Reply:
        key = asked.key or ""
        reply = await super()._ask(replace(asked, path=await self._path(key)), destination)
        if version := version_of(key):
            self._pinned.add(version)
        return reply

    def _call(self, access: ServedAccess, asked: Asked, proof: Any, address: str) -> Call:
        condition = {} if asked.tag is None else {"If-Match": f'"{asked.tag}"'}
        return access.call(asked.path, asked.headers | condition, proof, address)

    async def _refusal(
        self, access: ServedAccess, _asked: Asked, _proof: Any, address: str, reply: Reply
    ) -> StoreError:
        code, text = said_of(reply)
        if not code and reply.status in (401, 403):
            return access.shut_out(address, reply)
        if code == "no-such-dataset":  # whatever of it was asked for
            address = self.url
        failure = Failure(address=address, status=reply.status, code=code, text=text, headers=reply.headers)
        return error_of(failure, _BY_CODE)

    async def _path(self, key: str) -> str:
        """Return where an object is served, below the data set's URL.

        Raises:
            NotFoundError: no version that could be asked for has it.
        """
        check_key(key)
        if key == POINTER_KEY:
            return "manifest"
        if version := version_of(key):
            return f"manifest?version={version}"
        if not key.startswith("data/"):
            raise NotFoundError(f"{self._at.object_url(key)}: a served data set has super-samples and manifests only")
        if path := self._index.path_of(key) or await self._looked_up(key):
            return path
        raise NotFoundError(f"{self._at.object_url(key)}: no known version of the data set has it")

    async def _looked_up(self, key: str) -> str | None:
        """Read the manifests that may speak of a super-sample; of many that ask for one, one does."""
        async with self._learning.get():
            for version in sorted(self._pinned, reverse=True):
                if version not in self._index:
                    with suppress(NotFoundError):  # it was there, and is no more
                        await self._learn(version_key(version))
            if (path := self._index.path_of(key)) is None:
                await self._learn(POINTER_KEY)
                path = self._index.path_of(key)
            return path

    async def _learn(self, key: str) -> Manifest:
        data, _ = await self._get(key)
        try:
            return Manifest.from_bytes(data)
        except (FormatError, ChecksumError) as error:
            raise UnexpectedAnswerError(
                f"{self._at.object_url(key)} is no manifest: {error}; is this a stoker function?"
            ) from None

    def _info(self, key: str, reply: Reply) -> ObjectInfo:
        # Where Google's bucket answers itself, its ETag is another one and the generation has a header of its own.
        tag = reply.headers.get("x-goog-generation") or reply.headers.get("ETag", "").strip('"')
        if not tag:
            raise UnexpectedAnswerError(
                f"{self._at.object_url(key)}: the answer has no ETag; is this a stoker function?"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=tag)

    def _lacks(self, method: str, key: str) -> StoreError:
        check_key(key)
        return PermissionDeniedError(
            f"{self._at.object_url(key)}: what a function serves is read-only; write to the bucket behind it"
        )


class RowIndex:
    """Learns manifests, and knows then at which row of one of them an object stands. Keeps their runs, no rows."""

    def __init__(self) -> None:
        # Run → its stretches: first number and rows → the newest version that has just that, and the first row there.
        self._stretches: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
        self._versions: set[int] = set()

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def learn(self, manifest: Manifest) -> None:
        """Take note of what a version holds."""
        if manifest.version in self._versions:
            return
        self._versions.add(manifest.version)
        first_rows = accumulate((run.rows for run in manifest.runs), initial=0)
        for run, first_row in zip(manifest.runs, first_rows, strict=False):
            stretches = self._stretches.setdefault(run.run, {})
            stretch = run.first_number, run.rows
            stretches[stretch] = max(stretches.get(stretch, (0, 0)), (manifest.version, first_row))

    def path_of(self, key: str) -> str | None:
        """Return the path, below the data set's, at which a super-sample is served; None if no known version has it."""
        match = _DATA_KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[2])
        found = [
            (version, first_row + number - first_number)
            for (first_number, rows), (version, first_row) in self._stretches.get(match[1], {}).items()
            if first_number <= number < first_number + rows
        ]
        if not found:
            return None
        version, row = max(found)  # the newest: an older one may be deleted first
        return f"super-samples/{row}?version={version}"


def version_of(key: str) -> int | None:
    """Return which version of the manifest a key is of, None if it is not one's."""
    match = _VERSION_KEY.fullmatch(key)
    version = int(match[1]) if match else 0
    return version if version and version_key(version) == key else None


def super_samples(manifest: Manifest, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Yield super-samples of a version: keys that start with ``prefix``, ascending, after ``start_after``."""
    if not ("data/".startswith(prefix) or prefix.startswith("data/")):
        return
    for key, row in sorted((manifest.key(row), row) for row in range(len(manifest))):
        if key.startswith(prefix) and key > start_after:
            ref = manifest.ref(row)
            yield ObjectInfo(key=key, size_bytes=ref.size_bytes, tag=ref.tag)
