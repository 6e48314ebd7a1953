from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
from typing import Any

import numpy as np
import pytest

from stoker import open_store
from stoker._fanout import job as job_module
from stoker._fanout.job import JobConfig, PackJob, plan_job
from stoker._sources import open_source
from stoker._sources.parts import SourcePart
from stoker.abc import Store
from stoker.errors import ConfigError, DatasetExistsError, NotFoundError, SchemaError
from support.packing import fresh_store, numbered_samples, pack
from support.places import put_all

_serial = itertools.count()


def raw(count: int = 40, size_bytes: int = 1000) -> str:
    """Return the URL of a folder with a number of files."""
    url = f"memory://fanout-{next(_serial)}/raw"
    put_all(url, {f"{number:04}.bin": bytes([number % 256]) * size_bytes for number in range(count)})
    return url


def planned(url: str, store: Store | None = None, **changes: Any) -> PackJob:
    async def plan() -> PackJob:
        source = await open_source(url)
        try:
            config = {"dataset": "memory://out", "super_sample_bytes": 4000, "part_bytes": 10_000, **changes}
            return await plan_job(source, store or fresh_store(), JobConfig(**config))
        finally:
            await source.close()

    return asyncio.run(plan())


def test_the_tasks_are_all_parts_of_the_source_and_the_commit_names_their_runs_in_order() -> None:
    job = planned(raw())
    parts = [SourcePart.from_json(task.event) for task in job.tasks]
    assert [item.key for part in parts for item in part.objects] == [f"{number:04}.bin" for number in range(40)]
    assert {task.function for task in job.tasks} == {"pack"}
    assert {(part.job, part.dataset_id) for part in parts} == {(job.id, job.id)}
    assert job.commit.event == {
        "dataset": "memory://out",
        "job": job.id,
        "runs": [part.run for part in parts],
        "mode": "create",
    }


def test_tasks_are_named_by_their_objects_and_weigh_their_bytes() -> None:
    job = planned(raw())
    assert [task.name for task in job.tasks] == [
        "part 0 (0000.bin to 0009.bin)",
        "part 1 (0010.bin to 0019.bin)",
        "part 2 (0020.bin to 0029.bin)",
        "part 3 (0030.bin to 0039.bin)",
    ]
    assert [task.size_bytes for task in job.tasks] == [10_000] * 4


def test_parts_of_many_small_objects_are_named_and_weighed_likewise() -> None:
    job = planned(raw(1200, 10), part_bytes=6000)
    assert [task.name for task in job.tasks] == ["part 0 (0000.bin to 0599.bin)", "part 1 (0600.bin to 1199.bin)"]
    assert [task.size_bytes for task in job.tasks] == [6000, 6000]
    assert all("slice" in task.event for task in job.tasks)


def test_parts_of_an_array_are_rows() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((100, 50), "float32"))
    url = f"memory://fanout-{next(_serial)}/raw"
    put_all(url, {"x.npy": buffer.getvalue()})
    job = planned(f"{url}/x.npy", part_bytes=8000)
    assert [task.name for task in job.tasks][:2] == ["part 0 (rows 0 to 38)", "part 1 (rows 39 to 77)"]
    assert sum(task.size_bytes for task in job.tasks) == pytest.approx(len(buffer.getvalue()), abs=len(job.tasks))


def test_more_parts_than_one_commit_takes_are_refused_before_anything_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_module, "MAX_PARTS", 3)
    with pytest.raises(ConfigError, match="4 parts, more than the 3 that one commit allows; make parts larger"):
        planned(raw())


def test_events_are_plain_json() -> None:
    job = planned(raw(3))
    for task in (*job.tasks, job.commit):
        assert json.loads(json.dumps(task.event)) == task.event


def test_the_same_again_is_the_same_job_and_anything_else_another() -> None:
    url, other = raw(), raw(41)
    ids = [
        planned(url).id,
        planned(url, super_sample_bytes=5000).id,
        planned(url, part_bytes=20_000).id,
        planned(other).id,
    ]
    assert len(set(ids)) == 4
    assert planned(url).id == ids[0]
    assert planned(url).tasks == planned(url).tasks


def test_where_there_is_a_data_set_only_append_goes_and_with_its_own_columns() -> None:
    store = fresh_store()
    asyncio.run(pack(store, numbered_samples(6)))
    with pytest.raises(DatasetExistsError, match="stoker pack --append"):
        planned(raw(), store)
    with pytest.raises(SchemaError, match="do not have the columns of the data set"):
        planned(raw(), store, append=True)
    with pytest.raises(NotFoundError, match="no data set"):
        planned(raw(), append=True)


def test_a_job_that_appends_has_the_data_sets_id() -> None:
    url, store = raw(), open_store(f"memory://fanout-{next(_serial)}")
    from stoker._pack.packer import AsyncPacker, PackConfig
    from stoker._sources.folders import files_schema

    async def existing() -> str:
        async with AsyncPacker(store, PackConfig(schema=files_schema())) as packer:
            await packer.write({"data": b"x", "path": "x"})
            return (await packer.commit()).dataset

    dataset = asyncio.run(existing())
    job = planned(url, store, append=True)
    assert {task.event["dataset_id"] for task in job.tasks} == {dataset}
    assert job.id != dataset
    assert job.commit.event["mode"] == "append"


def test_an_unfinished_pack_of_something_else_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    store = fresh_store()
    asyncio.run(_left_unfinished(store))
    with caplog.at_level(logging.WARNING):
        planned(raw(), store)
    assert "unfinished pack with another source" in caplog.text


async def _left_unfinished(store: Store) -> None:
    from support.packing import pack_interrupted

    await pack_interrupted(store, numbered_samples(31), source="something else")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"super_sample_bytes": 0}, "at least 1 "),
        ({"super_sample_bytes": 64 << 20}, "at most 33,554,432"),
        ({"part_bytes": 1000}, "would not fill a super-sample"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(**{"dataset": "s3://out", **changes})  # type: ignore[arg-type]
