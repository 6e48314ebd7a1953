"""ingest: raw objects that have appeared in a bucket become super-samples, as the bucket's notifications come in.

What one delivery brings is packed together; archives are packed alone. A queue delivers at least once, and may deliver
again in other groups: each run's record names its raw objects, and what the data set has already is left out when the
runs are committed. An object that was replaced or deleted since it was announced is left out too: its next
announcement counts.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker import versions
from stoker.bounded import for_each
from stoker.errors import ConfigError, DeadlineError, EventError, NotFoundError, ObjectChangedError, StokerError
from stoker.pack.part import Part
from stoker.schema import Array, Schema
from stoker.sources.folders import belongs, files_schema, images_schema
from stoker.sources.listing import Listing, is_wanted
from stoker.sources.webdataset import open_webdataset
from stoker.store.location import parse_url
from stoker.store.protocol import ObjectInfo
from stoker.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker_functions.deadline import Deadline
from stoker_functions.deployment import Deployment
from stoker_functions.notifications import Message, Notified, queue_messages
from stoker_functions.pack import pack_part
from stoker_functions.settings import Ingest

__all__ = ["ingest_objects", "ingest_queue"]

_log = logging.getLogger(__name__)
_HEADS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class _Target:
    """What raw objects are made into."""

    url: str
    dataset_id: str
    schema: Schema | None
    ingest: Ingest


@dataclass(frozen=True, slots=True)
class _Raw:
    """A raw object below one of the deployment's sources, and the message that announced it."""

    source: str
    info: ObjectInfo
    message: str


