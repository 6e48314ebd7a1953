"""ingest: packs new raw objects of a bucket into super-samples, as the bucket's notifications arrive.

The objects of one delivery are packed together, except archives, which are packed alone. A queue delivers at least
once, and may group messages differently when it delivers them again: each run's record names its raw objects, and the
commit leaves out samples that the data set has already. An object that was replaced or deleted after its notification
is left out, too; the next notification counts. An object that cannot be packed fails alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import unquote_plus

from stoker._base.fields import JsonFields
from stoker._base.task_group import for_each
from stoker._format import versions
from stoker._format.schema import Array, Schema
from stoker._pack.merge import provisional_dataset
from stoker._sources.folders import files_schema, images_schema, is_sample_file
from stoker._sources.listing import ObjectSource, is_raw_object
from stoker._sources.parts import SourcePart, group_by_size
from stoker._sources.webdataset import open_webdataset
from stoker._stores.location import check_key, parse_url
from stoker.abc import ObjectInfo, SourceListing
from stoker.errors import (
    ConfigError,
    DeadlineError,
    EventError,
    NotFoundError,
    ObjectChangedError,
    StokerError,
    TransientError,
)
from stoker_functions._deployment import Deployment, IngestSettings, InvocationDeadline
from stoker_functions._pack import pack_part

_MAX_MESSAGES = 10_000  # the largest batch of a queue
_MAX_RECORDS = 1_000
_MAX_BODY_CHARACTERS = 1 << 20  # the largest message of a queue


@dataclass(frozen=True, slots=True)
class NotifiedObject:
    """A raw object in a notification.

    Attributes:
        url: URL of its bucket.
        info: key in the bucket, size and tag.
    """

    url: str
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message of a queue.

    Attributes:
        id: id of the message in the queue.
        objects: new objects; none for a test message or a message of deleted objects.
        error: error of parsing the message, None if it is valid.
    """

    id: str
    objects: tuple[NotifiedObject, ...] = ()
    error: EventError | None = None


def parse_queue_messages(event: object) -> list[QueueMessage]:
    """Return the messages of an SQS event; a message that is not valid has an error and does not affect the others.

    Raises:
        EventError: ``event`` is not an SQS event.
    """
    fields = JsonFields(event, "queue event")
    messages = []
    for record in fields.array("Records", max_length=_MAX_MESSAGES):
        record_fields = JsonFields(record, "queue event's record")
        name, body = record_fields.text("messageId"), record_fields.value("body")
        try:
            messages.append(QueueMessage(name, tuple(_parse_s3_objects(body))))
        except EventError as error:
            messages.append(QueueMessage(name, error=error))
    return messages


def _parse_s3_objects(body: object) -> list[NotifiedObject]:
    if not isinstance(body, str) or len(body) > _MAX_BODY_CHARACTERS:
        raise EventError(f"the message's body is not a string of at most {_MAX_BODY_CHARACTERS} characters")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise EventError(f"the message's body {body[:80]!r} is not JSON") from None
    if isinstance(content, Mapping) and content.get("Event") == "s3:TestEvent":
        return []
    records = JsonFields(content, "S3 notification").array("Records", max_length=_MAX_RECORDS)
    return [notified for record in records if (notified := _parse_s3_object(record)) is not None]


def _parse_s3_object(record: object) -> NotifiedObject | None:
    fields = JsonFields(record, "S3 notification's record")
    # Amazon omits the prefix "s3:", other S3-compatible stores send it.
    if not fields.text("eventName").removeprefix("s3:").startswith("ObjectCreated:"):
        return None
    s3 = fields.nested("s3")
    bucket, item = s3.nested("bucket"), s3.nested("object")
    info = ObjectInfo(
        key=unquote_plus(item.text("key")),
        size_bytes=item.integer("size", default=0),
        tag=item.text("eTag", pattern="[ -~]{1,256}"),
    )
    return NotifiedObject(f"s3://{bucket.text('name', pattern='[A-Za-z0-9._-]{3,63}')}", info)


def parse_storage_object(data: object) -> NotifiedObject:
    """Return the object of a Cloud Storage notification, which has the object resource of the JSON API.

    This is the body of a notification that Pub/Sub pushes unwrapped, and of a CloudEvent
    ``google.cloud.storage.object.v1.finalized`` in binary mode. Source: Cloud Storage, "Pub/Sub notifications".

    Args:
        data: body of the notification, parsed as JSON.

    Raises:
        EventError: ``data`` is not such a body.
    """
    fields = JsonFields(data, "storage event")
    size = fields.text("size", pattern="[0-9]{1,15}")
    generation = fields.text("generation", pattern="[0-9]{1,19}")
    info = ObjectInfo(key=fields.text("name"), size_bytes=int(size), tag=generation)
    return NotifiedObject(f"gs://{fields.text('bucket', pattern='[A-Za-z0-9._-]{3,222}')}", info)


