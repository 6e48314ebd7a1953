"""Answers: an object of the bucket, or a range of one, as its bytes or where to read them; or a batch.

A batch is samples of an epoch, from wherever they lie, as one super-sample file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._fetch.samples import SampleReader
from stoker._format.manifest import Manifest
from stoker._format.schema import Schema
from stoker._format.supersample import FORMAT, Origin, SuperSampleBuilder
from stoker._order.order import Order
from stoker._stores.access_token import DATASET_NAME, TokenKeys
from stoker.abc import ObjectInfo, ObjectRef, Presigner
from stoker.errors import ChecksumError, ConfigError, CredentialsError, ObjectChangedError
from stoker_functions.serve._messages import Ask, Refusal, Request, Response, asked_range, is_unchanged

_log = logging.getLogger("stoker_functions.serve.objects")

LAMBDA_ANSWER_BYTES = 4_500_000
"""Of 6 MB that Lambda sends, which base64 fills by four bytes for three."""

GOOGLE_ANSWER_BYTES = 31 << 20
"""Of 32 MiB that Cloud Run sends unless it is streamed."""

_HEADER_BYTES = 2048  # rounded up, without what depends on the columns
_HEADER_BYTES_OF_COLUMN = 256  # two tensors' types, shapes and offsets
_HEADER_SHARE_OF_SCHEMA = 4  # it stands there in quotes, and the names in it once or twice more


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of a service.

    Attributes:
        datasets: name → URL: what is served.
        token_keys: that clients' tokens are checked with; None accepts no token.
        answer_bytes: the largest body that the platform sends.
        redirect_seconds: that a signed URL to a larger one holds; only its request must begin within.
        answer_seconds: after which a request is put off rather than left to the platform's time limit.
        memory_bytes: for what is kept between requests, and what batches are read with.

    Raises:
        ConfigError: a value is out of range.
    """

    datasets: Mapping[str, str]
    token_keys: TokenKeys | None = None
    answer_bytes: int = LAMBDA_ANSWER_BYTES
    redirect_seconds: int = 60
    answer_seconds: float = 25.0
    memory_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        for name in self.datasets:
            if not DATASET_NAME.fullmatch(name):
                raise ConfigError(f"the name {name[:80]!r} of a data set that is served is not {DATASET_NAME.pattern}")
        for name in ("answer_bytes", "redirect_seconds", "answer_seconds", "memory_bytes"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


def caching(*, pinned: bool) -> dict[str, str]:
    """Return how long an answer may be kept: for good by the client itself if its version is said, else to compare."""
    return {"Cache-Control": "private, max-age=31536000, immutable" if pinned else "private, no-cache"}


async def answer_object(
    store: RetryingStore,
    request: Request,
    config: ServeConfig,
    key: str,
    headers: Mapping[str, str],
    pinned: ObjectRef | None = None,
) -> Response:
    """Return the response to a request for an object.

    A copied bucket has other tags than the manifest: it is asked for them then, and before anybody is sent there.

    Args:
        store: where the object is.
        request: what is asked.
        config: how much is sent at a time.
        key: of the object.
        headers: more headers of its responses.
        pinned: what the manifest says of it, if it does; then it is read without asking for its tag first.

    Raises:
        Refusal: a condition does not hold, the range is none, or the answer is too large and cannot be redirected.
        StoreError: the object could not be had.
    """
    if pinned is not None and pinned.tag and request.method != "HEAD":
        info = ObjectInfo(key=key, size_bytes=pinned.size_bytes, tag=pinned.tag)
        with suppress(ObjectChangedError):
            return await _answer(store, request, config, info, headers, pinned)
    return await _answer(store, request, config, await store.head(key), headers, pinned)


async def _answer(
    store: RetryingStore,
    request: Request,
    config: ServeConfig,
    info: ObjectInfo,
    more_headers: Mapping[str, str],
    pinned: ObjectRef | None,
) -> Response:
    etag = f'"{info.tag}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **more_headers}
    if is_unchanged(request.headers, etag):
        return Response(status=304, headers=headers)
    headers["Content-Type"] = "application/octet-stream"
    if request.method == "HEAD":
        return Response(status=200, headers={**headers, "Content-Length": str(info.size_bytes)})
    asked = asked_range(request.headers, info.size_bytes, etag)
    start, end = asked or (0, info.size_bytes)
    if end - start > config.answer_bytes:
        told = info if pinned is None else await store.head(info.key)
        return await _redirect(store, config, told, end - start)
    body = bytearray(end - start)
    if body:
        await store.get_range(info.key, start, end, into=memoryview(body), tag=info.tag)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.size_bytes}"
    elif pinned is not None and crc32c(body) != pinned.crc32c:
        raise ChecksumError(f"{store.url}/{info.key} is not what was packed: its checksum differs")
    return Response(status=200 if asked is None else 206, headers=headers, body=body)


