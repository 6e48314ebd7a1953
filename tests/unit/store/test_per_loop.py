from __future__ import annotations

import asyncio
import os
import threading

import pytest

from stoker._base.threads import PerLoop


class Thing:
    """Something that belongs to a loop."""


def test_one_loop_has_one_value() -> None:
    things = PerLoop(Thing)

    async def main() -> None:
        assert things.get() is things.get()

    asyncio.run(main())


def test_two_loops_at_once_have_two_values() -> None:
    things, found, both = PerLoop(Thing), [], threading.Barrier(2, timeout=60)

    async def main() -> None:
        first = things.get()
        both.wait()
        assert things.get() is first
        both.wait()
        found.append(first)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 2


def test_a_closed_loops_value_is_dropped_and_not_given_to_the_next() -> None:
    things = PerLoop(Thing)

    async def take() -> Thing:
        return things.get()

    first, second = asyncio.run(take()), asyncio.run(take())
    assert first is not second
    assert len(things._made) == 1


def test_a_taken_value_is_made_anew() -> None:
    things = PerLoop(Thing)

    async def main() -> None:
        assert things.pop() is None
        first = things.get()
        assert things.pop() is first
        assert things.pop() is None
        assert things.get() is not first

    asyncio.run(main())


def test_after_a_fork_the_inherited_value_is_kept_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr("stoker._base.threads._inherited_objects", kept)
    things = PerLoop(Thing)

    async def main() -> None:
        first = things.get()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert things.get() is not first
        assert kept == [{asyncio.get_running_loop(): first}]

    asyncio.run(main())
