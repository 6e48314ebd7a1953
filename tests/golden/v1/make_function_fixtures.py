"""Write what the functions of stoker 1 leave in a bucket and in Redis, as ``make_fixtures.py`` does for the rest.

``PYTHONPATH=tests python tests/golden/v1/make_function_fixtures.py`` leaves alone what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis import Redis

import stoker
from golden.v1.make_fixtures import FOLDER, bucket, dump, write_file, write_json
from stoker._fanout.job import JobConfig, plan_job
from stoker._maintenance.compaction import compact
from stoker._pack.catalog import encode_digest
from stoker._pack.merge import merge
from stoker._pack.record import MODES, PackRecord, record_key
from stoker._sources import open_source
from stoker._sources.folders import files_schema
from stoker._sources.parts import KeySlice, SourcePart
from stoker_functions._deployment import Deployment, DeploymentSettings
from stoker_functions._pack import pack
from support.deployments import content, plenty
from support.earlier_versions import files_of, read_objects
from support.redis_server import PASSWORD, RedisServer

RAW, URL = "s3://stoker/golden-raw", "s3://stoker/golden/functions"
NOW_SECONDS = 1_800_000_000
JOB = "0123456789abcdef"


@contextmanager
def deployed(server: RedisServer, options: stoker.S3Options) -> Iterator[Deployment]:
    """Return a deployment for the data set, with its catalog in Redis."""
    settings = DeploymentSettings(
        datasets={"train": URL},
        sources=(RAW,),
        catalog=server.url,
        catalog_password=PASSWORD,
        memory_bytes=512 << 20,
    )
    yield Deployment(settings, open_url=lambda url: stoker.open_store(url, options=options))


async def parts(options: stoker.S3Options) -> list[SourcePart]:
    """Write raw objects, and return three parts of four each; the last one is of a job."""
    store = stoker.open_store(RAW, options=options)
    objects = [await store.put(f"{number:05d}.bin", content(number, 64)) for number in range(12)]
    await store.close()
    return [
        SourcePart(
            dataset=URL,
            dataset_id="d" * 16,
            source=RAW,
            kind="files",
            schema=files_schema(),
            super_sample_bytes=200,
            objects=tuple(objects[start : start + 4]),
            job=JOB if start == 8 else "",
            is_remembered=start < 8,
        )
        for start in (0, 4, 8)
    ]


async def run_functions(opened: Deployment, options: stoker.S3Options) -> list[dict[str, Any]]:
    """Commit the first part, pack the second one, and begin the third one; return the records."""
    try:
        first, second, third = await parts(options)
        await pack(first.to_json(), opened, plenty())
        await merge(opened.dataset_store(URL), opened.catalog(URL), now_seconds=NOW_SECONDS)
        await pack(second.to_json(), opened, plenty())
        await (await opened.catalog(URL).journal(third.run)).save(third.record())
        return [plain_record(record) for record in await opened.catalog(URL).records()]
    finally:
        await opened.close()


async def run_compaction(opened: Deployment) -> None:
    """Compact what the functions packed."""
    try:
        await compact(opened.dataset_store(URL), opened.catalog(URL), now_seconds=NOW_SECONDS + 60)
    finally:
        await opened.close()


def plain_record(record: PackRecord) -> dict[str, Any]:
    """Return what a record says."""
    return {
        "run": record.run,
        "identity": record.identity,
        "source": record.source,
        "mode": record.mode,
        "state": record.state,
        "version": record.version,
        "job": record.job,
        "objects": len(record),
        "samples": record.samples,
        "sources": record.sources.tobytes().hex(),
        "replaces": [[run.run, run.first_number, run.rows] for run in record.replaces],
        "committed_seconds": record.committed_seconds,
    }


def hashes_of(server: RedisServer) -> dict[str, dict[str, str]]:
    """Return the hashes in Redis: key → field → the digits of its value."""
    with Redis.from_url(server.url, password=PASSWORD) as client:
        found = sorted(key for key in client.scan_iter() if client.type(key) == b"hash")
        return {
            key.decode(): {name.decode(): value.hex() for name, value in sorted(client.hgetall(key).items())}
            for key in found
        }


def make_catalog() -> None:
    """Write ``functions/``, ``compaction/`` (what that adds), ``redis.json``, ``catalog.json``, and the records."""
    with TemporaryDirectory() as folder, bucket() as options, RedisServer(Path(folder)) as server:
        with deployed(server, options) as opened:
            write_json("catalog.json", asyncio.run(run_functions(opened, options)))
        dump(URL, options, FOLDER / "functions")
        hashes = hashes_of(server)
        write_json("redis.json", hashes)
        with deployed(server, options) as opened:
            asyncio.run(run_compaction(opened))
        before = files_of("functions")
        for key, data in read_objects(URL, options).items():
            if before.get(key) != data:
                write_file(FOLDER / "compaction" / key, data)
    found = (PackRecord.from_bytes(bytes.fromhex(text)) for text in hashes[f"stoker:{{{URL}}}:records"].values())
    make_records(next(record for record in found if record.state == "complete"))


def make_records(complete: PackRecord) -> None:
    """Write ``records/``, one of each mode and state; ``records.json``: what they say; and ``digest.safetensors``."""
    made: dict[str, PackRecord] = {}
    for mode in MODES:
        record = replace(complete, mode=mode, job=JOB if mode == "deferred" else "")
        made[f"{mode}-begun"] = replace(record, state="packing", prefix=None)
        made[f"{mode}-packing"] = replace(record, state="packing")
        made[f"{mode}-complete"] = record
        made[f"{mode}-committed"] = replace(record, state="committed", version=3, committed_seconds=NOW_SECONDS)
    assert complete.prefix is not None
    made["compaction"] = replace(complete, replaces=complete.prefix.runs)
    made["nameless"] = replace(complete, sources=complete.sources[:0])
    for name, record in made.items():
        write_file(FOLDER / "records" / f"{name}.safetensors", record.to_bytes())
    committed = {record_key(each.run): ('"a tag"', each) for each in made.values() if each.is_committed}
    write_file(FOLDER / "digest.safetensors", encode_digest(committed))
    write_json("records.json", {name: plain_record(record) for name, record in made.items()})


def make_events() -> None:
    """Write ``parts.json``: events for the function ``pack``, and which runs they become."""
    with bucket() as options:
        found = asyncio.run(parts(options))
    keys = KeySlice(after="", until="00003.bin", objects=4, fingerprint="f" * 64)
    found.append(replace(found[2], objects=(), keys=keys))
    found.append(replace(found[2], objects=found[2].objects[:1], kind="npy", rows=(3, 9)))
    write_json("parts.json", [{"event": part.to_json(), "identity": part.identity, "run": part.run} for part in found])


async def plan_fanout(options: stoker.S3Options) -> dict[str, Any]:
    """Return what a pack in many functions of three raw objects is: the job, its parts and its commit."""
    raw, data = (stoker.open_store(f"s3://stoker/golden-job/{name}", options=options) for name in ("raw", "data"))
    for number in range(3):
        await raw.put(f"{number}.bin", bytes([number]) * 10)
    source = await open_source(raw.url, kind="files", options=options)
    config = JobConfig(dataset="s3://bucket/train", super_sample_bytes=15, part_bytes=20)
    job = await plan_job(source, data, config)
    for opened in (raw, data, source):
        await opened.close()
    return {"job": job.id, "parts": [dict(task.event) for task in job.tasks], "commit": dict(job.commit.event)}


def make_job() -> None:
    """Write ``job.json``: a pack in many functions."""
    with bucket() as options:
        write_json("job.json", asyncio.run(plan_fanout(options)))


if __name__ == "__main__":
    make_job()
    make_catalog()
    make_events()
