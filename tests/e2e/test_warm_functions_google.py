"""The warm tier on Google's own server of functions: long requests to instances that dial out."""

from __future__ import annotations

import asyncio

from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from support.waiting import until
from support.warm_cloud import google_warm_cloud, objects

CONFIG = WarmConfig(nodes=3, code=ErasureCode(2, 1), linger_seconds=0.1)
OBJECTS = objects(6)


def test_objects_are_kept_between_requests_and_when_an_instance_is_taken_back_its_shards_are_written_again() -> None:
    async def check() -> None:
        async with google_warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            await warm.asleep()
            assert await warm.read_all(OBJECTS) == OBJECTS
            await warm.asleep()
            figures = warm.cloud.statistics().values()
            assert [(each.cold_starts, each.errors) for each in figures] == [(1, 0)] * CONFIG.nodes
            assert all(each.invocations > 1 for each in figures)
            await warm.kill([1])
            for _ in range(2):
                assert await warm.read_all(OBJECTS) == OBJECTS
                await warm.asleep()
            await until(lambda: warm.proxy.statistics().rebuilt == len(OBJECTS))
            found = warm.proxy.statistics()
            assert (found.losses, found.misses) == (0, 0)

    asyncio.run(check())
