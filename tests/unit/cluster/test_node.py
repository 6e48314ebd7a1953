"""Clients of one cache process: one fetches for all, bytes arrive as they were given, and nobody spoils them."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker._cluster import client as client_module
from stoker._cluster import connection, launch, serving
from stoker._cluster.arena import Arena, map_arena
from stoker._cluster.client import ClusterTier
from stoker._cluster.files import runtime_folder
from stoker._cluster.frames import HELLO, HELLO_SIZE, Frame, Kind
from stoker._cluster.serving import Node
from stoker._cluster.spec import ClusterSpec
from stoker.errors import ConfigError, ConnectionLostError
from support.cluster import check_with_node, object_of, own_runtime_folder, read_object

MIB = 1 << 20
TEXT = "memory:?limit=32MB&linger=60"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with own_runtime_folder() as folder:
        yield folder


async def arrived(running: Node, count: int) -> None:
    """Wait until the process has objects."""
    while sum(each.is_here for each in running.catalog._objects.values()) < count:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


@pytest.fixture(params=["mapped", "refused", "not sealed", "disk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A setting; objects come from mapped memory, over the socket, or from a mapped file."""
    if request.param == "not sealed":
        monkeypatch.setattr(Arena, "readable", None)
    if request.param == "refused":

        def refuse(descriptor: int, size_bytes: int) -> memoryview:
            raise OSError("no mappings here")

        monkeypatch.setattr(launch, "map_arena", refuse)
    return f"disk:{tmp_path}?limit=32MB" if request.param == "disk" else TEXT


@pytest.mark.parametrize("size_bytes", [1, 300_000, 5 * MIB])
def test_one_client_fetches_and_the_others_get_its_bytes(way: str, size_bytes: int) -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1, size_bytes)
        first, *others = (ClusterTier(way) for _ in range(3))
        assert await read_object(first, ref) is None
        waiting = [asyncio.create_task(read_object(other, ref)) for other in others]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        first.offer(ref, memoryview(body))
        assert await asyncio.gather(*waiting) == [body, body]
        assert await read_object(first, ref) == body
        assert (running.catalog.hits, len(running.clients)) == (3, 3)
        for each in (first, *others):
            await each.close()

    check_with_node(check, way)


def test_a_lost_client_s_lease_goes_to_one_that_waits(way: str) -> None:
    async def check(_: Node) -> None:
        ref, body = object_of(1)
        first, second, third = (ClusterTier(way) for _ in range(3))
        assert await read_object(first, ref) is None
        waiting = [asyncio.create_task(read_object(each, ref)) for each in (second, third)]
        await asyncio.sleep(0.02)
        await first.close()
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [None]
        (second if waiting[0] in done else third).offer(ref, memoryview(body))
        assert await next(iter(left)) == body
        await second.close()
        await third.close()

    check_with_node(check, way)


def test_a_stuck_client_s_lease_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEASE_SECONDS", 0.1)

    async def check(_: Node) -> None:
        ref, _body = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        assert await read_object(second, ref) is None  # after 0.1 s
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_a_client_that_is_stuck_in_the_middle_of_an_object_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEASE_SECONDS", 0.1)

    async def check(running: Node) -> None:
        ref, body = object_of(1, 5 * MIB)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        link = first._links.get().present
        assert link is not None
        assert link.transport is not None
        (name,) = link._leases
        link.transport.write(Frame(Kind.GIVE, 0, name).encode() + body[:1000])
        assert await read_object(second, ref) is None
        second.offer(ref, memoryview(body))
        await arrived(running, 1)
        assert await read_object(second, ref) == body
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_a_read_that_waits_for_another_client_is_answered_and_a_silent_process_is_known() -> None:
    async def check(running: Node) -> None:
        ref, _body = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        waiting = asyncio.create_task(read_object(second, ref))
        await asyncio.sleep(0.6)
        assert second.is_responsive(ref)
        for client in running.clients:
            client.transport.pause_reading()  # type: ignore[union-attr]  # they are connected
        silent = asyncio.create_task(read_object(second, object_of(2)[0]))
        await asyncio.sleep(0.6)
        assert not second.is_responsive(ref)
        assert first.is_responsive(ref)
        for task in (waiting, silent):
            task.cancel()
        await asyncio.wait([waiting, silent])
        for client in running.clients:
            client.transport.resume_reading()  # type: ignore[union-attr]  # as above
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_a_lease_that_comes_together_with_a_cancellation_is_given_back() -> None:
    async def check(_: Node) -> None:
        ref, _body = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, object_of(2)[0]) is None  # connects
        for delay in range(20):
            reading = asyncio.create_task(read_object(first, ref))
            for _turn in range(delay):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                first.decline(ref)
            async with asyncio.timeout(5):  # far below the limit of a lease
                assert await read_object(second, ref) is None
            second.decline(ref)
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_a_cancelled_read_ends_at_once_and_a_lease_that_comes_for_it_is_given_back(way: str) -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        first, second, third = (ClusterTier(way) for _ in range(3))
        assert await read_object(first, ref) is None
        cancelled = asyncio.create_task(read_object(second, ref))
        waiting = asyncio.create_task(read_object(third, ref))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await first.close()
        assert await waiting is None
        third.offer(ref, memoryview(body))
        await arrived(running, 1)
        assert await read_object(second, ref) == body
        await second.close()
        await third.close()

    check_with_node(check, way)


