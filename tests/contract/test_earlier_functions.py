"""Pack records, parts and catalogs in Redis that the functions of stoker 1 left are usable with this version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

import stoker
from golden.v1.make_fixtures import FOLDER
from golden.v1.make_function_fixtures import (
    JOB,
    URL,
    deployed,
    hashes_of,
    parts,
    plain_record,
    run_compaction,
    run_functions,
)
from stoker._pack.catalog import decode_digest, encode_digest
from stoker._pack.record import PackRecord, record_key
from stoker._sources.parts import SourcePart
from stoker_functions._commit import commit
from stoker_functions._pack import pack
from stoker_local import running_bucket
from support.cases import for_each
from support.deployments import content, plenty
from support.earlier_versions import files_of, options_of, read_objects, upload
from support.identities import in_earlier_form, remove_record_identities
from support.redis_server import PASSWORD, RedisServer

CATALOG = json.loads((FOLDER / "catalog.json").read_text())
HASHES = json.loads((FOLDER / "redis.json").read_text())
PARTS = json.loads((FOLDER / "parts.json").read_text())
RECORDS = json.loads((FOLDER / "records.json").read_text())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
def options() -> Iterator[stoker.S3Options]:
    """A bucket of the test's own: keys in Redis and identities of parts have the URLs in them."""
    with running_bucket() as bucket:
        yield options_of(bucket)


def restore(server: RedisServer) -> None:
    """Put into Redis what was there."""
    with Redis.from_url(server.url, password=PASSWORD) as client:
        for key, fields in HASHES.items():
            client.hset(key, mapping={name: bytes.fromhex(value) for name, value in fields.items()})


def in_earlier_words(hashes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return what is in Redis with records as an earlier release wrote them."""
    key = f"stoker:{{{URL}}}:records"
    records = {run: PackRecord.from_bytes(bytes.fromhex(digits)) for run, digits in hashes[key].items()}
    return {**hashes, key: {run: remove_record_identities(each).to_bytes().hex() for run, each in records.items()}}


@for_each("name", RECORDS)
def test_a_record_is_read_and_rewritten_unchanged(name: str) -> None:
    data = (FOLDER / "records" / f"{name}.safetensors").read_bytes()
    record = PackRecord.from_bytes(data)
    assert plain_record(record) == RECORDS[name]
    assert record.to_bytes() == data


def test_the_digest_of_committed_records_is_read_and_written_the_same() -> None:
    data = (FOLDER / "digest.safetensors").read_bytes()
    found = decode_digest(data)
    ((key, (tag, record)),) = found.items()
    assert (key, tag) == (record_key(record.run), '"a tag"')
    assert plain_record(record) == RECORDS["deferred-committed"]
    assert encode_digest(found) == data


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_an_event_for_a_part_becomes_the_same_run(number: int) -> None:
    wanted = PARTS[number]
    part = SourcePart.from_json(wanted["event"])
    assert json.dumps(part.to_json()) == json.dumps(wanted["event"])
    assert (part.identity, part.run) == (wanted["identity"], wanted["run"])


def test_a_catalog_in_redis_is_read_and_what_waits_in_it_is_committed(
    server: RedisServer, options: stoker.S3Options
) -> None:
    upload(URL, options, "functions")
    restore(server)

    async def go_on() -> None:
        with deployed(server, options) as opened:
            assert [plain_record(record) for record in await opened.catalog(URL).records()] == CATALOG
            assert (await commit({"dataset": URL}, opened, plenty()))["added_samples"] == 4
            await opened.close()

    asyncio.run(go_on())
    with stoker.open(URL, options=options) as dataset:
        assert [sample["data"] for sample in dataset] == [content(number, 64) for number in range(8)]
    key = f"stoker:{{{URL}}}:records"
    assert list(hashes_of(server)[key]) == [record["run"] for record in CATALOG if record["job"] == JOB]


def test_a_part_that_was_begun_is_packed_and_its_job_committed(server: RedisServer, options: stoker.S3Options) -> None:
    upload(URL, options, "functions")
    restore(server)
    third = PARTS[2]

    async def go_on() -> None:
        with deployed(server, options) as opened:
            await parts(options)  # whose raw objects they are
            assert (await pack(third["event"], opened, plenty()))["state"] == "complete"
            event = {"dataset": URL, "job": JOB, "runs": [third["run"]], "mode": "append"}
            assert (await commit(event, opened, plenty()))["added_samples"] == 4
            await opened.close()

    asyncio.run(go_on())
    with stoker.open(URL, options=options) as dataset:
        assert [sample["data"] for sample in dataset] == [content(number, 64) for number in (*range(4), *range(8, 12))]


def test_functions_write_the_same_today_into_the_bucket_and_into_redis(
    server: RedisServer, options: stoker.S3Options
) -> None:
    with deployed(server, options) as opened:
        assert asyncio.run(run_functions(opened, options)) == CATALOG
    assert in_earlier_form(read_objects(URL, options)) == files_of("functions")
    assert in_earlier_words(hashes_of(server)) == HASHES


def test_a_compaction_writes_the_same_today(server: RedisServer, options: stoker.S3Options) -> None:
    upload(URL, options, "functions")
    restore(server)
    with deployed(server, options) as opened:
        asyncio.run(run_compaction(opened))
    older = files_of("functions")
    assert in_earlier_form(read_objects(URL, options), older) == older | files_of("compaction")
    with stoker.open(URL, options=options) as dataset:
        assert sorted(sample["path"] for sample in dataset) == [f"{number:05d}.bin" for number in range(8)]
