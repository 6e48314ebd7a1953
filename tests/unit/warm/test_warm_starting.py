"""A proxy that is started in the background when its tier is first read from, and done without until it runs."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import cast

import pytest

from stoker.abc import ObjectRef
from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_warm._proxy import Proxy
from stoker_warm._tier import WarmTier
from support.warm_platform import TIER_SECRET, warm_name

REF = ObjectRef(key="k", size_bytes=1, crc32c=0)
NAME = warm_name(REF)


class Kept:
    """A proxy that has every object."""

    def __init__(self) -> None:
        self.offered, self.dropped = list[str](), list[str]()
        self.closed = 0
        self.objects = self

    async def read(self, name: str, into: memoryview) -> bool:
        return True

    def offer(self, name: str, data: memoryview) -> None:
        self.offered.append(name)

    def remove(self, name: str) -> None:
        self.dropped.append(name)

    async def close(self) -> None:
        self.closed += 1


class Opening:
    """Starts proxies in a second, unless it is broken.

    Attributes:
        begun: how often it was tried.
        made: the proxies.
    """

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken, self.begun, self.made = is_broken, 0, list[Kept]()

    async def __call__(self) -> Proxy:
        self.begun += 1
        await asyncio.sleep(1.0)
        if self.is_broken:
            raise ConfigError("there are no functions")
        self.made.append(Kept())
        return cast("Proxy", self.made[-1])


async def read(tier: WarmTier) -> bool:
    return await tier.read(REF, memoryview(bytearray(1)))


def test_nothing_is_opened_before_the_first_read_and_then_once_in_the_background() -> None:
    async def test() -> None:
        opening, loop = Opening(), asyncio.get_running_loop()
        tier = WarmTier(opening, TIER_SECRET)
        tier.offer(REF, memoryview(b"x"))  # which nobody is there to take
        tier.reject(REF)
        await tier.close()
        assert opening.begun == 0
        assert await asyncio.gather(*(read(tier) for _ in range(5))) == [False] * 5
        assert loop.time() == 0.0, "a miss until it is open, which is not waited for"
        await asyncio.sleep(1.5)
        assert await asyncio.gather(*(read(tier) for _ in range(5))) == [True] * 5
        tier.offer(REF, memoryview(b"x"))
        tier.reject(REF)
        kept = opening.made[0]
        assert (opening.begun, kept.offered, kept.dropped) == (1, [NAME], [NAME])
        for _ in range(2):
            await tier.close()
        assert opening.made[0].closed == 1
        assert not await read(tier)
        await asyncio.sleep(1.5)
        assert await read(tier), "it opens anew"
        assert opening.begun == 2
        await tier.close()

    run_virtual(test())


def test_what_cannot_be_opened_is_a_miss_with_a_warning_and_is_not_tried_at_every_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        opening = Opening(is_broken=True)
        tier = WarmTier(opening, TIER_SECRET, retry_seconds=30.0)
        with caplog.at_level(logging.WARNING):
            assert await asyncio.gather(*(read(tier) for _ in range(5))) == [False] * 5
            await asyncio.sleep(1.5)
            assert not await read(tier)
        (warning,) = (each.getMessage() for each in caplog.records)
        assert warning.startswith("the warm tier cannot be used: there are no functions; the next attempt is in 30 s")
        assert opening.begun == 1
        opening.is_broken = False
        await asyncio.sleep(30.0)
        assert not await read(tier)
        await asyncio.sleep(1.5)
        assert await read(tier)
        assert opening.begun == 2
        await tier.close()

    run_virtual(test())


def test_a_close_while_it_is_opened_leaves_nothing_open() -> None:
    async def test() -> None:
        opening = Opening()
        tier = WarmTier(opening, TIER_SECRET)
        assert not await read(tier)
        await asyncio.sleep(0.5)
        await tier.close()
        await asyncio.sleep(1.5)
        assert (opening.made, tier.proxy) == ([], None)

    run_virtual(test())


def test_a_forked_process_has_a_proxy_of_its_own_and_leaves_its_parent_s_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        opening = Opening()
        tier = WarmTier(opening, TIER_SECRET)
        assert not await read(tier)
        await asyncio.sleep(1.5)
        assert await read(tier)
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            tier.offer(REF, memoryview(b"x"))  # which is not its parent's to take
            assert not await read(tier)
            await asyncio.sleep(1.5)
            assert await read(tier)
            assert opening.begun == 2
            await tier.close()
        assert opening.made[0].offered == []
        assert [each.closed for each in opening.made] == [0, 1]

    run_virtual(test())