def test_a_cancelled_second_read_leaves_the_lease_of_the_first() -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        first, other = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        second = asyncio.create_task(read_object(first, ref))
        await asyncio.sleep(0.02)
        second.cancel()
        await asyncio.wait([second])
        waiting = asyncio.create_task(read_object(other, ref))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        first.offer(ref, memoryview(body))
        assert await waiting == body
        await first.close()
        await other.close()

    check_with_node(check, TEXT)


def test_an_object_that_could_not_be_fetched_is_fetched_by_the_next_client() -> None:
    async def check(_: Node) -> None:
        ref, _body = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        waiting = asyncio.create_task(read_object(second, ref))
        await asyncio.sleep(0.02)
        first.decline(ref)
        assert await waiting is None
        first.decline(ref)  # it has no lease any more
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_an_object_fetched_without_a_lease_is_given_if_nobody_has_it(way: str) -> None:
    async def check(running: Node) -> None:
        tier = ClusterTier(way)
        (known, known_body), (ref, body) = object_of(1), object_of(2)
        assert await read_object(tier, known) is None  # connects
        tier.offer(ref, memoryview(body))
        tier.offer(known, memoryview(known_body))
        await arrived(running, 2)
        assert await read_object(tier, ref) == body
        await tier.close()

    check_with_node(check, way)


def test_what_was_given_before_a_client_is_closed_arrives() -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1, 9 * MIB)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        first.offer(ref, memoryview(body))
        await first.close()
        assert await read_object(second, ref) == body
        await second.close()

    check_with_node(check, TEXT)


def test_what_was_given_before_a_client_is_closed_arrives_at_a_slow_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CLOSE_SECONDS", 0.5)

    async def check(running: Node) -> None:
        ref, body = object_of(1, 9 * MIB)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        (client,) = running.clients
        transport = client.transport
        assert transport is not None
        transport.pause_reading()
        first.offer(ref, memoryview(body))
        closing, steps = asyncio.create_task(first.close()), 0
        while not closing.done():
            transport.resume_reading()
            for _ in range(20):  # it takes a part
                await asyncio.sleep(0)
            transport.pause_reading()
            await asyncio.sleep(0.2)
            steps += 1
        assert steps * 0.2 > 0.5
        assert await read_object(second, ref) == body
        await second.close()

    check_with_node(check, TEXT)


def test_a_lease_that_comes_while_a_client_is_closed_does_not_stop_what_was_given() -> None:
    async def check(running: Node) -> None:
        (ref, body), (other, _body) = object_of(1, 9 * MIB), object_of(2)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        link = first._links.get().present
        assert link is not None
        assert link.transport is not None
        transport = link.transport
        transport.pause_reading()
        reading = asyncio.create_task(read_object(first, other))
        await asyncio.sleep(0.05)  # the process has sent the lease
        first.offer(ref, memoryview(body))
        reading.cancel()
        closing = asyncio.create_task(first.close())
        await asyncio.sleep(0)
        transport.resume_reading()
        await closing
        assert await read_object(second, ref) == body
        await second.close()

    check_with_node(check, TEXT)


def test_a_peek_gets_what_is_there_and_waits_for_nobody(way: str) -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        first, second = ClusterTier(way), ClusterTier(way)
        into = memoryview(bytearray(ref.size_bytes))
        assert not await second.peek(ref, into)
        assert await read_object(first, ref) is None
        assert not await second.peek(ref, into)
        first.offer(ref, memoryview(body))
        await arrived(running, 1)
        assert await second.peek(ref, into)
        assert bytes(into) == body
        await first.close()
        await second.close()

    check_with_node(check, way)


