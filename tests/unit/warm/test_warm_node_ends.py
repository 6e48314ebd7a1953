"""When an invocation of a node ends: nothing is billed that nobody needs, and the proxy is told."""

from __future__ import annotations

import asyncio

import pytest

from stoker.testing import run_virtual
from stoker_warm._frames import Kind
from stoker_warm._peer_connections import ProxyConnection
from stoker_warm._shard import ShardId
from support.warm_listener import Listener
from support.warm_wires import LinkConfig

SHARD = ShardId("0" * 8 + f"{1 << 20:08x}" + "0" * 16, 1, 0, 0)
LINGER_SECONDS = 60.0


async def put_and_get(connection: ProxyConnection) -> None:
    """Have a node keep a shard of 1 MiB, and read it."""
    payload = bytes(SHARD.size_bytes)
    head = {"shard": SHARD.to_text(), "mac": "0" * 56}
    assert (await connection.request(Kind.SET, head, body=(payload,))).kind is Kind.STORED
    into = memoryview(bytearray(len(payload)))
    found = await connection.request(Kind.GET, {"shard": SHARD.to_text()}, into=into)
    assert (found.kind, bytes(into)) == (Kind.FOUND, payload)


def test_a_node_whose_proxy_is_gone_does_not_linger() -> None:
    async def check() -> None:
        listener = Listener()

        async def vanish(connection: ProxyConnection) -> None:
            await asyncio.sleep(1.0)
            connection.abort()

        assert await listener.run(vanish, linger_seconds=LINGER_SECONDS) == pytest.approx(1.0, abs=0.1)
        await listener.close()

    run_virtual(check())


def test_a_node_lingers_after_the_last_request_and_says_that_it_goes() -> None:
    async def check() -> None:
        listener = Listener()

        async def ask_twice(connection: ProxyConnection) -> None:
            for _ in range(2):
                await asyncio.sleep(0.4 * LINGER_SECONDS)
                assert (await connection.request(Kind.PING)).kind is Kind.PONG

        seconds = await listener.run(ask_twice, linger_seconds=LINGER_SECONDS)
        assert seconds == pytest.approx(1.8 * LINGER_SECONDS, abs=0.1)
        assert listener.notices == [Kind.LEAVING]
        await listener.close()

    run_virtual(check())


def test_a_node_that_is_stopped_does_not_linger() -> None:
    async def check() -> None:
        listener = Listener()

        async def stop(connection: ProxyConnection) -> None:
            await connection.request(Kind.STOP)

        assert await listener.run(stop, linger_seconds=LINGER_SECONDS) < 0.1
        await listener.close()

    run_virtual(check())


def test_a_node_does_not_go_while_anything_is_on_its_way_there_or_back() -> None:
    async def check() -> None:
        listener = Listener(LinkConfig(bytes_per_second=1 << 20, window_bytes=16 << 10))
        assert 2.0 < await listener.run(put_and_get, linger_seconds=0.1) < 2.5
        await listener.close()

    run_virtual(check())


def test_a_node_does_not_wait_for_ever_for_a_proxy_that_takes_nothing() -> None:
    async def check() -> None:
        listener = Listener(LinkConfig(bytes_per_second=1 << 20, window_bytes=16 << 10))

        async def stand_still(connection: ProxyConnection) -> None:
            asking = asyncio.ensure_future(put_and_get(connection))
            await asyncio.sleep(1.5)  # a second there, and half of it back
            listener.network.links[0].ends[1].freeze()
            await asyncio.sleep(20.0)
            asking.cancel()
            await asyncio.wait([asking])

        assert await listener.run(stand_still, linger_seconds=0.1) < 15.0
        listener.network.links[0].ends[1].thaw()
        await listener.close()

    run_virtual(check())


def test_at_its_deadline_a_node_that_is_still_sending_takes_a_little_longer_to_say_that_it_goes() -> None:
    async def check() -> None:
        listener = Listener(LinkConfig(bytes_per_second=1 << 20, window_bytes=16 << 10))

        # A second there and a second back, and it is to go when half of it is back.
        seconds = await listener.run(put_and_get, seconds=1.5, linger_seconds=LINGER_SECONDS)
        assert 2.0 < seconds < 2.5
        assert listener.notices == [Kind.LEAVING]
        await listener.close()

    run_virtual(check())
