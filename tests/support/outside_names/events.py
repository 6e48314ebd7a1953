"""Events that functions receive, and what they return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stoker import Array, Schema, open_store
from stoker._base.fields import JsonFields
from stoker._fanout.job import JobConfig, plan_job, plan_permutation
from stoker._pack.shuffle import publish_staged
from stoker._sources import open_source
from stoker._sources.parts import KeySlice, SourcePart
from stoker.abc import ObjectInfo
from stoker_functions._commit import commit, compact
from stoker_functions._deployment import Deployment
from stoker_functions._ingest import ingest_object, ingest_queue
from stoker_functions._instance import answer_request
from stoker_functions._pack import pack
from stoker_functions._shuffle_job.work import shuffle
from stoker_functions.serve._service import serve_url
from stoker_warm._auth import WarmSecret
from stoker_warm._events import NodeReport, WakeEvent
from stoker_warm._shard import StoreVersion
from support.deployments import Place, plenty
from support.materialized import WAYS, plan_tasks
from support.outside_names.shape import shape

__all__ = ["events"]

_ELEMENTS = ("commit event takes run (", "pack event's object takes")
"""Elements of arrays, which have no fields, but are checked in the same way."""
_JOB = "f" * 16
_NOTIFICATION = {
    "eventName": "ObjectCreated:Put",
    "s3": {"bucket": {"name": "somewhere"}, "object": {"key": "0.bin", "size": 1, "eTag": "a"}},
}
_URL_REQUEST = {
    "version": "2.0",
    "requestContext": {"http": {"method": "GET"}},
    "rawPath": "/v1/train/manifest",
    "rawQueryString": "",
    "headers": {},
}


def events(_: Path) -> list[str]:
    """Return the fields of each event, those that are read from it, and those of the answer."""
    with _collect_fields() as lines:
        lines += asyncio.run(_all())
        NodeReport.parse(_report())
    return [line for line in lines if not line.startswith(_ELEMENTS)]


@contextmanager
def _collect_fields() -> Iterator[list[str]]:
    """Collect the fields that are read, by the object that has them."""
    lines: list[str] = []
    take, contains = JsonFields._take, JsonFields.__contains__

    def noted_take(fields: JsonFields, name: str, default: object) -> Any:
        lines.append(f"{fields._what} takes {name} ({'required' if default is None else 'optional'})")
        return take(fields, name, default)

    def noted_contains(fields: JsonFields, name: str) -> bool:
        lines.append(f"{fields._what} may have {name}")
        return contains(fields, name)

    with patch.object(JsonFields, "_take", noted_take), patch.object(JsonFields, "__contains__", noted_contains):
        yield lines


async def _all() -> list[str]:
    place, lines = Place(), list[str]()
    deployment = place.deployment(warm_secret=WarmSecret.generate().reveal())
    raw = await place.put(range(20))
    part = place.part(raw, job=_JOB)
    for each in (part, *_other_parts(place, raw[0])):
        lines += shape("pack event", each.to_json())
        SourcePart.from_json(each.to_json())
    lines += _answer("pack", await pack(part.to_json(), deployment, plenty()))
    job = {"dataset": place.dataset, "job": _JOB, "runs": [part.run], "mode": "create"}
    lines += _answer("commit", await commit(job, deployment, plenty()))
    lines += _answer("compact", await compact({"dataset": place.dataset}, deployment, plenty()))
    lines += await _permuted(place, deployment)
    lines += await _shuffled(place, deployment)
    lines += await _ingested(deployment)
    lines += shape("warm_node event", WakeEvent(node="warm-1", proxy="127.0.0.1:1").to_event())
    WakeEvent.parse(WakeEvent(node="warm-1", proxy="127.0.0.1:1").to_event())
    lines += shape("warm_node answers", _report())
    lines += _answer("serve", await serve_url(_URL_REQUEST, deployment, plenty()))
    lines += await _hosted(deployment)
    await deployment.close()
    return lines


def _other_parts(place: Place, raw: ObjectInfo) -> Iterator[SourcePart]:
    keys = KeySlice(after="", until=raw.key, objects=1, fingerprint="0" * 64)
    yield place.part((), keys=keys)
    yield place.part([raw], is_remembered=True)
    yield place.part([raw], kind="npy", rows=(0, 1), schema=Schema({"data": Array("uint8", (2,), classes=None)}))


async def _permuted(place: Place, deployment: Deployment) -> list[str]:
    lines: list[str] = []
    store = open_store(place.dataset)
    config = JobConfig(dataset=place.dataset, append=True, super_sample_bytes=2000, part_bytes=4000, shuffle=1)
    job = await plan_job(await open_source(place.raw, "files"), store, config)
    for task in job.tasks:
        await pack(task.event, deployment, plenty())
    phases = plan_permutation(job, await publish_staged(store, job.id, job.runs), config)
    for task in (*phases["scattering"], *phases["permuting"]):
        lines += shape("pack event", task.event)
        lines += _answer(f"pack {task.name.split()[0]}", await pack(task.event, deployment, plenty()))
    return lines


async def _shuffled(place: Place, deployment: Deployment) -> list[str]:
    lines: list[str] = []
    for epoch, way in enumerate(WAYS):
        for tasks in plan_tasks(way, url=place.dataset, epoch=epoch):
            for task in tasks:
                lines += shape("shuffle event", task.to_event())
                lines += _answer(f"shuffle {task.step}", await shuffle(task.to_event(), deployment, plenty()))
    return lines


async def _ingested(deployment: Deployment) -> list[str]:
    message = {"messageId": "1", "body": json.dumps({"Records": [_NOTIFICATION]})}
    return _answer("ingest", await ingest_queue({"Records": [message]}, deployment, plenty()))


async def _hosted(deployment: Deployment) -> list[str]:
    announced = {"bucket": "somewhere", "name": "0.bin", "size": "1", "generation": "1"}
    wrong, _ = await answer_request(ingest_object, json.dumps(announced).encode(), deployment)
    return list(shape("an error of a function on Google's answers", wrong))


def _answer(name: str, document: dict[str, Any]) -> list[str]:
    if document.get("requests"):
        counts = next(iter(document["requests"].values()))
        document["requests"] = {"STORE": {"OPERATION": next(iter(counts.values()))}}
    return list(shape(f"{name} answers", document))


def _report() -> dict[str, Any]:
    return NodeReport(instance="0" * 16, version=StoreVersion(1, 2), held_bytes=3, limit_bytes=4).to_json()
