"""Objects of a cache process other than whole ones in its memory: parts, and objects that only pass."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker._base.batch_read import ObjectPart, RangePart
from stoker._cache.index import NOT_FOUND, Found, Presence
from stoker._cluster import client as client_module
from stoker._cluster import serving
from stoker._cluster.arena import Arena
from stoker._cluster.client import ClusterTier
from stoker._cluster.serving import Node
from stoker._cluster.spec import ClusterSpec
from support.cluster import check_with_node, object_of, own_runtime_folder, read_object

MIB = 1 << 20
TEXT = "memory:?limit=32MB&linger=60"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with own_runtime_folder() as folder:
        yield folder


def test_an_object_is_found_in_mapped_memory_and_stays_there() -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await second.find(ref) == Found(None, has_room=True)
        assert await read_object(first, ref) is None
        assert await second.find(ref) == Found(None, has_room=True)
        first.offer(ref, memoryview(body))
        found = await first.find(ref)  # behind what was given
        assert found.memory is not None
        assert bytes(found.memory) == body
        assert found.memory.readonly
        assert (await second.find(ref)).memory == found.memory
        hits = running.catalog.hits
        assert (await second.find(ref)).memory == found.memory
        assert running.catalog.hits == hits  # it was not asked again
        second.reject(ref)
        assert await second.find(ref) == NOT_FOUND
        third = ClusterTier(TEXT)
        assert await third.find(ref) == Found(None, has_room=True)
        await third.close()
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists what is mapped")
def test_memory_of_a_process_is_not_mapped_any_more_when_a_tier_is_closed() -> None:
    def count_mappings() -> int:
        return Path("/proc/self/maps").read_text("utf-8").count("stoker-cluster")

    async def check(running: Node) -> None:
        ref, body = object_of(1)
        before = count_mappings()
        tier = ClusterTier(TEXT)
        assert await read_object(tier, ref) is None
        tier.offer(ref, memoryview(body))
        assert await read_object(tier, ref) == body
        assert count_mappings() == before + 1
        gc.disable()
        try:
            await tier.close()
            await asyncio.sleep(0)
            assert count_mappings() == before
        finally:
            gc.enable()

    check_with_node(check, TEXT)


def test_an_object_without_room_is_not_asked_for_again() -> None:
    async def check(running: Node) -> None:
        tier = ClusterTier(TEXT)
        full, _body = object_of(1, 20 * MIB)
        ref, _body = object_of(2, 20 * MIB)
        assert await read_object(tier, full) is None
        assert await tier.find(ref) == NOT_FOUND
        running.catalog.peek = None  # type: ignore[assignment, method-assign]  # not to be called
        assert await tier.find(ref) == NOT_FOUND
        assert await tier.find(object_of(3, 40 * MIB)[0]) == NOT_FOUND  # above the limit
        await tier.close()

    check_with_node(check, TEXT)


def test_where_memory_is_not_mapped_parts_are_copied_over_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "readable", None)

    async def check(running: Node) -> None:
        tier, into = ClusterTier(TEXT), memoryview(bytearray(20))
        (here, body), (absent, _) = object_of(1), object_of(2)
        assert await read_object(tier, here) is None
        tier.offer(here, memoryview(body))
        assert [await tier.find(ref) for ref in (here, absent)] == 2 * [Found(None, is_remote=True)]
        parts = [ObjectPart(here, RangePart(5, 15, 10)), ObjectPart(absent, RangePart(0, 10, 0))]
        assert await tier.read_parts(parts, into) == [Presence.COPIED, Presence.LACKING]
        assert into == bytes(10) + body[5:15]
        await tier.close()

    check_with_node(check, TEXT)


def test_a_search_in_a_silent_process_ends_soon_and_the_next_at_once() -> None:
    async def check(running: Node) -> None:
        tier, loop = ClusterTier(TEXT), asyncio.get_running_loop()
        await tier.find(object_of(1)[0])
        for client in running.clients:
            client.transport.pause_reading()  # type: ignore[union-attr]  # they are connected
        begun = loop.time()
        assert await tier.find(object_of(2)[0]) == NOT_FOUND
        first, begun = loop.time() - begun, loop.time()
        for number in range(100):
            assert await tier.find(object_of(number, 1000)[0]) == NOT_FOUND
        assert loop.time() - begun < first
        for client in running.clients:
            client.transport.resume_reading()  # type: ignore[union-attr]  # as above
        while not tier.is_responsive(object_of(2)[0]):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        assert await tier.find(object_of(2)[0]) == Found(None, has_room=True)
        await tier.close()

    check_with_node(check, TEXT)


def test_a_process_that_accepts_nobody_delays_the_first_search_for_a_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_SOON_SECONDS", 0.2)
    path = (folder / ClusterSpec.parse(TEXT).key).with_suffix(".sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()  # and never accepts

        async def main() -> float:
            tier, loop = ClusterTier(TEXT), asyncio.get_running_loop()
            assert await tier.find(object_of(1)[0]) == NOT_FOUND
            begun = loop.time()
            for _ in range(20):
                assert await tier.find(object_of(1)[0]) == NOT_FOUND
            seconds = loop.time() - begun
            await tier.close()
            return seconds

        assert asyncio.run(main()) < 0.2


def test_an_object_that_was_rejected_is_not_looked_for_again() -> None:
    async def check(running: Node) -> None:
        tier = ClusterTier(TEXT)
        ref, body = object_of(1)
        assert await read_object(tier, ref) is None
        tier.offer(ref, memoryview(body))
        assert (await tier.find(ref)).memory is not None
        tier.reject(ref)
        assert await tier.find(ref) == NOT_FOUND
        await tier.close()

    check_with_node(check, TEXT)


def test_a_late_answer_of_another_request_does_not_lose_what_waits_for_its_lease() -> None:
    async def check(running: Node) -> None:
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        ref, body = object_of(1)
        await first.find(object_of(2)[0])
        (client,) = running.clients
        assert client.transport is not None
        client.transport.pause_reading()
        searching = asyncio.create_task(first.find(ref))
        await asyncio.sleep(0.05)
        searching.cancel()
        await asyncio.wait([searching])
        first.offer(ref, memoryview(body))  # it has no lease: it asks for one
        client.transport.resume_reading()
        while not any(each.is_here for each in running.catalog._objects.values()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        assert await read_object(second, ref) == body
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_beyond_the_limit_an_object_passes_between_those_that_need_it_together() -> None:
    async def check(running: Node) -> None:
        first, second, third = (ClusterTier(TEXT, is_shared=True) for _ in range(3))
        alone = ClusterTier(TEXT)
        assert await read_object(alone, object_of(0, 20 * MIB)[0]) is None  # it has most places
        ref, body = object_of(1, 20 * MIB)
        assert await read_object(first, ref) is None
        waiting = asyncio.create_task(read_object(second, ref))
        cancelled = asyncio.create_task(read_object(third, ref))
        await asyncio.sleep(0.05)
        first.offer(ref, memoryview(body))
        while not running.catalog.hits:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        cancelled.cancel()  # in the middle of the bytes
        assert await waiting == body
        assert await read_object(third, ref) == body
        assert await read_object(alone, ref) == body
        assert await third.find(ref) == NOT_FOUND
        for tier in (first, second, third, alone):
            await tier.close()

    check_with_node(check, TEXT)


def test_the_process_keeps_no_more_that_passes_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PASSING_BYTES", 4 * MIB)

    async def check(running: Node) -> None:
        first, second = (ClusterTier(TEXT, is_shared=True) for _ in range(2))
        keeping, _body = object_of(0, 30 * MIB)
        assert await read_object(first, keeping) is None  # it has all places
        for number in range(1, 6):
            ref, body = object_of(number, MIB)
            assert await read_object(first, ref) is None
            first.offer(ref, memoryview(body))
            assert await read_object(second, ref) == body
        for number in (5, 4, 3, 2):
            assert await read_object(second, object_of(number, MIB)[0]) is not None
        assert await read_object(second, object_of(1, MIB)[0]) is None
        await first.close()
        await second.close()

    check_with_node(check, TEXT)
