"""Answers to requests: an object of the bucket or a range of it, a redirect to it, ranges of several, or a batch.

A batch has consecutive samples of an epoch, read from several super-samples, as one super-sample file. A service keeps
manifests of its data sets within a memory limit, and a reader of samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from stoker._base.arguments import AtLeastOne, BoundedConfig
from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore, RetryPolicy
from stoker._fetch.config import FetchConfig
from stoker._fetch.samples import SampleReader
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, PackOrigin, SuperSampleBuilder
from stoker._format.versions import read_manifest
from stoker._memory.budget import SampleMemory
from stoker._order.order import Order
from stoker._stores.access_token import DATASET_NAME, TokenKeys
from stoker.abc import ObjectInfo, ObjectRef, Presigner, Store
from stoker.errors import (
    ChecksumError,
    ConfigError,
    CredentialsError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
)
from stoker_functions.serve._messages import DatasetRequest, HttpError, Request, Response, is_not_modified, parse_range
from stoker_functions.serve._values import RangesReader

_log = logging.getLogger("stoker_functions.serve.objects")

LAMBDA_ANSWER_BYTES = 4_500_000
"""Largest body on Lambda: its limit of 6 MB holds for base64, which takes four bytes for three."""

GOOGLE_ANSWER_BYTES = 31 << 20
"""Largest body on Cloud Run, whose limit is 32 MiB unless the response is streamed."""

_HEADER_BYTES = 2048  # rounded up, without the parts that depend on the columns
_HEADER_BYTES_OF_COLUMN = 256  # types, shapes and offsets of two tensors
_HEADER_SHARE_OF_SCHEMA = 4  # the header has the quoted schema, and its names once or twice more


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(BoundedConfig):
    """Settings of a :class:`Service`.

    Attributes:
        datasets: name → URL of each data set that is served.
        token_keys: keys that check the clients' tokens; default None, which accepts no token.
        answer_bytes: size of the largest body that the platform sends; default 4.5 MB, for Lambda.
        redirect_seconds: validity of the signed URL of a larger object; the client's request must begin within it.
            Default 60.
        answer_seconds: time limit of a request, after which the client gets 503; less than the platform's limit.
            Default 25.
        memory_bytes: memory for manifests, which are kept between requests, and for reading batches; default 128 MiB.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> config = ServeConfig(datasets={"train": "s3://bucket/train"}, token_keys=TokenKeys({"2026-01": b"s" * 32}))
    """

    datasets: Mapping[str, str]
    token_keys: TokenKeys | None = None
    answer_bytes: AtLeastOne[int] = LAMBDA_ANSWER_BYTES
    redirect_seconds: AtLeastOne[int] = 60
    answer_seconds: AtLeastOne[float] = 25.0
    memory_bytes: AtLeastOne[int] = 128 << 20

    def __post_init__(self) -> None:
        for name in self.datasets:
            if not DATASET_NAME.fullmatch(name):
                raise ConfigError(f"the name {name[:80]!r} of a served data set does not match {DATASET_NAME.pattern}")
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots


def cache_headers(*, pinned: bool) -> dict[str, str]:
    """Return the Cache-Control header: clients keep answers of a pinned version for ever, and revalidate others."""
    return {"Cache-Control": "private, max-age=31536000, immutable" if pinned else "private, no-cache"}


# Waiting in a function is billed, so the client retries. Only a batch, which needs many reads, retries some of them.
_NO_RETRIES = RetryPolicy(attempts=1)
_FETCHES = FetchConfig(deadline_seconds=20.0, attempts=6, attempt_seconds=8.0, hedge=False)


class ServedDataset:
    """One data set of a service, on one event loop.

    Args:
        store: store of the data set.
        config: settings of the service.
        manifest_bytes: limit of the manifests that are kept; the one used last is always kept.

    Attributes:
        store: store of the data set, without retries.
        values: reads ranges of super-samples.
    """

    def __init__(self, store: Store, config: ServeConfig, manifest_bytes: int) -> None:
        self.store = RetryingStore(store, _NO_RETRIES)
        self.values = RangesReader(self.store.wrapped, config.answer_bytes)
        self._config, self._manifest_bytes = config, manifest_bytes
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._newest = "", 0  # tag of the pointer object, and the version that it named
        self._read_lock = asyncio.Lock()

    async def manifest(self, version: int | None) -> Manifest:
        """Return a version of the manifest, or the newest one at the time of the call; concurrent calls read it once.

        Raises:
            NotFoundError: there is no such version, or no data set.
            StoreError: the manifest could not be read.
        """
        tag = "" if version else await self._pointer_tag()
        if (known := self._cached_manifest(version, tag)) is not None:
            return known
        async with self._read_lock:
            if (known := self._cached_manifest(version, tag)) is not None:
                return known
            async with self.raise_not_found():
                served = self._cache_manifest(await read_manifest(self.store, version))
            if version is None:
                self._newest = tag, served.version
            return served

    @asynccontextmanager
    async def raise_not_found(self) -> AsyncIterator[None]:
        """Run a block that reads a version of the manifest, and turn a denial of a missing one into NotFoundError.

        Without the right to list a bucket, reading a missing object is denied; but the right to read the pointer comes
        with the right to read every version.

        Raises:
            NotFoundError: the version does not exist.
        """
        try:
            yield
        except PermissionDeniedError:
            await self.store.head(POINTER_KEY)
            raise NotFoundError(f"{self.store.url} has no such version of the manifest") from None

    async def _pointer_tag(self) -> str:
        """Return the tag of the pointer to the newest manifest; empty if the first commit was interrupted."""
        try:
            return (await self.store.head(POINTER_KEY)).tag
        except NotFoundError:
            return ""

    def _cached_manifest(self, version: int | None, tag: str) -> Manifest | None:
        """Return a version that is kept; for None, the newest one if the pointer still has this tag."""
        if version is None:
            version = self._newest[1] if tag and tag == self._newest[0] else 0
        cached = self._manifests.get(version)
        if cached is not None:
            self._manifests.move_to_end(version)
        return cached

    def _cache_manifest(self, manifest: Manifest) -> Manifest:
        self._manifests[manifest.version] = manifest
        self._manifests.move_to_end(manifest.version)
        held_bytes = sum(cached.file_bytes for cached in self._manifests.values())
        while held_bytes > self._manifest_bytes and len(self._manifests) > 1:
            _, oldest = self._manifests.popitem(last=False)
            held_bytes -= oldest.file_bytes
        return manifest

    async def answer_object(
        self, request: Request, key: str, headers: Mapping[str, str], pinned: ObjectRef | None = None
    ) -> Response:
        """Return the response to a request for an object.

        In a copied bucket, tags differ from those in the manifest: then, and before a redirect, the bucket is asked for
        the tag.

        Args:
            request: the request.
            key: key of the object.
            headers: more headers of the response.
            pinned: size, tag and checksum in the manifest, if it has the object; then no HEAD request comes first.

        Raises:
            HttpError: a condition does not hold, the range is not valid, or the answer is too large and cannot be
                redirected.
            StoreError: the object could not be read.
        """
        if pinned is not None and pinned.tag and request.method != "HEAD":
            info = ObjectInfo(key=key, size_bytes=pinned.size_bytes, tag=pinned.tag)
            with suppress(ObjectChangedError):
                return await self._answer(request, info, headers, pinned)
        return await self._answer(request, await self.store.head(key), headers, pinned)

    async def _answer(
        self, request: Request, info: ObjectInfo, more_headers: Mapping[str, str], pinned: ObjectRef | None
    ) -> Response:
        etag = f'"{info.tag}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **more_headers}
        if is_not_modified(request.headers, etag):
            return Response(status=304, headers=headers)
        headers["Content-Type"] = "application/octet-stream"
        if request.method == "HEAD":
            return Response(status=200, headers={**headers, "Content-Length": str(info.size_bytes)})
        byte_range = parse_range(request.headers, info.size_bytes, etag)
        start, end = byte_range or (0, info.size_bytes)
        if end - start > self._config.answer_bytes:
            current = info if pinned is None else await self.store.head(info.key)
            return await self._redirect(current, end - start)
        body = bytearray(end - start)
        if body:
            await self.store.get_range(info.key, start, end, into=memoryview(body), tag=info.tag)
        if byte_range is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.size_bytes}"
        elif pinned is not None and crc32c(body) != pinned.crc32c:
            raise ChecksumError(
                f"{self.store.url}/{info.key} is damaged: its CRC-32C differs from the manifest's; run 'stoker verify'"
            )
        return Response(status=200 if byte_range is None else 206, headers=headers, body=body)

    async def _redirect(self, info: ObjectInfo, wanted_bytes: int) -> Response:
        """Return a redirect to a signed URL, which lets the client read this object for a short time."""
        signer = self.store.wrapped
        try:
            if not isinstance(signer, Presigner):
                raise CredentialsError(f"{self.store.url} cannot sign URLs")
            url = await signer.presign(info.key, seconds=self._config.redirect_seconds, tag=info.tag)
        except CredentialsError as error:
            _log.warning("an answer of %d bytes cannot be redirected: %s", wanted_bytes, error)
            limit = f"the answer has {wanted_bytes} bytes, and one request gets at most {self._config.answer_bytes}"
            raise HttpError(413, "too-large", f"{limit}: request ranges") from None
        return Response(status=307, headers={"Location": url, "ETag": f'"{info.tag}"', "Cache-Control": "no-store"})


class ServedDatasets:
    """All data sets of a service, on one event loop.

    Args:
        config: settings of the service; a quarter of its memory is for manifests, in equal parts for each data set, and
            the rest for reading samples.
        store: function from the URL of a data set to its open store.
    """

    def __init__(self, config: ServeConfig, store: Callable[[str], Store]) -> None:
        self._config, self._store = config, store
        self._datasets: dict[str, ServedDataset] = {}
        self._reader: tuple[str, int, SampleReader] | None = None
        self._reader_users = 0  # number of requests that use the reader
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._reader_lock = asyncio.Lock()

    async def answer(self, ask: DatasetRequest, request: Request) -> Response:
        """Return the response to a request.

        Args:
            ask: the parsed request.
            request: the request itself, for its method and headers.

        Raises:
            HttpError: the object does not exist, a condition does not hold, or the answer is too large.
            StoreError: the object could not be read.
        """
        dataset, version = self._dataset(ask.dataset), ask.version
        headers = cache_headers(pinned=version is not None)
        if ask.what == "manifest":
            key = POINTER_KEY if version is None else version_key(version)
            async with dataset.raise_not_found():
                return await dataset.answer_object(request, key, headers)
        manifest = await dataset.manifest(version)
        if ask.what == "values":
            return await dataset.values.answer(manifest, ask.ranges)
        headers |= {"Stoker-Version": str(manifest.version)}
        if ask.what == "super-samples":
            if ask.number >= len(manifest):
                raise HttpError(404, "no-such-super-sample", f"there are super-samples 0 to {len(manifest) - 1}")
            pinned = manifest.ref(ask.number)
            return await dataset.answer_object(request, pinned.key, headers, pinned)
        if ask.number >= manifest.samples:
            raise HttpError(404, "no-such-position", f"an epoch has positions 0 to {manifest.samples - 1}")
        etag = f'"{batch_id(manifest, ask)}"'
        headers |= {"ETag": etag, "Accept-Ranges": "none"}
        if is_not_modified(request.headers, etag):
            return Response(status=304, headers=headers)
        async with self._borrow_reader(ask.dataset, manifest) as reader:
            body = await read_batch(manifest, reader, ask, self._config.answer_bytes)
        headers["Content-Type"] = "application/octet-stream"
        if request.method == "HEAD":
            return Response(status=200, headers={**headers, "Content-Length": str(len(body))})
        return Response(status=200, headers=headers, body=body)

    def _dataset(self, name: str) -> ServedDataset:
        if name not in self._config.datasets:
            raise HttpError(404, "no-such-dataset", "this service has no data set of that name")
        if name not in self._datasets:
            manifest_bytes = self._config.memory_bytes // (4 * len(self._config.datasets))
            self._datasets[name] = ServedDataset(self._store(self._config.datasets[name]), self._config, manifest_bytes)
        return self._datasets[name]

    @asynccontextmanager
    async def _borrow_reader(self, name: str, manifest: Manifest) -> AsyncIterator[SampleReader]:
        """Lend the reader of a version of a data set, which is kept with its heads until another one is needed.

        A reader may take all the memory, so there is one at a time, which several requests may use. A request that
        needs another one waits until the reader is free, and later requests wait behind it.

        Raises:
            MemoryBudgetError: the memory is too small.
        """
        async with self._reader_lock:
            if self._reader is None or self._reader[:2] != (name, manifest.version):
                await self._is_free.wait()
                self._reader = name, manifest.version, self._open_reader(name, manifest)
            reader = self._reader[2]
            self._reader_users += 1
            self._is_free.clear()
        try:
            yield reader
        finally:
            self._reader_users -= 1
            if not self._reader_users:
                self._is_free.set()

    def _open_reader(self, name: str, manifest: Manifest) -> SampleReader:
        memory_bytes = self._config.memory_bytes
        memory = SampleMemory.plan(manifest, 0, memory_bytes - memory_bytes // 4)
        return SampleReader(self._dataset(name).store.wrapped, manifest, manifest.schema, memory, _FETCHES)


def batch_id(manifest: Manifest, ask: DatasetRequest) -> str:
    """Return the identity of a batch: 32 hexadecimal digits, equal for equal bytes."""
    order = ask.order
    content = (
        FORMAT,
        manifest.dataset,
        manifest.version,
        (order.seed, order.shuffle, order.window, order.lanes),
        (ask.epoch, ask.number, ask.size),
    )
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


async def read_batch(manifest: Manifest, reader: SampleReader, ask: DatasetRequest, limit_bytes: int) -> bytes:
    """Return a batch as a safetensors file with all columns; the last batch of an epoch may have fewer samples.

    Samples are read in groups that fit if they have the average size, so that little is read beyond the limit.

    Raises:
        HttpError: the file would have more than ``limit_bytes``; the message has the batch size that fits.
        StoreError: samples could not be read.
    """
    order = Order(manifest.rows.samples, ask.order, ask.epoch)
    samples = order.at(ask.number, min(ask.number + ask.size, order.samples))
    builder = SuperSampleBuilder(manifest.schema)
    room_bytes = limit_bytes - _max_header_bytes(manifest.schema)
    at_a_time = max(1, room_bytes * manifest.samples // manifest.size_bytes)
    for first in range(0, len(samples), at_a_time):
        for sample in await reader.read(samples[first : first + at_a_time]):
            values = manifest.schema.encode(sample)
            if builder.size_with(values) > room_bytes:
                raise HttpError(413, "too-large", _size_advice(len(builder), limit_bytes))
            builder.add(values)
    origin = PackOrigin(dataset=manifest.dataset, run=batch_id(manifest, ask)[:16], ordinal=0)
    data, _ = builder.finish(origin)
    return data


def _max_header_bytes(schema: Schema) -> int:
    """Return the maximum size of a file's header."""
    named_bytes = _HEADER_BYTES_OF_COLUMN * len(schema) + _HEADER_SHARE_OF_SCHEMA * len(schema.to_json())
    return _HEADER_BYTES + named_bytes


def _size_advice(fitting: int, limit_bytes: int) -> str:
    if not fitting:
        return f"the first sample alone is larger than an answer of {limit_bytes} bytes: read its super-sample"
    return f"the batch is larger than an answer of {limit_bytes} bytes; size={fitting} fits at this position"
