"""A backend that is opened in the background when it is first read from, and done without until it is open."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_warm._tier import LazyBackend

NAME = "0" * 32


class Kept:
    """A backend that has every object."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.closed = 0

    async def read(self, name: str, into: memoryview) -> bool:
        return True

    def offer(self, name: str, data: memoryview) -> None:
        self.offered.append(name)

    def drop(self, name: str) -> None:
        self.offered.remove(name)

    async def close(self) -> None:
        self.closed += 1


class Opening:
    """Opens backends in a second, unless it is broken.

    Attributes:
        begun: how often it was tried.
        made: the backends.
    """

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken, self.begun, self.made = is_broken, 0, list[Kept]()

    async def __call__(self) -> Kept:
        self.begun += 1
        await asyncio.sleep(1.0)
        if self.is_broken:
            raise ConfigError("there are no functions")
        self.made.append(Kept())
        return self.made[-1]


async def read(lazy: LazyBackend) -> bool:
    return await lazy.read(NAME, memoryview(bytearray(1)))


def test_nothing_is_opened_before_the_first_read_and_then_once_in_the_background() -> None:
    async def test() -> None:
        opening, loop = Opening(), asyncio.get_running_loop()
        lazy = LazyBackend(opening)
        lazy.offer(NAME, memoryview(b"x"))  # which nobody is there to take
        lazy.drop(NAME)
        await lazy.close()
        assert opening.begun == 0
        assert await asyncio.gather(*(read(lazy) for _ in range(5))) == [False] * 5
        assert loop.time() == 0.0, "a miss until it is open, which is not waited for"
        await asyncio.sleep(1.5)
        assert await asyncio.gather(*(read(lazy) for _ in range(5))) == [True] * 5
        lazy.offer(NAME, memoryview(b"x"))
        assert (opening.begun, opening.made[0].offered) == (1, [NAME])
        lazy.drop(NAME)
        assert opening.made[0].offered == []
        for _ in range(2):
            await lazy.close()
        assert opening.made[0].closed == 1
        assert not await read(lazy)
        await asyncio.sleep(1.5)
        assert await read(lazy), "it opens anew"
        assert (opening.begun, lazy.backend) == (2, opening.made[1])
        await lazy.close()

    run_virtual(test())


def test_what_cannot_be_opened_is_a_miss_with_a_warning_and_is_not_tried_at_every_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        opening = Opening(is_broken=True)
        lazy = LazyBackend(opening, retry_seconds=30.0)
        with caplog.at_level(logging.WARNING):
            assert await asyncio.gather(*(read(lazy) for _ in range(5))) == [False] * 5
            await asyncio.sleep(1.5)
            assert not await read(lazy)
        (warning,) = (each.getMessage() for each in caplog.records)
        assert warning.startswith("the warm tier cannot be used: there are no functions; it is tried again in 30 s")
        assert opening.begun == 1
        opening.is_broken = False
        await asyncio.sleep(30.0)
        assert not await read(lazy)
        await asyncio.sleep(1.5)
        assert await read(lazy)
        assert opening.begun == 2
        await lazy.close()

    run_virtual(test())


def test_who_closes_while_it_is_opened_has_nothing_opened() -> None:
    async def test() -> None:
        opening = Opening()
        lazy = LazyBackend(opening)
        assert not await read(lazy)
        await asyncio.sleep(0.5)
        await lazy.close()
        await asyncio.sleep(1.5)
        assert (opening.made, lazy.backend) == ([], None)

    run_virtual(test())


def test_a_forked_process_has_a_backend_of_its_own_and_leaves_its_parent_s_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        opening = Opening()
        lazy = LazyBackend(opening)
        assert not await read(lazy)
        await asyncio.sleep(1.5)
        assert await read(lazy)
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            lazy.offer(NAME, memoryview(b"x"))  # which is not its parent's to take
            assert not await read(lazy)
            await asyncio.sleep(1.5)
            assert await read(lazy)
            assert opening.begun == 2
            await lazy.close()
        assert opening.made[0].offered == []
        assert [each.closed for each in opening.made] == [0, 1]

    run_virtual(test())
