"""``stoker gc``: reports unfinished packs, and deletes them on request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stoker import open_store
from stoker._format.manifest import PackRun
from stoker._pack.record import PackRecord
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo, Store
from stoker.cli import main
from support.leftovers import leave_half
from support.packing import numbered_samples, pack, read_objects

JOB, OTHER = "a" * 16, "f" * 16


async def _begun(store: Store, number: int, job: str) -> PackRecord:
    """Leave what a function that packs one object has written when it is killed."""
    raw = (ObjectInfo(key=f"{number}.bin", size_bytes=3, tag="t"),)
    record = SourcePart(
        dataset=store.url,
        dataset_id="d" * 16,
        source="memory://raw",
        kind="files",
        schema=files_schema(),
        super_sample_bytes=1000,
        objects=raw,
        job=job,
    ).record()
    await store.put(f"packs/{record.run}.safetensors", record.to_bytes())
    await store.put(f"data/{record.run}/00000000", b"one of its super-samples")
    return record


def test_what_is_unfinished_is_listed_with_what_finishes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def prepared() -> str:
        store = open_store(tmp_path)
        await pack(store, numbered_samples(30))
        half = await leave_half(store, "a \x1b[31msource")
        for number in range(5):
            await _begun(store, number, JOB if number < 3 else "")
        record = PackRecord.from_bytes((await store.get(f"packs/{half}.safetensors"))[0])
        assert record.prefix is not None
        other = replace(record.prefix, dataset="other", runs=(PackRun(OTHER, 0, 10),))
        refused = replace(record, run=OTHER, mode="deferred", state="complete", prefix=other)
        await store.put(f"packs/{OTHER}.safetensors", refused.to_bytes())
        return half

    half = asyncio.run(prepared())
    before = asyncio.run(read_objects(open_store(tmp_path)))
    assert main(["gc", "--delete", str(tmp_path)]) == 0
    resumed = f"pack the same again to resume it, or give it up with --abandoned {half}"
    refused = f"no commit adds it: it has other columns, or is of another data set; give it up with --abandoned {OTHER}"
    driven = f"the same stoker pack --on finishes and commits it, or give it up with --abandoned {JOB}"
    assert capsys.readouterr().out.splitlines() == [
        "no garbage",
        f'left alone: the unfinished pack {half} of "a \\x1b[31msource", 10 super-samples; {resumed}',
        f'left alone: run {OTHER} of "a \\x1b[31msource", 0 super-samples; {refused}',
        f"left alone: 3 runs of job {JOB}, 3 super-samples; {driven}",
        "left alone: 2 runs of functions, 2 super-samples; functions finish and commit them",
    ]
    assert asyncio.run(read_objects(open_store(tmp_path))) == before
    assert main(["gc", "--abandoned", half, "--abandoned", JOB, str(tmp_path)]) == 0
    assert "17 objects could be deleted with --delete" in capsys.readouterr().out
    assert main(["gc", "--abandoned", half, "--abandoned", JOB, "--delete", str(tmp_path)]) == 0
    assert "2 runs of functions" in capsys.readouterr().out
    assert len(asyncio.run(read_objects(open_store(tmp_path)))) == len(before) - 17


def test_what_is_unfinished_is_counted_before_there_is_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prepared() -> None:
        store = open_store(tmp_path)
        for number in range(3):
            await _begun(store, number, JOB)
        await store.put(f"data/{OTHER}/00000000", b"of a run that nothing tells of")

    asyncio.run(prepared())
    assert main(["gc", "--delete", str(tmp_path)]) == 0
    nothing, job = capsys.readouterr().out.splitlines()
    assert nothing == "no garbage"
    assert job.startswith(f"left alone: 3 runs of job {JOB}, 3 super-samples; ")
    assert main(["gc", "--abandoned", JOB, "--delete", str(tmp_path)]) == 0
    assert "6 objects deleted" in capsys.readouterr().out
    assert list(asyncio.run(read_objects(open_store(tmp_path)))) == [f"data/{OTHER}/00000000"]


def test_an_id_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(pack(open_store(tmp_path), numbered_samples(3)))
    assert main(["gc", "--abandoned", JOB, "--delete", str(tmp_path)]) == 2
    assert f"has the id '{JOB}'" in capsys.readouterr().err
