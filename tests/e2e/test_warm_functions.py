"""The warm tier on Lambda's real runtime: nodes that are frozen between invocations, killed, and called twice."""

from __future__ import annotations

import asyncio

from stoker.warm.code import Code
from stoker.warm.settings import WarmConfig
from support.warm_cloud import objects, warm_cloud

CONFIG = WarmConfig(nodes=4, code=Code(2, 1), linger_seconds=0.1)
OBJECTS = objects(6)


def test_objects_are_kept_while_their_nodes_stand_still_and_are_read_when_they_are_called_again() -> None:
    async def check() -> None:
        async with warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            for _ in range(2):
                await warm.asleep()
                assert await warm.read_all(OBJECTS) == OBJECTS
            figures = warm.cloud.statistics().values()
            assert [each.cold_starts for each in figures] == [1] * 4, "each node is one instance"
            assert sum(each.invocations for each in figures) >= 8
            assert warm.proxy.statistics().hits == 2 * len(OBJECTS)

    asyncio.run(check())