async def _redirect(store: RetryingStore, config: ServeConfig, info: ObjectInfo, wanted_bytes: int) -> Response:
    """Send the client to the bucket, with the right to read this object for a short time."""
    signer = store.wrapped
    try:
        if not isinstance(signer, Presigner):
            raise CredentialsError(f"{store.url} cannot sign URLs")
        url = await signer.presign(info.key, seconds=config.redirect_seconds, tag=info.tag)
    except CredentialsError as error:
        _log.warning("an answer of %d bytes cannot be redirected: %s", wanted_bytes, error)
        raise Refusal(
            413,
            "too-large",
            f"the answer has {wanted_bytes} bytes, and one request gets at most {config.answer_bytes}: ask for ranges",
        ) from None
    return Response(status=307, headers={"Location": url, "ETag": f'"{info.tag}"', "Cache-Control": "no-store"})


def batch_id(manifest: Manifest, ask: Ask) -> str:
    """Return what stands for the bytes of a batch: 32 hexadecimal digits, the same for the same bytes."""
    order = ask.order
    said = (
        FORMAT,
        manifest.dataset,
        manifest.version,
        (order.seed, order.shuffle, order.window, order.lanes),
        (ask.epoch, ask.number, ask.size),
    )
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


async def read_batch(manifest: Manifest, reader: SampleReader, ask: Ask, limit_bytes: int) -> bytes:
    """Return a batch as a safetensors file with the columns of the data set; an epoch's last may have fewer samples.

    No more is read than would fit: about as many samples at a time as fit if they are like the others.

    Raises:
        Refusal: the file would have more than ``limit_bytes``; says what fits.
        StoreError: samples could not be had.
    """
    order = Order(manifest.rows.samples, ask.order, ask.epoch)
    samples = order.at(ask.number, min(ask.number + ask.size, order.samples))
    builder = SuperSampleBuilder(manifest.schema)
    room_bytes = limit_bytes - _header_bytes(manifest.schema)
    at_a_time = max(1, room_bytes * manifest.samples // manifest.size_bytes)
    for first in range(0, len(samples), at_a_time):
        for sample in await reader.read(samples[first : first + at_a_time]):
            values = manifest.schema.encode(sample)
            if builder.size_with(values) > room_bytes:
                raise Refusal(413, "too-large", _advice(len(builder), limit_bytes))
            builder.add(values)
    origin = Origin(dataset=manifest.dataset, run=batch_id(manifest, ask)[:16], ordinal=0)
    data, _ = builder.finish(origin)
    return data


def _header_bytes(schema: Schema) -> int:
    """Return what a file has before its data, at most."""
    named_bytes = _HEADER_BYTES_OF_COLUMN * len(schema) + _HEADER_SHARE_OF_SCHEMA * len(schema.to_json())
    return _HEADER_BYTES + named_bytes


def _advice(fitting: int, limit_bytes: int) -> str:
    if not fitting:
        return f"the first sample alone has more than the {limit_bytes} bytes of an answer: read its super-sample"
    return f"the batch has more than the {limit_bytes} bytes of an answer; size={fitting} fits at this position"
