"""Requests that are cancelled or take too long: their memory is free, and the connection goes on."""

from __future__ import annotations

import asyncio

import pytest

from stoker.errors import DeadlineError
from stoker_warm._frames import Kind
from support.warm_connections import SHARD, Server, joined, memory, run
from support.warm_wires import LinkConfig


def test_after_a_cancellation_nothing_writes_to_the_memory_and_the_connection_continues() -> None:
    async def test() -> None:
        slow = LinkConfig(bytes_per_second=1e6)
        async with joined(Server(), link=slow) as (proxy, _, _):
            into = memory(len(SHARD))
            asking = asyncio.create_task(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into))
            await asyncio.sleep(0.3)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            done = bytes(into).rstrip(b"\0")
            assert 0 < len(done) < len(SHARD)
            assert len(proxy._requests) == 1  # the peer has not answered yet
            into[:] = b"\xa5" * len(SHARD)
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert into == b"\xa5" * len(SHARD)
            assert len(proxy._requests) == 0

    run(test)


def test_a_cancelled_request_that_was_not_sent_is_never_heard_of() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, link=LinkConfig(bytes_per_second=1e6, window_bytes=1000)) as (proxy, _, _):
            large = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(0.1)
            behind.cancel()
            await asyncio.wait([behind])
            assert len(proxy._requests) == 1
            await large
            assert [kind for kind, _ in server.asked] == [Kind.SET]

    run(test)


def test_a_body_that_is_under_way_is_sent_to_its_end_when_its_request_is_cancelled() -> None:
    async def test() -> None:
        server = Server()
        limits = {"MAX_WRITE_BYTES": 10_000}
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(server, link=slow, limits=limits) as (proxy, _, _):
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(0.3)
            asking.cancel()
            await asyncio.wait([asking])
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert server.stored["a"] == SHARD

    run(test)


def test_late_answers_are_thrown_away_and_those_behind_them_keep_their_order() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, link=LinkConfig(latency_seconds=1.5)) as (proxy, _, _):
            intos = [memory(100 * number) for number in range(1, 7)]
            asking = [asyncio.create_task(proxy.request(Kind.GET, {"shard": len(each)}, into=each)) for each in intos]
            await asyncio.sleep(1)
            for each in asking[::2]:
                each.cancel()
            await asyncio.wait(asking)
            assert len(server.asked) == 6, "they were under way"
            assert [each.cancelled() for each in asking] == [True, False] * 3
            assert [each.result().body_bytes for each in asking[1::2]] == [200, 400, 600]
            assert all(into == SHARD[: len(into)] for into in intos[1::2])
            assert not any(any(into) for into in intos[::2])
            assert not proxy._requests
            assert proxy.is_open

    run(test)


def test_the_bodies_of_answers_to_cancelled_requests_go_nowhere() -> None:
    async def test() -> None:
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(Server(), link=slow, limits={"MAX_WRITE_BYTES": 10_000}) as (proxy, _, _):
            intos = [memory(len(SHARD)) for _ in range(5)]
            asking = [asyncio.create_task(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into)) for into in intos]
            await asyncio.sleep(0.3)
            for each in asking[1:]:
                each.cancel()
            await asyncio.wait(asking)
            assert intos[0] == SHARD
            await proxy.request(Kind.PING)
            assert not any(any(into) for into in intos[1:])
            assert len(proxy._requests) == 0

    run(test)


def test_an_answer_that_crosses_the_cancellation_is_taken_for_nothing_else() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, link=LinkConfig(latency_seconds=1.0)) as (proxy, _, _):
            asking = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(1.5)
            asking.cancel()
            await asyncio.sleep(0.1)
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert len(server.asked) == 2

    run(test)


def test_a_request_that_has_a_deadline_ends_then_wherever_it_is() -> None:
    async def test() -> None:
        async with joined(Server(), limits={"MAX_OPEN_REQUESTS": 1}) as (proxy, _, wire):
            wire.ends[1].freeze()
            for _ in range(2):  # the second waits for its turn
                started = asyncio.get_running_loop().time()
                with pytest.raises(DeadlineError, match="did not answer PING within 2 s"):
                    await asyncio.gather(*(proxy.request(Kind.PING, timeout_seconds=2) for _ in range(3)))
                assert asyncio.get_running_loop().time() - started == pytest.approx(2)
            assert proxy.is_open

    run(test)


def test_requests_to_a_frozen_peer_neither_pile_up_nor_break_the_connection() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, limits={"MAX_OPEN_REQUESTS": 4}) as (proxy, _, wire):
            wire.ends[1].freeze()
            for _ in range(50):
                with pytest.raises(DeadlineError):
                    await proxy.request(Kind.GET, {"shard": 1000}, timeout_seconds=1)
            assert len(proxy._requests) == 4
            sent_bytes = wire.ends[0].sent_bytes
            wire.ends[1].thaw()
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert len(server.asked) <= 5
            assert wire.ends[0].sent_bytes < sent_bytes + 1000

    run(test)
