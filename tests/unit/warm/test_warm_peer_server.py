"""What a proxy says of those who dial it and are turned away."""

from __future__ import annotations

import asyncio

import pytest

from stoker_warm._auth import Secret
from stoker_warm._config import WarmConfig
from support.warm_clients import SharedTier, loaded, objects
from support.warm_connections import run

NAME = next(iter(objects(1)))
CONFIG = WarmConfig(keep_warm_seconds=1e6)


def test_a_crowd_that_does_not_know_the_secret_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        records = [each.getMessage() for each in caplog.records if each.name == "stoker.warm.reception"]
        caplog.clear()
        return records

    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            crowd = [tier.client(secret=Secret.generate()) for _ in range(41)]
            await asyncio.gather(*(loaded(each, [NAME]) for each in crowd[:40]))
            (first,) = told()
            assert "STOKER_WARM_SECRET" in first
            await asyncio.sleep(11.0)
            await loaded(crowd[-1], [NAME])
            (later,) = told()
            assert "39 more" in later

    run(test)