def test_beyond_the_limit_clients_fetch_for_themselves() -> None:
    async def check(running: Node) -> None:
        tier = ClusterTier(TEXT)
        objects = [object_of(number, 10 * MIB) for number in range(5)]
        for number, (ref, body) in enumerate(objects):
            assert await read_object(tier, ref) is None
            tier.offer(ref, memoryview(body))
            await arrived(running, min(number + 1, 3))
        found = [await read_object(tier, ref) for ref, _ in objects]
        assert found == [*(body for _, body in objects[:3]), None, None]
        large, _ = object_of(9, 40 * MIB)
        assert await read_object(tier, large) is None
        assert running.catalog.used_bytes == 30 * MIB
        await tier.close()

    check_with_node(check, TEXT)


def test_wrong_bytes_are_fetched_again() -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        tier = ClusterTier(TEXT)
        assert await read_object(tier, ref) is None
        tier.offer(ref, memoryview(bytes(ref.size_bytes)))
        await arrived(running, 1)
        assert await read_object(tier, ref) == bytes(ref.size_bytes)
        tier.reject(ref)
        assert await read_object(tier, ref) is None
        tier.offer(ref, memoryview(body))
        await arrived(running, 1)
        assert await read_object(tier, ref) == body
        await tier.close()

    check_with_node(check, TEXT)


def test_nobody_but_the_process_writes_to_mapped_memory(tmp_path: Path) -> None:
    for place in (None, tmp_path):
        arena = Arena(MIB, place)
        assert arena.readable is not None
        with pytest.raises(OSError, match=r"Permission|Invalid"):
            os.ftruncate(arena.readable, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(arena.readable, MIB)
        if place is None:
            file = os.open(f"/proc/self/fd/{arena.readable}", os.O_RDWR)
            for change in (lambda file=file: os.ftruncate(file, 0), lambda file=file: mmap.mmap(file, MIB)):
                with pytest.raises(PermissionError):
                    change()
            with pytest.raises(PermissionError):
                fcntl.fcntl(file, 1033, 0)
            os.close(file)
        view = map_arena(arena.readable, MIB)
        arena.memory[5] = 7
        assert view[5] == 7
        arena.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        bytes([Kind.PEEK]) * 200,
        b"\xff" * 200,
        Frame(Kind.HIT, 1, "0" * 32).encode(),
        Frame(Kind.ASK, 1, "no name").encode(),
    ],
)
def test_what_makes_no_sense_ends_its_connection_and_no_other(data: bytes) -> None:
    async def check(running: Node) -> None:
        ref, body = object_of(1)
        tier = ClusterTier(TEXT)
        assert await read_object(tier, ref) is None
        path = (runtime_folder() / ClusterSpec.parse(TEXT).key).with_suffix(".sock")
        reader, writer = await asyncio.open_unix_connection(path)
        assert (await reader.read(100)).startswith(HELLO)
        writer.write(data)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        tier.offer(ref, memoryview(body))
        await arrived(running, 1)
        assert await read_object(tier, ref) == body
        await tier.close()

    check_with_node(check, TEXT)


def test_a_process_that_ends_fails_the_reads_that_wait_and_is_replaced() -> None:
    async def check(running: Node) -> None:
        ref, _ = object_of(1)
        first, second = ClusterTier(TEXT), ClusterTier(TEXT)
        assert await read_object(first, ref) is None
        waiting = asyncio.create_task(read_object(second, ref))
        await asyncio.sleep(0.02)
        for client in list(running.clients):
            client.abort()
        with pytest.raises(ConnectionLostError, match="cache process"):
            await waiting
        assert await read_object(second, ref) is None  # a new connection
        await first.close()
        await second.close()

    check_with_node(check, TEXT)


def test_a_process_of_another_release_is_not_used_and_that_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = (folder / ClusterSpec.parse(TEXT).key).with_suffix(".sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        async def main() -> None:
            loop = asyncio.get_running_loop()

            async def greet() -> None:
                while True:
                    client, _ = await loop.sock_accept(listener)
                    with client, suppress(OSError):  # a client on a busy machine may have given up
                        client.sendall(b"stoker-cluster-0" + HELLO_SIZE.pack(1))

            listener.setblocking(False)
            greeting = asyncio.create_task(greet())
            tier = ClusterTier(TEXT)
            for _ in range(3):
                assert await read_object(tier, object_of(1)[0]) is None
            await tier.close()
            greeting.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_START_SECONDS", 0.2)
            patch.setattr(client_module, "_RETRY_SECONDS", 0.0)
            patch.setattr(launch, "_start", lambda *_: None)
            asyncio.run(main())
    assert caplog.text.count("objects are read from the bucket, without the cache of this machine") == 1


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    try:
        with pytest.raises(ConfigError, match=f"enter {folder}"):
            runtime_folder()
    finally:
        folder.chmod(0o700)
