"""How every store is cancelled, closed, handed on and forked, run against every store."""

from __future__ import annotations

import asyncio
import os
import warnings

from stoker.abc import ObjectInfo, Store
from support.stores import Place, keys_of, read_range


def test_a_cancelled_read_writes_nothing_more_and_harms_no_later_one(place: Place) -> None:
    body = os.urandom(1 << 20) * 8

    async def check(store: Store) -> None:
        await store.put("x", body)
        for patience in (0, 1, 5, 25):
            into = bytearray(len(body))
            read = asyncio.ensure_future(store.get_range("x", 0, len(body), into=memoryview(into)))
            for _ in range(patience):
                await asyncio.sleep(0)
            read.cancel()
            await asyncio.wait([read])
            seen = bytes(into)
            await asyncio.sleep(0.02)
            assert into == seen
            assert await read_range(store, "x", 0, len(body)) == body

    place.run(check)


def test_a_cancelled_write_is_whole_or_absent(place: Place) -> None:
    old, new = b"o" * (1 << 20), b"n" * (1 << 20)

    async def check(store: Store) -> None:
        await store.put("x", old)
        for patience in (0, 1, 5, 25):
            write = asyncio.ensure_future(store.put("x", new))
            for _ in range(patience):
                await asyncio.sleep(0)
            write.cancel()
            await asyncio.wait([write])
            assert (await store.get("x"))[0] in (old, new)
        assert await keys_of(store) == ["x"]

    place.run(check)


def test_a_closed_store_can_be_used_again_and_closed_again(place: Place) -> None:
    async def check(store: Store) -> None:
        await store.close()
        written = await store.put("x", b"1")
        await store.close()
        await store.close()
        assert await store.get("x") == (b"1", written)

    place.run(check)


def test_a_store_serves_one_event_loop_after_another(place: Place) -> None:
    store = place.open()

    async def first() -> ObjectInfo:
        info = await store.put("x", b"1")
        await store.close()
        return info

    async def second() -> tuple[bytes, ObjectInfo]:
        found = await store.get("x")
        await store.close()
        return found

    written = asyncio.run(first())
    assert asyncio.run(second()) == (b"1", written)


def test_a_forked_child_reads_and_leaves_its_parents_connections_alone(place: Place) -> None:
    store = place.open()

    async def read() -> bytes:
        return await read_range(store, "x", 0, 4)

    with asyncio.Runner() as runner:
        runner.run(store.put("x", b"0123"))
        assert runner.run(read()) == b"0123"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the servers under test are threads of ours
            child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(asyncio.run(read()) != b"0123")
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert runner.run(asyncio.wait_for(read(), 60)) == b"0123"
        runner.run(store.close())
