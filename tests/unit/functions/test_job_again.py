"""A job that comes again, however late, adds nothing."""

from __future__ import annotations

import asyncio

from stoker import open_store
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.recovery import rebuild_manifest
from stoker_functions._commit import commit, compact
from stoker_functions._pack import pack
from support.deployments import Place, plenty

JOB = "a" * 16


def test_a_job_whose_super_samples_were_compacted_away_is_known_to_be_done() -> None:
    async def main() -> None:
        place = Place()
        parts = [place.part(await place.put(range(start, start + 9)), job=JOB) for start in (0, 9, 18)]
        event = {"dataset": place.dataset, "job": JOB, "runs": [part.run for part in parts], "mode": "append"}
        for _ in range(2):
            for part in parts:
                assert (await pack(part.to_json(), place.deployment(), plenty()))["state"] == "complete"
            await commit(event, place.deployment(), plenty())
            assert await place.numbers() == list(range(27))
            await compact({"dataset": place.dataset, "super_sample_bytes": 20_000}, place.deployment(), plenty())
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
            assert await place.numbers() == list(range(27))
        manifest = await place.manifest()
        assert manifest is not None
        assert not {run.run for run in manifest.runs} & {part.run for part in parts}

    asyncio.run(main())


def test_without_its_manifests_a_compacted_job_is_rebuilt_once() -> None:
    async def main() -> None:
        place = Place()
        part = place.part(await place.put(range(30)), job=JOB)
        await pack(part.to_json(), place.deployment(), plenty())
        event = {"dataset": place.dataset, "job": JOB, "runs": [part.run], "mode": "create"}
        await commit(event, place.deployment(), plenty())
        await compact({"dataset": place.dataset, "super_sample_bytes": 20_000}, place.deployment(), plenty())
        store = open_store(place.dataset)
        for key in [*await place.keys("manifests/"), "manifest.safetensors"]:
            await store.delete(key)
        await rebuild_manifest(store)
        assert sorted(await place.numbers()) == list(range(30))
        await collect_garbage(store, delete=True, keep_versions=1)
        assert sorted(await place.numbers()) == list(range(30))

    asyncio.run(main())