_log = logging.getLogger("stoker_functions.ingest")
_HEAD_CONCURRENCY = 32
_RUN_BYTES = 256 << 20  # read in some ten seconds
_MAX_SINGLE_FAILURES = 16
_MAX_BATCH_OBJECTS = 1000
_BATCH_WAIT_SECONDS = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _IngestTarget:
    """The data set that gets the samples of raw objects."""

    url: str
    dataset_id: str
    schema: Schema | None
    ingest: IngestSettings


@dataclass(frozen=True, slots=True)
class _RawObject:
    """A raw object below one of the deployment's sources, and the id of its message."""

    source: str
    info: ObjectInfo
    message: str


async def ingest_queue(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Pack the objects in the messages of an SQS event.

    Returns:
        ``batchItemFailures``: messages that the queue should keep and deliver again; after its maximum number of
        deliveries, it moves them to its dead-letter queue.

    Raises:
        EventError: the event is not an SQS event.
        ConfigError: ``STOKER_INGEST`` is not set.
    """
    messages = parse_queue_messages(event)
    failed = await _ingest(messages, deployment, deadline)
    return {"batchItemFailures": [{"itemIdentifier": name} for name in failed]}


async def ingest_objects(
    objects: Iterable[NotifiedObject], deployment: Deployment, deadline: InvocationDeadline
) -> list[StokerError | None]:
    """Pack the raw objects of several notifications together, and return the error of each, or None.

    Raises:
        ConfigError: ``STOKER_INGEST`` is not set.
        StoreError: the data set cannot be read.
    """
    messages = [QueueMessage(str(number), (notified,)) for number, notified in enumerate(objects)]
    failed = await _ingest(messages, deployment, deadline)
    return [failed.get(message.id) for message in messages]


async def ingest_object(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Pack the raw object of a Cloud Storage event, and return when its samples are durable.

    Objects that one instance receives within a second are packed together.

    Raises:
        StokerError: the object cannot be packed, or not in time; the platform sends the event again.
    """
    await _object_batcher(deployment).add((parse_storage_object(event), deadline))
    return {}


@cache
def _object_batcher(deployment: Deployment) -> Batcher[tuple[NotifiedObject, InvocationDeadline]]:
    """Return the batcher that collects the objects of concurrent events of an instance."""

    async def ingest_all(
        notifications: Sequence[tuple[NotifiedObject, InvocationDeadline]],
    ) -> Sequence[StokerError | None]:
        first = min((deadline for _, deadline in notifications), key=lambda deadline: deadline.at_seconds)
        return await ingest_objects([notified for notified, _ in notifications], deployment, first)

    return Batcher(ingest_all, max_items=_MAX_BATCH_OBJECTS, wait_seconds=_BATCH_WAIT_SECONDS)


async def _ingest(
    messages: Sequence[QueueMessage], deployment: Deployment, deadline: InvocationDeadline
) -> dict[str, StokerError]:
    """Pack the objects of messages, and return the ids of the messages that failed, each with its error."""
    failed: dict[str, StokerError] = {}
    target = await _find_target(deployment)
    raw_objects: dict[str, list[_RawObject]] = defaultdict(list)
    for message in messages:
        try:
            if message.error is not None:
                raise message.error
            for raw in [_match_source(notified, message.id, deployment, target) for notified in message.objects]:
                if raw is not None:
                    raw_objects[raw.source].append(raw)
        except StokerError as error:
            failed[message.id] = error
    for source, raws in raw_objects.items():
        packing = _SourcePacker(source, target, deployment, deadline)
        most_items = 1 if target.ingest.kind == "webdataset" else len(raws)
        # Several runs, so that a deadline interrupts only one of them.
        for group in group_by_size(raws, lambda raw: raw.info.size_bytes, max_bytes=_RUN_BYTES, max_items=most_items):
            await packing.pack(group)
        await packing.forget_unfinished()
        failed.update(packing.failed)
    for name, problem in failed.items():
        _log.error("message %s: %s: %s", _escape_line(name), type(problem).__name__, _escape_line(problem))
    return failed


async def _find_target(deployment: Deployment) -> _IngestTarget:
    ingest = deployment.settings.ingest
    if ingest is None:
        raise ConfigError("this deployment ingests no raw objects: STOKER_INGEST is not set; it names the data set")
    url = deployment.settings.datasets[ingest.dataset]
    known = deployment.known_datasets.get(url)
    if known is None:
        base = await versions.find_newest_manifest(deployment.dataset_store(url))
        if base is not None:
            deployment.known_datasets[url] = known = (base.dataset, base.schema)
    if known is not None:
        return _IngestTarget(url, known[0], known[1], ingest)
    return _IngestTarget(url, provisional_dataset(deployment.dataset_store(url).url), _schema(ingest), ingest)


def _schema(ingest: IngestSettings) -> Schema | None:
    """Return the columns of ingested samples; None if they are found in the first archive."""
    if ingest.kind == "webdataset":
        return None
    return files_schema() if ingest.kind == "files" else images_schema(ingest.classes)


def _match_source(
    notified: NotifiedObject, message: str, deployment: Deployment, target: _IngestTarget
) -> _RawObject | None:
    """Return the object with its source of the deployment; None if it is not a sample.

    Raises:
        EventError: the object is below no source, too large, or of an unknown class.
        ConfigError: its key is not valid in any store.
    """
    full = f"{notified.url}/{notified.info.key}"
    object_url = f"{parse_url(notified.url).canonical_url}{notified.info.key}"
    sources = ((source, parse_url(source).canonical_url) for source in deployment.settings.sources)
    source, root = next(((source, root) for source, root in sources if object_url.startswith(root)), ("", ""))
    if not source:
        raise EventError(f"{full[:200]} is below no source of this deployment; STOKER_SOURCES lists its sources")
    info = ObjectInfo(key=object_url[len(root) :], size_bytes=notified.info.size_bytes, tag=notified.info.tag)
    check_key(info.key)
    kind = target.ingest.kind
    is_sample = info.key.lower().endswith(".tar") if kind == "webdataset" else is_sample_file(kind, info.key)
    if not is_raw_object(info) or not is_sample:
        _log.warning("leaving out %s: it is not a sample of kind %s", _escape_line(full), kind)
        return None
    limit_bytes = target.ingest.super_sample_bytes
    if kind != "webdataset" and info.size_bytes > limit_bytes:
        raise EventError(f"{full} has {info.size_bytes} bytes, more than a super-sample of {limit_bytes} bytes")
    label = None if target.schema is None else target.schema.get("label")
    if kind == "image-folder" and isinstance(label, Array) and info.key.partition("/")[0] not in (label.classes or ()):
        raise EventError(f"{full} is of a class that the data set does not have; STOKER_INGEST lists its classes")
    return _RawObject(source, info, message)


def _escape_line(value: object) -> str:
    """Return a text as one printable line for the log, since keys may contain any characters."""
    return ascii(str(value))[1:-1]


class _SourcePacker:
    """Packs raw objects of one source.

    Args:
        source: URL of the source.
        target: data set that gets the samples.
        deployment: deployment with the stores and the catalog.
        deadline: end of the invocation.

    Attributes:
        failed: id of each message whose objects were not packed → error.
    """

    def __init__(
        self, source: str, target: _IngestTarget, deployment: Deployment, deadline: InvocationDeadline
    ) -> None:
        self._source, self._target, self._deployment, self._deadline = source, target, deployment, deadline
        self._failed_alone = 0
        self._unfinished_runs: list[str] = []
        self.failed: dict[str, StokerError] = {}

    async def pack(self, group: Sequence[_RawObject]) -> None:
        """Pack a group as one run; if objects fail, find them by halving the group, so that they fail alone.

        After 16 such failures, whose cause is probably not the objects, the rest of a group fails together.
        """
        try:
            await self._pack_present(group)
        except StokerError as error:
            if not isinstance(error, TransientError) and len(group) > 1 and self._failed_alone < _MAX_SINGLE_FAILURES:
                _log.warning("%s: %s; packing the %d objects in halves", self._source, _escape_line(error), len(group))
                await self.pack(group[: len(group) // 2])
                await self.pack(group[len(group) // 2 :])
            else:
                self._failed_alone += 1
                self.failed.update((raw.message, error) for raw in group)

    async def forget_unfinished(self) -> None:
        """Delete the records of runs that cannot be finished, after the runs that replace them.

        Runs that another invocation of the same event has finished are kept.
        """
        catalog = self._deployment.catalog(self._target.url)
        records = [(await catalog.journal(run)).recorded for run in self._unfinished_runs]
        await catalog.delete_records([each.run for each in records if each is not None and each.state == "packing"])

    async def _pack_present(self, group: Sequence[_RawObject]) -> None:
        """Pack a group as one run, without objects that were replaced or deleted after their notification."""
        if self._deadline.is_near:
            raise DeadlineError(f"no time was left to pack {len(group)} objects of {self._source}")
        objects = list({(raw.info.key, raw.info.tag): raw.info for raw in group}.values())
        if len({info.key for info in objects}) == len(objects):
            try:
                await self._pack_run(objects)
            except (ObjectChangedError, NotFoundError) as error:
                _log.warning("%s: %s; packing the objects that exist", self._source, _escape_line(error))
            else:
                return
        if unchanged := await self._unchanged_objects(objects):
            await self._pack_run(unchanged)

    async def _pack_run(self, objects: Sequence[ObjectInfo]) -> None:
        """Pack raw objects as one run, to its end."""
        part, opened = await self._create_part(objects)
        try:
            record = await pack_part(part, self._deployment, self._deadline, opened)
        except StokerError as error:
            if not isinstance(error, TransientError):
                self._unfinished_runs.append(part.run)
            raise
        if record.state == "packing":
            raise DeadlineError(
                f"run {part.run} of {len(part.objects)} objects did not finish in time; it continues when their "
                "messages are delivered again"
            )

    async def _create_part(self, objects: Sequence[ObjectInfo]) -> tuple[SourcePart, ObjectSource | None]:
        """Return the part of raw objects, and its samples if they were opened to find the columns."""
        target = self._target
        ordered = tuple(sorted(objects, key=lambda info: info.key.encode()))
        schema, opened = target.schema, None
        if schema is None:
            listing = SourceListing(self._source, self._deployment.source_store(self._source), ordered, is_folder=False)
            opened = await open_webdataset(listing)
            schema = opened.schema
        part = SourcePart(
            dataset=target.url,
            dataset_id=target.dataset_id,
            source=self._source,
            kind=target.ingest.kind,
            schema=schema,
            super_sample_bytes=target.ingest.super_sample_bytes,
            objects=ordered,
            is_remembered=True,
        )
        return part, opened

    async def _unchanged_objects(self, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Return the objects that are in the bucket with the tag of their notification, with their current sizes."""
        store = self._deployment.source_store(self._source)
        unchanged: dict[str, ObjectInfo] = {}

        async def check_object(info: ObjectInfo) -> None:
            try:
                now = await store.head(info.key)
            except NotFoundError:
                return
            if now.tag == info.tag:
                unchanged[info.key] = now

        await for_each(objects, check_object, concurrency=_HEAD_CONCURRENCY)
        return list(unchanged.values())


class Batcher(Generic[T]):
    """Collects items into a batch until it is full or its first item has waited long enough, then processes the batch.

    One batch is processed at a time, since it may use the whole instance's memory; the next one collects meanwhile.

    Args:
        work: function of the items of a batch that returns an error or None for each; if it raises, all items get that
            error.
        max_items: maximum number of items of a batch.
        wait_seconds: time that the first item of a batch waits for others.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Awaitable[Sequence[Exception | None]]],
        *,
        max_items: int,
        wait_seconds: float,
    ) -> None:
        self._work = work
        self._max_items = max_items
        self._wait_seconds = wait_seconds
        self._items: list[T] = []
        self._is_full = asyncio.Event()
        self._work_lock = asyncio.Lock()
        self._batch: asyncio.Task[Sequence[Exception | None]] | None = None

    async def add(self, item: T) -> None:
        """Add an item and wait until its batch is processed. After a cancellation, the item stays in its batch.

        Raises:
            Exception: ``work`` returned this error for the item, or raised it.
        """
        if self._batch is None:
            self._items, self._is_full = [], asyncio.Event()
            self._batch = asyncio.create_task(self._run(self._items, self._is_full))
        batch, number = self._batch, len(self._items)
        self._items.append(item)
        if len(self._items) >= self._max_items:
            self._close_batch()
        error = (await asyncio.shield(batch))[number]
        if error is not None:
            raise error

    def _close_batch(self) -> None:
        """Start the open batch; the next item opens another one."""
        self._is_full.set()
        self._batch = None

    async def _run(self, items: Sequence[T], is_full: asyncio.Event) -> Sequence[Exception | None]:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                await is_full.wait()
        async with self._work_lock:
            if items is self._items:
                self._close_batch()
            return await self._work(items)