async def ingest_queue(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Pack what the messages of an SQS event announce.

    Returns:
        ``batchItemFailures``: the messages that the queue should keep; those that were never valid go to its
        dead-letter queue when it has tried often enough.

    Raises:
        EventError: the event is none.
        ConfigError: this deployment takes in nothing.
    """
    messages = queue_messages(event)
    failed = await _ingest(messages, deployment, deadline)
    return {"batchItemFailures": [{"itemIdentifier": name} for name in failed]}


async def ingest_objects(objects: Iterable[Notified], deployment: Deployment, deadline: Deadline) -> None:
    """Pack raw objects that were announced together.

    Raises:
        StokerError: one of them cannot be packed, or not in time; none of them is lost if all are announced again.
    """
    errors: dict[str, StokerError] = {}
    await _ingest([Message("", tuple(objects))], deployment, deadline, errors)
    for error in errors.values():
        raise error


async def _ingest(
    messages: Sequence[Message],
    deployment: Deployment,
    deadline: Deadline,
    errors: dict[str, StokerError] | None = None,
) -> list[str]:
    """Pack what messages announce; return the ids of those that failed, and note why."""
    failed: dict[str, StokerError] = {} if errors is None else errors
    target = await _target(deployment)
    found: dict[str, list[_Raw]] = defaultdict(list)
    for message in messages:
        try:
            if message.error is not None:
                raise message.error
            for raw in [_raw(notified, message.id, deployment, target) for notified in message.objects]:
                if raw is not None:
                    found[raw.source].append(raw)
        except StokerError as error:
            failed[message.id] = error
    for source, raws in found.items():
        for group in _groups(raws, target.ingest.kind):
            try:
                await _pack_group(source, group, target, deployment, deadline)
            except StokerError as error:
                failed.update((raw.message, error) for raw in group)
    for name, problem in failed.items():
        _log.error("message %s: %s: %s", name, type(problem).__name__, problem)
    return list(failed)


async def _target(deployment: Deployment) -> _Target:
    ingest = deployment.settings.ingest
    if ingest is None:
        raise ConfigError("this deployment takes in no raw objects: STOKER_INGEST is not set")
    url = deployment.settings.datasets[ingest.dataset]
    known = deployment.known_datasets.get(url)
    if known is None:
        base = await versions.newest_manifest(deployment.dataset(url))
        if base is not None:
            deployment.known_datasets[url] = known = (base.dataset, base.schema)
    if known is not None:
        return _Target(url, known[0], known[1], ingest)
    dataset_id = hashlib.sha256(f"ingest {url}".encode()).hexdigest()[:16]
    return _Target(url, dataset_id, _schema(ingest), ingest)


def _schema(ingest: Ingest) -> Schema | None:
    """Return the columns of what is taken in; None if only the first archive tells."""
    if ingest.kind == "webdataset":
        return None
    return files_schema() if ingest.kind == "files" else images_schema(ingest.classes)


def _raw(notified: Notified, message: str, deployment: Deployment, target: _Target) -> _Raw | None:
    """Return the object as one below a source of the deployment; None if it is no sample.

    Raises:
        EventError: it is none of this deployment's, or can be no sample of its data set.
    """
    full = f"{notified.url}/{notified.info.key}"
    place = f"{parse_url(notified.url).place}{notified.info.key}"
    sources = ((source, parse_url(source).place) for source in deployment.settings.sources)
    source, root = next(((source, root) for source, root in sources if place.startswith(root)), ("", ""))
    if not source:
        raise EventError(f"{full[:200]} is below none of this deployment's sources; STOKER_SOURCES lists them")
    info = ObjectInfo(key=place[len(root) :], size_bytes=notified.info.size_bytes, tag=notified.info.tag)
    kind = target.ingest.kind
    is_sample = info.key.lower().endswith(".tar") if kind == "webdataset" else belongs(kind, info.key)
    if not is_wanted(info) or not is_sample:
        _log.warning("leaving out %s: no sample of kind %s", full, kind)
        return None
    if kind != "webdataset" and info.size_bytes > MAX_SUPER_SAMPLE_BYTES:
        raise EventError(f"{full} has {info.size_bytes} bytes; a sample has at most {MAX_SUPER_SAMPLE_BYTES}")
    label = None if target.schema is None else target.schema.get("label")
    if kind == "image-folder" and isinstance(label, Array) and info.key.partition("/")[0] not in (label.classes or ()):
        raise EventError(f"{full} is of a class that the data set does not have; STOKER_INGEST names them")
    return _Raw(source, info, message)


def _groups(raws: Sequence[_Raw], kind: str) -> list[list[_Raw]]:
    return [[raw] for raw in raws] if kind == "webdataset" else [list(raws)]


async def _pack_group(
    source: str, group: Sequence[_Raw], target: _Target, deployment: Deployment, deadline: Deadline
) -> None:
    """Pack raw objects as one run, to its end; without those that were replaced or deleted, if there are any.

    Raises:
        StokerError: they could not be packed, or not in time.
    """
    objects = list({(raw.info.key, raw.info.tag): raw.info for raw in group}.values())
    if len({info.key for info in objects}) == len(objects):
        part = await _part(source, objects, target, deployment)
        try:
            await _pack_whole(part, deployment, deadline)
        except (ObjectChangedError, NotFoundError) as error:
            _log.warning("%s: %s; packing what is there", source, error)
            await deployment.catalog(target.url).forget([part.run])
        else:
            return
    if there := await _still_there(source, objects, deployment):
        await _pack_whole(await _part(source, there, target, deployment), deployment, deadline)


async def _part(source: str, objects: Sequence[ObjectInfo], target: _Target, deployment: Deployment) -> Part:
    ordered = tuple(sorted(objects, key=lambda info: info.key.encode()))
    schema = target.schema
    if schema is None:
        schema = (await open_webdataset(Listing(source, deployment.source(source), ordered, is_folder=False))).schema
    return Part(
        dataset=target.url,
        dataset_id=target.dataset_id,
        source=source,
        kind=target.ingest.kind,
        schema=schema,
        super_sample_bytes=target.ingest.super_sample_bytes,
        objects=ordered,
        is_remembered=True,
    )


async def _pack_whole(part: Part, deployment: Deployment, deadline: Deadline) -> None:
    record = await pack_part(part, deployment, deadline)
    if record.state == "packing":
        raise DeadlineError(
            f"run {part.run} of {len(part.objects)} objects did not come to its end in time; it goes on when they are "
            "announced again"
        )


async def _still_there(source: str, objects: Sequence[ObjectInfo], deployment: Deployment) -> list[ObjectInfo]:
    """Return the objects that are in the bucket as they were announced, with the sizes that they have."""
    store = deployment.source(source)
    found: dict[str, ObjectInfo] = {}

    async def look(info: ObjectInfo) -> None:
        try:
            now = await store.head(info.key)
        except NotFoundError:
            return
        if now.tag == info.tag:
            found[info.key] = now

    await for_each(objects, look, concurrency=_HEADS_AT_ONCE)
    return list(found.values())
